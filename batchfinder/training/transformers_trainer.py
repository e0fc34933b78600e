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
from torch.utils.data import IterableDataset

from batchfinder.errors import SampleError, StepError
from batchfinder.training.parallel import unwrapped
from batchfinder.training.setup import Trainer
from batchfinder.training.state import preserved_state

# So many examples are looked at for the longest; the first few tell whether lengths differ at all.
MOST_EXAMPLES = 4096
FIRST_EXAMPLES = 64


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


def longest_batch(trainer: Trainer) -> tuple[Any, list[str]]:
    """A batch of the longest examples that a Trainer has, made as its DataLoader makes one.

    Every batch in training is padded to its longest example. For each of an example's values
    (inputs and labels, say) the one with the longest is taken; up to 4096 examples are looked at,
    evenly over the data set, or 64 where these are all of the same length.

    Returns:
        The batch, and what the user should know of it.

    Raises:
        SampleError: there are no examples.
        Exception: what data set and collator raise.
    """
    with preserved_state():
        loader = trainer.get_train_dataloader()
        dataset, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
        if collate is None or not _has_places(dataset):
            return next(iter(loader)), [
                "the batches tried are as long as the first one of the Trainer's; give a sample "
                "as long as any in training"
            ]
        return _collated(dataset, collate)


def _has_places(dataset: Any) -> bool:
    return (
        hasattr(dataset, "__len__")
        and hasattr(dataset, "__getitem__")
        and not isinstance(dataset, IterableDataset)
    )


def _collated(dataset: Any, collate: Any) -> tuple[Any, list[str]]:
    size = len(dataset)
    if not size:
        raise SampleError("the Trainer's train_dataset has no examples; give it at least one")
    places = _spread(range(size), MOST_EXAMPLES)
    longest, are_alike = _longest(dataset, _spread(places, FIRST_EXAMPLES))
    if not are_alike:
        longest, _ = _longest(dataset, places)
    batch = collate([dataset[place] for place in longest])
    if are_alike or len(places) == size:
        return batch, []
    return batch, [
        f"the batches tried are as long as the longest of {len(places)} examples of the Trainer's "
        f"{size}; give a sample as long as any in training"
    ]


def _spread(places: range, most: int) -> range:
    """At most so many of some places, evenly over them."""
    return places[:: -(-len(places) // most)]


def _longest(dataset: Any, places: range) -> tuple[list[int], bool]:
    """Where in a data set the longest of each value is, and whether all are of one length."""
    longest: dict[Any, tuple[int, int]] = {}
    are_alike = True
    for place in places:
        for key, length in _lengths(dataset[place]):
            most, _ = longest.setdefault(key, (length, place))
            are_alike = are_alike and length == most
            if length > most:
                longest[key] = length, place
    return sorted({place for _, place in longest.values()}), are_alike


def _lengths(example: Any) -> Iterator[tuple[Any, int]]:
    """How long each value of an example is: a text by its tokens, an image by its pixels."""
    if isinstance(example, Mapping):
        items = list(example.items())
    else:
        items = list(enumerate(example if isinstance(example, list | tuple) else [example]))
    for key, value in items:
        if isinstance(value, Tensor):
            yield key, value.numel()
        elif hasattr(value, "__len__"):
            yield key, len(value)
        else:
            yield key, 1


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
