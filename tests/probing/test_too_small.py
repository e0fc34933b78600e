"""Layers that need more than one example."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from batchfinder.probing.devices.oom import classify
from batchfinder.probing.too_small import needs_more_than_one_sample


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
