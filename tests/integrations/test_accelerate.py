from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from batchfinder.errors import DeviceError, NothingFitsError, UsageError
from batchfinder.integrations.accelerate import find_executable_batch_size


def run_out() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def fits_up_to(limit: int, tried: list[int]) -> Callable[..., int]:
    def train(batch_size: int, *arguments: Any) -> int:
        tried.append(batch_size)
        if batch_size > limit:
            run_out()
        return batch_size

    return train


def test_sizes_go_down_as_accelerate_s_do_and_stay_there() -> None:
    tried: list[int] = []
    train = find_executable_batch_size(fits_up_to(13, tried), starting_batch_size=18)
    assert (train(), train()) == (12, 12)
    assert tried == [18, 16, 14, 12, 12]


def test_a_function_of_the_user_s_says_the_next_size() -> None:
    sizes = iter([100, 7])
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=128, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size: int, epochs: int) -> tuple[int, int]:
        return fits_up_to(8, tried)(batch_size), epochs

    assert train(3) == (7, 3)
    assert tried == [128, 100, 7]


def test_later_calls_grow_and_each_of_them_returns_a_result() -> None:
    tried: list[int] = []

    def decorated_anew() -> Any:
        return find_executable_batch_size(
            fits_up_to(50, tried), starting_batch_size=16, max_batch_size=1000
        )

    results = [decorated_anew()() for _ in range(7)]
    assert results == [16, 32, 32, 48, 48, 48, 50]
    assert tried == [16, 32, 64, 32, 48, 56, 48, 52, 48, 50]
    bounded = find_executable_batch_size(lambda n: n, starting_batch_size=16, max_batch_size=24)
    assert [bounded() for _ in range(3)] == [16, 24, 24]


def test_a_size_that_worked_may_fail_later() -> None:
    limits = [100]
    tried: list[int] = []

    def train(batch_size: int) -> int:
        return fits_up_to(limits[0], tried)(batch_size)

    run = find_executable_batch_size(train, starting_batch_size=64, max_batch_size=64)
    first = run()
    limits[0] = 60
    assert [first, run(), run()] == [64, 57, 60 // 2 * 2]
    assert tried == [64, 64, 57, 60]


def test_the_tensors_of_a_failed_call_are_gone_before_the_next() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> None:
        assert all(tensor() is None for tensor in alive)
        activations = torch.ones(batch_size)
        alive.append(weakref.ref(activations))
        if batch_size > 7:
            run_out()

    train()
    gc.collect()


def test_errors_of_other_kinds_pass_and_zero_is_the_end() -> None:
    train = find_executable_batch_size(fits_up_to(0, []), starting_batch_size=4)
    with pytest.raises(RuntimeError, match=r"^No executable batch size found, reached zero\."):
        train()
    assert issubclass(NothingFitsError, DeviceError)
    with pytest.raises(ZeroDivisionError):
        find_executable_batch_size(lambda size: size // 0)()
    poisoned = RuntimeError("CUDA error: an illegal memory access was encountered")

    @find_executable_batch_size
    def broken(batch_size: int) -> None:
        raise poisoned

    with pytest.raises(RuntimeError, match="illegal memory access"):
        broken()


def test_a_batch_size_that_the_caller_passes_is_refused() -> None:
    @find_executable_batch_size
    def train(batch_size: int, model: str) -> None: ...

    with pytest.raises(TypeError, match=r"Try `train\(model=gpt\)`"):
        train(128, "gpt")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"max_batch_size": 9, "reduce_batch_size_fn": int}, "cannot grow"),
        ({"max_batch_size": 9}, "Try max_batch_size=128"),
    ],
)
def test_growing_has_to_make_sense(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        find_executable_batch_size(**wrong)


def test_what_it_does_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "batchfinder"):
        find_executable_batch_size(fits_up_to(14, []), starting_batch_size=15)()
    assert [record.message for record in caplog.records] == [
        "train: batch size 15 ran out of memory (CUDA out of memory. Tried to allocate 2.00 GiB.)",
        "train: batch size 13 works",
    ]
