"""Layers that need more than one example."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from batchfinder.probing.devices.oom import classify
from batchfinder.probing.too_small import needs_more_than_one_sample, sizes_that_run


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(3), (1, 3)),
        (nn.BatchNorm2d(3), (1, 3, 1, 1)),
        (nn.GroupNorm(3, 3), (1, 3)),
    ],
)
def test_a_layer_that_needs_more_than_one_sample_is_recognised(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="more than 1 value") as caught:
        layer(torch.ones(shape))
    assert needs_more_than_one_sample(caught.value)
    with pytest.raises(RuntimeError) as chained:
        raise RuntimeError("the trainer gave up") from caught.value
    assert needs_more_than_one_sample(chained.value)
    assert classify(caught.value) is None


def test_other_complaints_do_not_ask_for_a_larger_batch() -> None:
    # One spatial element stays one, however many samples there are.
    with pytest.raises(ValueError, match="more than 1 spatial element") as caught:
        nn.InstanceNorm1d(3)(torch.ones(4, 3, 1))
    assert not needs_more_than_one_sample(caught.value)
    assert not needs_more_than_one_sample(RuntimeError("CUDA out of memory."))


@pytest.mark.parametrize(
    ("takes", "first", "sample_size", "least", "multiple_of"),
    [
        (lambda n: n > 1, 1, 32, 2, 1),  # squeezes a batch of 1
        (lambda n: n > 4, 1, 32, 8, 1),
        (lambda n: n % 2 == 0, 1, None, 2, 2),  # mixes images in pairs
        (lambda n: n % 2 == 0 or n == 3, 1, 1, 2, 2),  # the third is broadcast
        (lambda n: n % 3 == 0, 1, 12, 3, 3),
        (lambda n: n % 4 == 0, 1, 64, 4, 4),
        (lambda n: n % 2 == 0, 7, 64, 2, 2),  # the user allows no smaller size than 7
        (lambda n: n % 4 == 0, 9, 64, 4, 4),
    ],
)
def test_other_sizes_show_what_the_code_takes(
    takes: Callable[[int], bool], first: int, sample_size: int | None, least: int, multiple_of: int
) -> None:
    found = sizes_that_run(first, "ValueError: no", sample_size, takes)
    assert found is not None
    assert (found.least, found.multiple_of) == (least, multiple_of)


def test_an_error_that_the_size_does_not_explain_is_the_codes_own() -> None:
    tried: list[int] = []

    def never(size: int) -> bool:
        tried.append(size)
        return False

    assert sizes_that_run(1, "ValueError: no", 64, never) is None
    assert tried == [2, 64]
    assert sizes_that_run(1, "ValueError: no", None, never) is None
    assert sizes_that_run(7, "ValueError: no", 64, lambda size: size < 7) is None
