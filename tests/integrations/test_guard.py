from __future__ import annotations

import copy
import gc
import json
import socket
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from warm import WarmPython

from batchfinder import OOMGuard
from batchfinder.errors import BatchFinderWarning, DeviceError, UsageError
from batchfinder.integrations.split_batch import split_batch

TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.filterwarnings("ignore:a batch of .* ran out of memory")


class Small(nn.Module):
    """A model in float64 that runs out of memory above a number of examples."""

    def __init__(self, fits: int, where: str = "forward") -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.fits = fits
        self.where = where
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        y: Tensor = self.layers(x)
        if len(x) > self.fits:
            if self.where == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            y.register_hook(run_out)  # type: ignore[no-untyped-call]
        return y


def run_out(_: Tensor) -> Tensor:
    raise RuntimeError("CUDA error: out of memory")


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return (
        torch.randn(size, 3, generator=generator, dtype=torch.float64),
        torch.randn(size, 2, generator=generator, dtype=torch.float64),
    )


def trained(model: nn.Module, batch: Any) -> list[Tensor]:
    """The parameters after one plain step on the whole batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("size", "fits"), [(8, 8), (8, 4), (13, 3), (7, 1), (64, 5)])
def test_a_split_step_trains_as_the_whole_batch_does(where: str, size: int, fits: int) -> None:
    model = Small(fits, where)
    plain = copy.deepcopy(model)
    plain.fits = size
    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    guard.step(batch_of(size))
    for ours, theirs in zip(model.parameters(), trained(plain, batch_of(size)), strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-6, atol=1e-12)
    assert guard.batch_size is None if fits >= size else 1 <= (guard.batch_size or 0) <= fits


def test_a_loop_may_scale_clip_and_step_by_itself() -> None:
    model = Small(3)
    plain = copy.deepcopy(model)
    plain.fits = 10
    x, y = batch_of(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    guard = OOMGuard(
        model, optimizer, lambda out, batch: scaler.scale(nn.functional.mse_loss(out, batch[1]))
    )

    with pytest.warns(BatchFinderWarning, match="in parts of 3") as told:
        scaled = guard.backward((x, y))
    scaler.unscale_(optimizer)
    loss = nn.functional.mse_loss(plain(x), y)
    loss.backward()  # type: ignore[no-untyped-call]

    assert told[0].filename == __file__
    torch.testing.assert_close(scaled, 1024 * loss.detach())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
        assert torch.equal(ours, theirs)  # the optimizer's step is the caller's


def test_the_first_split_is_told_once() -> None:
    model = Small(4)
    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert repr(guard) == "<OOMGuard: Small, whole batches in one forward pass>"
    with pytest.warns(BatchFinderWarning, match="a batch of 10 .* in parts of 3: slower") as told:
        guard.step(batch_of(10))
    assert repr(guard) == "<OOMGuard: Small, at most 3 examples in one forward pass>"
    assert told[0].filename == __file__  # the user's own line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guard.step(batch_of(20))
        model.fits = 2
        guard.step(batch_of(20))
        OOMGuard(model, guard.optimizer, batch_size=2).step(batch_of(10))


def test_an_error_in_the_middle_of_accumulation_drops_the_parts_before_it() -> None:
    model = Small(100)
    plain = copy.deepcopy(model)
    calls: list[int] = []

    def loss_fn(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        calls.append(len(output))
        if len(calls) == 3:  # the third of four parts
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return nn.functional.mse_loss(output, batch[1])

    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, batch_size=4)
    loss = guard.step(batch_of(16))
    assert calls == [4] * 3 + [2] * 8
    expected = nn.functional.mse_loss(plain(batch_of(16)[0]), batch_of(16)[1])
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=0)
    for ours, theirs in zip(model.parameters(), trained(plain, batch_of(16)), strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-6, atol=1e-12)


def test_the_size_that_worked_is_kept_and_grows_again_after_quiet_steps() -> None:
    model = Small(4)
    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.0), grow_after=3)
    for _ in range(4):
        guard.step(batch_of(8))
    # Whole, halved; kept for three steps; then 8 is tried again, fails, and the wait doubles.
    assert model.seen == [8, 4, 4, *[4, 4] * 2, 8, 4, 4]
    model.seen.clear()
    for _ in range(5):
        guard.step(batch_of(8))
    assert model.seen == [4, 4] * 5
    model.fits = 8
    guard.step(batch_of(8))
    guard.step(batch_of(8))
    assert model.seen[-1] == 8


def test_one_example_that_does_not_fit_is_one_clear_error() -> None:
    model = Small(0)
    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(DeviceError, match=r"not even one example of sample\[0\] \[4, 3\]"):
        guard.step(batch_of(4))
    assert model.seen == [4, 2, 1]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_errors_of_the_users_own_are_raised_as_they_are() -> None:
    model = Small(8)
    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        guard.step((torch.zeros(4, 5, dtype=torch.float64), torch.zeros(4, 2)))
    assert model.seen == [4]


def test_an_optimizer_without_room_is_not_repeated() -> None:
    model = Small(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def no_room(*_: Any) -> None:
        run_out(torch.zeros(()))

    optimizer.register_step_pre_hook(no_room)
    with pytest.raises(DeviceError, match="a smaller batch does not help"):
        OOMGuard(model, optimizer).step(batch_of(4))
    assert model.seen == [4]


def test_statistics_of_batch_norm_forget_the_failed_try_and_the_user_is_warned_once() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.head = Small(4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.norm(x.float()).double())
            return y

    model = Normed()
    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(BatchFinderWarning, match="BatchNorm"):
        guard.step(batch_of(8))
    assert model.norm.num_batches_tracked == 2  # two parts; not the whole batch that failed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guard.step(batch_of(8))


def test_nothing_of_a_failed_step_is_kept() -> None:
    outputs: list[weakref.ref[Tensor]] = []

    def loss_fn(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        assert not any(reference() is not None for reference in outputs)
        if len(output) > 4:
            outputs.append(weakref.ref(output))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return nn.functional.mse_loss(output, batch[1])

    model = Small(100)
    gc.disable()
    try:
        OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn).step(batch_of(8))
    finally:
        gc.enable()
    assert len(outputs) == 1


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(1, 60))
def test_parts_are_the_batch_in_order_and_of_nearly_equal_size(examples: int, size: int) -> None:
    x = torch.arange(examples)
    batch: dict[str, Any] = {"x": x, "y": x[:, None], "mask": torch.ones(2, 2)}
    batch["text"] = ["a"] * examples
    parts = list(split_batch(batch, size))
    assert torch.equal(torch.cat([part["x"] for part, _ in parts]), x)
    assert sum(share for _, share in parts) == pytest.approx(1)
    sizes = [len(part["x"]) for part, _ in parts]
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1
    assert [len(part["text"]) for part, _ in parts] == sizes


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"grow_after": 0}])
def test_numbers_below_one_are_refused(wrong: dict[str, Any]) -> None:
    model = Small(8)
    with pytest.raises(UsageError, match="must be at least 1, not 0"):
        OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1), **wrong)


def train_on_a_rank(rank: int, port: int, wrap: bool) -> tuple[int | None, list[int], list[Any]]:
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Small(8 if rank else 3)  # rank 0 has less room
    given = DistributedDataParallel(model) if wrap else model
    guard = OOMGuard(given, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = batch_of(16)
    guard.step((x[rank::2], y[rank::2]))
    dist.destroy_process_group()
    return guard.batch_size, model.seen[-4:], [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("wrap", [True, False])
def test_ranks_split_alike_and_train_as_one_process_does(wrap: bool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = "import json; from integrations.test_guard import train_on_a_rank as train; print(json."
    ranks = [
        WarmPython("-c", f"{code}dumps(train({rank}, {port}, {wrap})))", PYTHONPATH=str(TESTS))
        for rank in (0, 1)
    ]
    answers = [process.communicate() for process in ranks]
    torch.manual_seed(0)
    expected = trained(Small(16), batch_of(16))
    for printed, errors in answers:
        assert printed, errors
        batch_size, last_seen, parameters = json.loads(printed)
        assert (batch_size, last_seen) == (2, [2, 2, 2, 2])
        for ours, theirs in zip(parameters, expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), theirs)
