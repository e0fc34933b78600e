"""Wrappers around a model that the simulation leaves out."""

from __future__ import annotations

from torch import nn

from batchfinder.training.parallel import is_compiled, uncompiled

_COMPILED = (
    "the model is estimated without torch.compile; compiled, it usually uses less memory. Try "
    "batchfinder find to measure it"
)
_DATA_PARALLEL = (
    "nn.DataParallel splits each batch over several GPUs, but the estimate is for one GPU with the "
    "whole batch. Try --strategy ddp to estimate a rank of DistributedDataParallel"
)


def remarks_on_wrappers(model: nn.Module) -> list[str]:
    """Return warnings about the wrappers of a model."""
    remarks = []
    modules = list(model.modules())
    if any(is_compiled(module) for module in modules):
        remarks.append(_COMPILED)
    if any(isinstance(module, nn.DataParallel) for module in modules):
        remarks.append(_DATA_PARALLEL)
    return remarks


def without_compile(model: nn.Module) -> nn.Module:
    """Return the model without the wrappers of ``torch.compile``; it is changed in place."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if is_compiled(child):
                setattr(module, name, uncompiled(child))
    return uncompiled(model)
