"""Move a setup to the device that it is trained on."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from batchfinder.errors import StepError
from batchfinder.training.optimizer import parameters_of
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.state.anatomy import tensors_of
from batchfinder.training.state.reach import reachable


def move_to_device(setup: TrainingSetup, device: torch.device) -> None:
    """Move the model to a device, in place, and put it into training mode.

    A loss module (which may have weights), the states of an optimizer, and everything that
    :func:`move_beside` moves go with it.
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
        for part in untrained_bases(module) if module.training else [module]:
            part.train()
    if isinstance(setup.optimizer, Optimizer):
        _move_optimizer(setup.optimizer, device)
    move_beside(setup, device, homes)


def refuse_offloaded(model: nn.Module) -> None:
    """Raise a StepError if Accelerate keeps weights elsewhere: no gradients reach them there."""
    for name, part in model.named_modules():
        hook = getattr(part, "_hf_hook", None)
        if any(getattr(one, "offload", False) for one in (hook, *getattr(hook, "hooks", ()))):
            raise StepError(
                f"the weights of {name or 'the model'} are offloaded to the CPU or to disk (by a "
                "device_map), so they cannot be trained. Try loading the model without device_map, "
                "in 4 bits if it is too large."
            )


def untrained_bases(module: nn.Module) -> list[nn.Module]:
    """Return the transformers models in evaluation mode below a root that trains parts of them.

    ``from_pretrained()`` returns a model in evaluation mode. ``get_peft_model()`` puts it below a
    root in training mode without changing it. Dropout and checkpointing are off in such a model.
    """
    return [
        part
        for part in (module.modules() if module.training else ())
        if not part.training
        and hasattr(part, "gradient_checkpointing_enable")
        and any(parameter.requires_grad for parameter in part.parameters())
    ]


def homes_of(model: nn.Module) -> set[torch.device]:
    """Return the devices of a model's tensors."""
    return {tensor.device for tensor in tensors_of(model)}


def move_beside(setup: TrainingSetup, device: torch.device, homes: set[torch.device]) -> None:
    """Move modules and optimizer states that the step and the loss function reach to a device.

    A module moves if all its tensors are on the model's old devices, such as the discriminator of
    a GAN. The states of an optimizer move if its parameters are on the new device. Training modes
    do not change: a teacher stays in evaluation mode.
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
        if all(parameter.device == device for parameter in parameters_of(optimizer)):
            _move_optimizer(optimizer, device)


def _move_module(module: nn.Module, device: torch.device) -> None:
    # Do not touch a module that is already there: fake tensors, for example, cannot be moved.
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
