"""One training step on tensors without data, and the tensors that it begins with."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from batchfinder.simulation.trace.trace import Kind
from batchfinder.simulation.tracing.tracker import StorageTracker
from batchfinder.simulation.values.known import know, let_go, value_of
from batchfinder.training.step import TrainingStep
from batchfinder.training.tree import map_leaves


def run_step(step: TrainingStep, host_batch: Any, evaluated: Any, tracker: StorageTracker) -> None:
    """Run one step on a batch, and validate if the step does."""
    for micro_batch in step.fetch(lambda: on_device(host_batch, tracker)):
        step.forward_backward(micro_batch)
    step.optimizer_step()
    if step.eval_batch_size:
        step.validate(lambda: on_device(evaluated, tracker))


def states_on_device(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's initial states on the device; step counters are on the host."""
    states = tree_leaves(list(optimizer.state.values()))
    return [state for state in states if isinstance(state, torch.Tensor) and state.dim()]


def on_device(host_batch: Any, tracker: StorageTracker) -> Any:
    """Copy a batch, as a move to the device does; each step has its own copy."""

    def move(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        moved = torch.empty_like(leaf)
        value = value_of(leaf)
        if value is None:
            let_go(moved)
        else:
            know(moved, value)
        tracker.label([moved], Kind.INPUT)
        return moved

    return map_leaves(move, host_batch)
