"""How a ``Trainer`` of transformers trains: its model, loss, precision, optimizer and data.

Transformers is not imported; see :class:`~batchfinder.training.setup.Trainer`.

Sources: ``Trainer.train`` and ``Trainer.training_step``
(https://github.com/huggingface/transformers/blob/main/src/transformers/trainer.py), and for the
precision ``Accelerator.prepare_model``
(https://github.com/huggingface/accelerate/blob/main/src/accelerate/accelerator.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from batchfinder.errors import StepError
from batchfinder.training.parallel import unwrapped
from batchfinder.training.setup import Trainer


class TrainerStep:
    """``step(model, batch) -> loss`` as a Trainer makes it.

    Args:
        trainer: stays as it is, whatever its ``compute_loss`` notes in it.

    Attributes:
        accumulates: whether it accumulates gradients over several micro-batches.

    Raises:
        StepError: it shards its model.
    """

    def __init__(self, trainer: Trainer) -> None:
        for option in ("deepspeed", "fsdp"):
            if getattr(trainer.args, option, None):
                raise StepError(
                    f"the Trainer shards its model ({option} is set), of which one process alone "
                    "knows nothing: return (model, sample) in place of the Trainer, and search "
                    "with torchrun -m batchfinder find --strategy fsdp"
                )
        # The data is not needed in a step, and would go to every worker process.
        self._trainer = _acting(trainer, train_dataset=None, eval_dataset=None)
        self.accumulates = getattr(trainer.args, "gradient_accumulation_steps", 1) > 1

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch that is on the model's device."""
        module = unwrapped(model)
        _save_activations(module, self._trainer.args)
        acting = _acting(self._trainer, model=module)
        with _in_precision(module, self._trainer.args):
            loss: Tensor = acting.compute_loss(model, batch)
        return loss


class TrainerOptimizer:
    """``make(model) -> optimizer`` as a Trainer creates it.

    Args:
        trainer: stays without it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = _acting(trainer, train_dataset=None, eval_dataset=None)

    def __call__(self, model: nn.Module) -> Optimizer:
        """A new optimizer over a model's parameters."""
        acting = _acting(self._trainer, model=model, model_wrapped=model, optimizer=None)
        acting.create_optimizer()
        optimizer: Optimizer = acting.optimizer
        return optimizer


def _acting(trainer: Trainer, **changes: Any) -> Any:
    """A Trainer that may note what it likes without changing the user's."""
    acting = copy.copy(trainer)
    vars(acting).update(changes)
    return acting


def remarks_on(trainer: Trainer) -> list[str]:
    """What the user should know of what a Trainer does beside its step."""
    remarks = []
    if getattr(trainer.args, "n_gpu", 1) > 1:
        remarks.append(
            "the Trainer would train with DataParallel, of which the first GPU needs more memory "
            "than one that trains alone, as here; start it with torchrun, one process per GPU"
        )
    if getattr(trainer.args, "torch_compile", False):
        remarks.append(
            "the Trainer compiles its model, which takes other memory than the uncompiled steps "
            "here; search with --compile (from Python: compile=True)"
        )
    return remarks


def _save_activations(module: Any, args: Any) -> None:
    """Checkpoint activations as ``Trainer.train`` does; called before every step."""
    if getattr(args, "activation_checkpointing", False):  # since transformers 5.22
        options = dict(args.activation_checkpointing_kwargs or {})
        layers = {
            name: options.pop(name) for name in ("every_n_layers", "offload") if name in options
        }
        module.activation_checkpointing_enable(
            activation_checkpointing_kwargs=options or None, **layers
        )
    elif getattr(args, "gradient_checkpointing", False):
        module.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs
        )


@contextmanager
def _in_precision(module: nn.Module, args: Any) -> Iterator[None]:
    """Run a model's forward pass alone in lower precision; its outputs are in fp32 again."""
    is_on = {name: getattr(args, name, False) for name in ("bf16", "fp16")}
    if not any(is_on.values()):
        yield
        return
    dtype = torch.bfloat16 if is_on["bf16"] else torch.float16
    forward = module.forward
    own = {name: value for name, value in vars(module).items() if name == "forward"}
    device = next(module.parameters()).device.type

    def in_autocast(*arguments: Any, **options: Any) -> Any:
        with torch.autocast(device, dtype=dtype):
            output = forward(*arguments, **options)
        return _in_fp32(output)

    module.forward = in_autocast
    try:
        yield
    finally:
        vars(module).pop("forward", None)
        vars(module).update(own)


def _in_fp32(output: Any) -> Any:
    """What a model returned, with its tensors of lower precision in fp32, as Accelerate does it."""
    if isinstance(output, Tensor):
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    if isinstance(output, Mapping):
        return type(output)({key: _in_fp32(value) for key, value in output.items()})  # type: ignore[call-arg]
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(_in_fp32, output))
    if isinstance(output, list | tuple):
        return type(output)(map(_in_fp32, output))
    return output
