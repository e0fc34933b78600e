"""What wraps a model and is not simulated."""

from __future__ import annotations

from typing import cast

from torch import nn

_COMPILED = (
    "the model is compiled by torch.compile, and estimated as if it were not: compiled it mostly "
    "takes less memory; batchfinder find measures it"
)
_DATA_PARALLEL = (
    "nn.DataParallel splits each batch over several GPUs, and the estimate is for one that gets "
    "all of it; --strategy ddp estimates a rank of DistributedDataParallel"
)


def remarks_on_wrappers(model: nn.Module) -> list[str]:
    """What the user should know of how a model is wrapped.

    Example:
        >>> remarks_on_wrappers(nn.Linear(1, 1))
        []
    """
    remarks = []
    modules = list(model.modules())
    if any(_is_compiled(module) for module in modules):
        remarks.append(_COMPILED)
    if any(isinstance(module, nn.DataParallel) for module in modules):
        remarks.append(_DATA_PARALLEL)
    return remarks


def without_compile(model: nn.Module) -> nn.Module:
    """The model without the wrappers that ``torch.compile`` has put around it and in it.

    Args:
        model: is changed in place.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if _is_compiled(child):
                setattr(module, name, child._orig_mod)
    return cast("nn.Module", model._orig_mod) if _is_compiled(model) else model


def _is_compiled(module: nn.Module) -> bool:
    # By its name: to import its class takes a second.
    return type(module).__name__ == "OptimizedModule"
