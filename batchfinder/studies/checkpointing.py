"""Turn activation checkpointing of a model on or off. The model is restored later."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from batchfinder.errors import StepError
from batchfinder.training.parallel import repeated_blocks
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.state.undo import contents_kept
from batchfinder.training.step_source import StepSource

SELECTIVE, NONE = "selective-checkpointing", "no-checkpointing"

# What the modules of Transformers, diffusers and timm call the flag that turns it on.
_FLAGS = "gradient_checkpointing", "grad_checkpointing"

# Results that selective checkpointing keeps, because they are slow to compute again.
_KEPT = {
    "mm", "addmm", "bmm", "baddbmm", "convolution", "linear",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
}  # fmt: skip


def model_kept(model: nn.Module) -> AbstractContextManager[None]:
    """Restore the modules, parameters, hooks and flags of a model when the block ends."""
    spaces = [vars(module) for module in model.modules()]
    containers = [value for space in spaces for value in space.values() if isinstance(value, dict)]
    return contents_kept([*spaces, *containers])


def is_checkpointed(setup: TrainingSetup) -> bool:
    """Return True if a model, or its Trainer, has turned on activation checkpointing."""
    flags = (getattr(m, flag, False) for m in setup.model.modules() for flag in _FLAGS)
    return any(flags) or (isinstance(setup.step, StepSource) and setup.step.checkpoints)


def with_checkpointing(setup: TrainingSetup, how: str) -> tuple[TrainingSetup, str]:
    """Checkpoint a setup in place of what it has turned on. :func:`model_kept` undoes the change.

    Returns:
        The setup, and the blocks that are recomputed; "" if none are.

    Raises:
        StepError: the model cannot be checkpointed, or nothing is on that could be turned off.
    """
    if how == NONE and not is_checkpointed(setup):
        raise StepError(
            "neither the model nor its Trainer has turned checkpointing on. Try checkpointing."
        )
    for module in setup.model.modules():
        vars(module).update({flag: False for flag in _FLAGS if hasattr(module, flag)})
    if isinstance(setup.step, StepSource) and setup.step.checkpoints:
        step = copy.copy(setup.step)
        step.checkpoints = False
        setup = dataclasses.replace(setup, step=step)
    return setup, "" if how == NONE else apply_checkpointing(setup.model, how)


def apply_checkpointing(model: nn.Module, how: str) -> str:
    """Recompute a model's blocks in the backward pass. :func:`model_kept` undoes the change.

    The model's own method comes first (``gradient_checkpointing_enable`` of Transformers,
    ``set_grad_checkpointing`` of timm). Otherwise ``apply_activation_checkpointing`` is used.

    Args:
        model: any model.
        how: ``"checkpointing"``, or ``"selective-checkpointing"``, which keeps the results of
            matrix products, convolutions and attention.

    Returns:
        The blocks that are recomputed, such as ``"12 x Block (blocks.0 to blocks.11)"``.

    Raises:
        StepError: the model offers no checkpointing and has no repeated blocks, or PyTorch is too
            old for this kind.
    """
    blocks = repeated_blocks(model)
    is_selective = how == SELECTIVE
    own = _own_checkpointing(model, is_selective)
    if own is not None:
        return f"{_described(model, blocks)}, by {own}" if blocks else f"what {own} covers"
    if not blocks:
        raise StepError(
            "the model has no repeated blocks to checkpoint, and no checkpointing of its own. "
            "Try torch.utils.checkpoint.checkpoint in its forward()."
        )
    described = _described(model, blocks)
    chosen = {*blocks}
    options = _selective_options() if is_selective else {}
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, **options),
        check_fn=lambda module: module in chosen,
    )
    return described


def _own_checkpointing(model: nn.Module, is_selective: bool) -> str | None:
    """Turn on the model's own checkpointing and return its name; None if it has none."""
    options = {"use_reentrant": False, **(_selective_options() if is_selective else {})}
    for kind in ("activation", "gradient"):  # "activation" since Transformers 5
        enable = getattr(model, f"{kind}_checkpointing_enable", None)
        if callable(enable) and _ran(enable, **{f"{kind}_checkpointing_kwargs": options}):
            return f"{enable.__name__}()"
    enable = getattr(model, "set_grad_checkpointing", None)
    if callable(enable) and not is_selective and _ran(enable):
        return "set_grad_checkpointing()"
    return None


def _ran(enable: Callable[..., Any], **options: Any) -> bool:
    try:
        enable(**options)
    except (ValueError, AssertionError, NotImplementedError):  # the model does not support it
        return False
    return True


def _selective_options() -> dict[str, Any]:
    try:
        from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
    except ImportError:
        raise StepError(
            f"selective checkpointing needs PyTorch 2.5 or newer, and this is {torch.__version__}. "
            "Try checkpointing."
        ) from None

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_operator = isinstance(operator, torch._ops.OpOverload)
        is_kept = is_operator and operator.overloadpacket.__name__ in _KEPT
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}


def _described(model: nn.Module, blocks: list[nn.Module]) -> str:
    names = {id(module): name for name, module in model.named_modules()}
    kinds = Counter(type(block).__name__ for block in blocks)
    counted = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    first, last = names[id(blocks[0])], names[id(blocks[-1])]
    return f"{counted} ({first} to {last})"
