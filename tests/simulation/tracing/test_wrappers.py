"""Wrapped models are estimated without the wrapper, with a warning."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from batchfinder import BatchFinderWarning, estimate_max_batch

# The default backend would load the compiler, and a process that has it is not forked any more:
# later tests in the same process would find another way of probing.
compiled = partial(torch.compile, backend="eager")


@pytest.mark.parametrize(
    ("wrap", "said"),
    [(compiled, "without torch.compile"), (nn.DataParallel, "splits each batch")],
    ids=["compile", "DataParallel"],
)
def test_a_wrapped_model(
    wrap: Callable[..., Any], said: str, recwarn: pytest.WarningsRecorder
) -> None:
    model, sample = nn.Linear(64, 64), torch.randn(2, 64)
    bare = estimate_max_batch(model, sample, gpu="t4", loss_fn=lambda y, _: y.sum())
    wrapper = wrap(nn.Sequential(wrap(model)))
    recwarn.clear()
    wrapped = estimate_max_batch(wrapper, sample, gpu="t4", loss_fn=lambda y, _: y.sum())
    assert wrapped.batch_size == bare.batch_size
    told = [str(warning.message) for warning in recwarn]
    assert [text for text in told if said in text] == told
    assert {warning.category for warning in recwarn} == {BatchFinderWarning}
