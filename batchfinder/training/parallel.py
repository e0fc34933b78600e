"""Wrap the model for data-parallel training: DistributedDataParallel or fully sharded (FSDP2).

Both need an initialized process group of torch.distributed. The user's own wrappers are recognized,
and those of ``torch.compile``, whose compiled code is forgotten between sizes.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from batchfinder.errors import StepError
from batchfinder.training.setup import DTYPES, TrainingSetup

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# Classes whose modules are sharded, by name: DeepSpeed may be missing.
_SHARDED = {"FSDPModule", "FullyShardedDataParallel", "DeepSpeedEngine"}


def ranks() -> int:
    """Return the number of ranks that train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_wrapped(model: nn.Module) -> bool:
    """Return True if the user has already wrapped the model for data-parallel training."""
    return isinstance(model, DistributedDataParallel) or is_sharded(model)


def is_sharded(model: nn.Module) -> bool:
    """Return True if ranks share the model's parameters, or a part of the model does so.

    That is after ``fully_shard``, FullyShardedDataParallel, DeepSpeed or tensor parallelism.
    """
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    is_split = any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
    return is_split or not kinds.isdisjoint(_SHARDED)


def waits_within_passes(model: nn.Module) -> tuple[str, str]:
    """Return why several ranks wait for each other within a model's passes; "" if they do not.

    The second text is the strategy of such a job.
    """
    if is_sharded(model):
        return "is sharded already", "fsdp"
    has_synchronized = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    return "has SyncBatchNorm" if has_synchronized else "", "ddp"


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel; the model itself if it is not wrapped."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile``; the module itself if it is not compiled."""
    return cast("nn.Module", module._orig_mod) if is_compiled(module) else module


def inner_module(model: nn.Module) -> nn.Module:
    """Return the user's module inside DistributedDataParallel and ``torch.compile``."""
    return unwrapped(uncompiled(unwrapped(model)))


def is_compiled(module: nn.Module) -> bool:
    """Return True for a module from ``torch.compile``. Importing its class would take a second."""
    return type(module).__name__ == "OptimizedModule"


def has_compiled() -> bool:
    """Return True if this process has compiled anything, such as in the user's own code."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"]["total"])


def forget_compiled() -> None:
    """Let the next step compile as the first of a training does, for one batch size.

    After a step at another size, PyTorch would compile for any size. Such code keeps other tensors
    for the backward pass: 14 % less of a GPT-2, whose training then died at the answer.
    """
    if has_compiled():
        torch.compiler.reset()


def parallelized(
    setup: TrainingSetup, strategy: str, device: torch.device, precision: str = "fp32"
) -> nn.Module:
    """Return the setup's model, wrapped for training by all ranks. Keep what the user wrapped.

    Args:
        setup: for ``"ddp"``, its model is on the device. For ``"fsdp"`` it may be anywhere:
            sharding moves it to the device block by block and changes it in place.
        strategy: ``"ddp"`` or ``"fsdp"``.
        device: the device to train on.
        precision: for ``"fsdp"``, the dtype of gathered parameters and of computation. Gradients
            are reduced in fp32.
    """
    model = setup.model
    # If nothing can be trained, make_optimizer raises a clearer error than DDP.
    if is_wrapped(model) or not any(p.requires_grad for p in model.parameters()):
        return model
    if strategy == "ddp":
        return DistributedDataParallel(model, [device] if device.type == "cuda" else None)
    if isinstance(setup.optimizer, Optimizer):
        raise StepError(
            "the optimizer was made before the model is sharded, which replaces the parameters; "
            "give a factory such as lambda parameters: SGD(parameters), or shard the model before"
        )
    # Imported here: some builds of PyTorch lack it, and a single process does not need it.
    from torch.distributed.device_mesh import init_device_mesh

    shard(model, init_device_mesh(device.type, (dist.get_world_size(),)), precision)
    return model


def shard(
    model: nn.Module, mesh: Any, precision: str = "fp32", *, keep_gathered: bool = False
) -> None:
    """Shard a model over the ranks of a mesh, block by block, in place.

    Parameters stay gathered from the forward to the backward pass if ``keep_gathered``.
    """
    fsdp = fully_sharding()
    if mesh.device_type == "cpu" and not has_fully_shard_on_cpu():
        raise StepError(
            "fully_shard without a GPU, and an estimate of it, needs PyTorch 2.7 or newer, and "
            f"this is {torch.__version__}"
        )
    options: dict[str, Any] = {"mesh": mesh}
    if keep_gathered:
        options["reshard_after_forward"] = False
    if precision != "fp32":
        options["mp_policy"] = fsdp.MixedPrecisionPolicy(
            param_dtype=DTYPES[precision], reduce_dtype=torch.float32
        )
    for block in repeated_blocks(model):
        fsdp.fully_shard(block, **options)
    fsdp.fully_shard(model, **options)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: modules with parameters, of one class, side by side.

    Only the outermost blocks are returned. ``fully_shard`` is meant to gather each as a whole
    (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html). A block that shares a
    parameter with the rest of the model is left out, because sharding it would end the sharing.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> [type(b).__name__ for b in repeated_blocks(nn.TransformerEncoder(layer, 3))]
        ['TransformerEncoderLayer', 'TransformerEncoderLayer', 'TransformerEncoderLayer']
    """
    blocks: list[nn.Module] = []
    pending = [model]
    while pending:
        parent = pending.pop(0)
        repeated = _repeated_children(parent)
        for child in parent.children():
            # Two embeddings side by side in a model are no blocks. Two layers in a list are.
            is_built = isinstance(parent, _LISTS) or any(True for _ in child.children())
            is_block = child in repeated and is_built and not _is_list(child, parent)
            (blocks if is_block else pending).append(child)
    users = _parameter_users(model)
    return [
        block for block in dict.fromkeys(blocks) if _parameter_users(block).items() <= users.items()
    ]


def _is_list(child: nn.Module, parent: nn.Module) -> bool:
    """Return True for a list of blocks, which is no block.

    A sequence of plain layers is a block if it has a class of its own, as U-Net's two convolutions,
    or is in a list. The halves of an autoencoder are not: as wholes, they would save nothing.
    """
    inner = _repeated_children(child) if isinstance(child, _LISTS) else []
    is_plain = all(next(part.children(), None) is None for part in inner)
    is_named = type(child) is not nn.Sequential or isinstance(parent, _LISTS)
    return bool(inner) and not (isinstance(child, nn.Sequential) and is_plain and is_named)


def _repeated_children(parent: nn.Module) -> list[nn.Module]:
    """Return the children that have parameters and siblings of their class."""
    children = [child for child in parent.children() if any(True for _ in child.parameters())]
    times = Counter(map(type, children))
    return [child for child in children if times[type(child)] > 1]


def _parameter_users(model: nn.Module) -> dict[int, int]:
    """Count the modules that hold each parameter of a model, by the parameter's id."""
    return Counter(
        id(parameter)
        for _, module in model.named_modules(remove_duplicate=False)
        for parameter in module.parameters(recurse=False)
    )


def has_fully_shard_on_cpu() -> bool:
    """Return True if ``fully_shard`` works without a GPU: its streams need PyTorch 2.7."""
    return torch.__version__ >= "2.7"


def fully_sharding() -> Any:
    """Return the module of PyTorch that has ``fully_shard``."""
    try:
        from torch.distributed import fsdp

        if hasattr(fsdp, "fully_shard"):  # PyTorch 2.6
            return fsdp
    except ImportError:
        pass
    from torch.distributed._composable import fsdp as earlier

    return earlier
