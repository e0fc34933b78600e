"""A setup on the device that it is trained on."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from batchfinder.errors import StepError
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.state.anatomy import tensors_of
from batchfinder.training.state.reach import reachable


def move_to_device(setup: TrainingSetup, device: torch.device) -> None:
    """Bring the model to a device, in place and into training mode, and what is trained with it.

    That is a loss module, which may have weights of its own, the states of an optimizer, and what
    :func:`move_beside` moves.

    Raises:
        StepError: the model is on the meta device, or spread over several accelerators.
    """
    modules = [part for part in (setup.model, setup.loss_fn) if isinstance(part, nn.Module)]
    tensors = [tensor for module in modules for tensor in tensors_of(module)]
    if device.type != "meta" and any(tensor.is_meta for tensor in tensors):
        raise StepError(
            "the model is on the meta device and has no values to train with: build it without "
            'torch.device("meta"), or end its function with model.to_empty(device="cpu"); '
            "`batchfinder estimate` takes it as it is"
        )
    homes = homes_of(setup.model)
    accelerators = sorted(str(home) for home in homes if home.type not in ("cpu", "meta"))
    if len(accelerators) > 1:
        raise StepError(
            f"the model is spread over {' and '.join(accelerators)}; batch sizes are found for one "
            "device, or for a whole model on each of several: load it without device_map, or give "
            "torchrun the function that builds it and --strategy fsdp"
        )
    for module in modules:
        _move_module(module, device)
        for part in _in_evaluation(module):
            part.train()
    if isinstance(setup.optimizer, Optimizer):
        _move_optimizer(setup.optimizer, device)
    move_beside(setup, device, homes)


def _in_evaluation(module: nn.Module) -> list[nn.Module]:
    """The outermost modules to bring into training mode: the whole, or the base below an adapter.

    ``from_pretrained()`` returns a model in evaluation mode, and ``get_peft_model()`` puts it as it
    is below a root in training mode. Dropout and checkpointing are off in such a model.
    """
    return [module] if not module.training else untrained_bases(module)


def untrained_bases(module: nn.Module) -> list[nn.Module]:
    """The models of transformers in evaluation mode, below a root that trains parts of them."""
    return [
        part
        for part in (module.modules() if module.training else ())
        if not part.training
        and hasattr(part, "gradient_checkpointing_enable")
        and any(parameter.requires_grad for parameter in part.parameters())
    ]


def homes_of(model: nn.Module) -> set[torch.device]:
    """The devices that a model's tensors lie on."""
    return {tensor.device for tensor in tensors_of(model)}


def move_beside(setup: TrainingSetup, device: torch.device, homes: set[torch.device]) -> None:
    """Bring what the step and the loss function reach to a device.

    Modules, if they lie where the model lay, and the states of optimizers whose parameters are
    there: the discriminator of a GAN, say. Their training mode stays, as a teacher's does.
    """
    own = {*setup.model.modules()}
    reached = [*reachable(setup.functions)]
    for module in reached:
        if not isinstance(module, nn.Module) or module in own:
            continue
        if all(tensor.device in homes for tensor in tensors_of(module)):
            _move_module(module, device)
    for optimizer in reached:
        if not isinstance(optimizer, Optimizer):
            continue
        if all(p.device == device for group in optimizer.param_groups for p in group["params"]):
            _move_optimizer(optimizer, device)


def _move_module(module: nn.Module, device: torch.device) -> None:
    # One that is there already stays untouched: fake tensors, for one, cannot be moved.
    if any(tensor.device != device for tensor in tensors_of(module)):
        module.to(device)


def _move_optimizer(optimizer: Optimizer, device: torch.device) -> None:
    for group in optimizer.param_groups:
        # Adam's step counters stay on the host, unless a kernel on the device reads them.
        counts_on_host = not (group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and not (name == "step" and counts_on_host):
                    state[name] = value.to(device)
