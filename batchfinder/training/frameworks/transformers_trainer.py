"""Train as a ``Trainer`` of transformers does: its model, loss, precision and optimizer.

Transformers is not imported. :class:`~batchfinder.training.setup.Trainer` lists the parts in use.

Sources: ``Trainer.train`` and ``Trainer.training_step``
(https://github.com/huggingface/transformers/blob/main/src/transformers/trainer.py), and for the
precision ``Accelerator.prepare_model``
(https://github.com/huggingface/accelerate/blob/main/src/accelerate/accelerator.py).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from batchfinder.errors import StepError
from batchfinder.training.calling import call_model
from batchfinder.training.frameworks.trainer_batch import fetches_ahead, items_in
from batchfinder.training.frameworks.trainer_evaluation import GatheredEvaluation
from batchfinder.training.parallel import unwrapped
from batchfinder.training.setup import DTYPES, OptimizerOfModel, Trainer
from batchfinder.training.state.patching import replaced
from batchfinder.training.step_source import KeptUntil, StepSource

_RUN_INSTEAD = (
    "Try batchfinder run on the script itself: batchfinder run -- python train.py "
    "--per_device_train_batch_size {batch_size} (or torchrun in place of python)"
)


class TrainerStep(StepSource):
    """``step(model, batch) -> loss`` as a Trainer makes it.

    The loss comes from ``compute_loss``, or from a subclass's own ``training_step``, with its
    backward pass: it may offload activations, train twice or generate the batch.

    ``Trainer.training_step`` returns a detached loss, so only this loss outlives the backward
    pass. The batches of a step live until all batches of the next step are on the device.

    Args:
        trainer: the Trainer. It does not change, even if ``compute_loss`` sets attributes.

    Attributes:
        held: the Trainer's modules and tensors besides its model, by name, such as a reference
            model.
        batches_ahead: the number of micro-batches in a step; None before transformers 4.46, which
            fetches them one by one.
    """

    name = "compute_loss of the Trainer"
    kept_until = KeptUntil.BACKWARD
    clears_gradients = True

    def __init__(self, trainer: Trainer) -> None:
        for option in ("deepspeed", "fsdp"):
            if getattr(trainer.args, option, None) or getattr(
                trainer, f"is_{option}_enabled", False
            ):
                raise StepError(
                    f"the Trainer shards its model ({option} is set), and one process alone cannot "
                    f"measure that. {_RUN_INSTEAD}"
                )
        if hasattr(trainer.args, "steps_per_generation"):  # GRPO and the like
            raise StepError(
                f"a {type(trainer).__name__} trains on what its model generates, which this search "
                f"cannot repeat. {_RUN_INSTEAD}"
            )
        self._evaluation = GatheredEvaluation.of(trainer)
        if self._evaluation:
            self.eval_batch_size = self._evaluation.batch_size
            self.eval_batches = self._evaluation.batches
        self._trainer = _without_data(trainer)
        vars(self._trainer).update({k: _own(value) for k, value in vars(self._trainer).items()})
        self.held = {
            name: value
            for name, value in vars(self._trainer).items()
            if isinstance(value, nn.Module | Tensor) and name not in ("model", "model_wrapped")
        }
        self.precision = _lower_precision(trainer)
        self.compiles = getattr(trainer.args, "torch_compile", False)
        names = ("activation_checkpointing", "gradient_checkpointing")
        self.checkpoints = any(getattr(trainer.args, name, False) for name in names)
        micro_batches = getattr(trainer.args, "gradient_accumulation_steps", 1)
        self.accumulates = micro_batches > 1
        self.batches_ahead = micro_batches if fetches_ahead(trainer) else None
        own_step = getattr(type(trainer), "training_step", None)
        library = getattr(own_step, "__module__", "transformers").partition(".")[0]
        self.runs_backward = library != "transformers"
        self._optimizer: Callable[[], Optimizer | None] = lambda: None

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainerStep:
        """Return the same step with copies of what it holds; the Trainer is shared."""
        step = copy.copy(self)
        step.held = copy.deepcopy(self.held, memo)
        step._evaluation = self._evaluation and replace(self._evaluation)
        return step

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch that is on the model's device."""
        module = unwrapped(model)
        model.train()  # all of its parts, as ``training_step`` does
        if self.checkpoints:
            _save_activations(module, self._trainer.args)
        acting = self._acting_on(model)
        items = items_in(acting, batch)
        if hasattr(acting, "_prepare_inputs"):
            batch = acting._prepare_inputs(batch)
        with in_precision(module, self.precision):
            if self.runs_backward:
                return acting.training_step(model, batch, *items.values())  # type: ignore[no-any-return]
            loss: Tensor = acting.compute_loss(model, batch, **items)
        return loss

    def train_with(self, optimizer: Optimizer) -> None:
        """Let ``training_step`` use the optimizer. The Trainer outlives it, so it is not held."""
        self._optimizer = weakref.ref(optimizer)

    def evaluate(self, model: nn.Module, batch: Any) -> Any:
        """Return loss, logits and labels as ``prediction_step`` does.

        The results that ``evaluation_loop`` has gathered before the last batch are on the device.
        """
        acting = self._acting_on(model)
        if not hasattr(acting, "prediction_step"):
            return call_model(model, batch)
        # As Seq2SeqTrainer.evaluate sets it. The texts that a model generates need memory too.
        names = ("max_length", "num_beams")
        acting._gen_kwargs = {n: getattr(acting.args, f"generation_{n}", None) for n in names}
        only_loss = not acting.compute_metrics or acting.args.prediction_loss_only
        gathered = self._evaluation or GatheredEvaluation()
        with gathered.before_last_batch(), in_precision(acting.model, self.precision):
            results = acting.prediction_step(model, batch, only_loss)
            if not only_loss:
                results = gathered.with_last_batch(acting, batch, *results)
        return results

    def infer(self, model: nn.Module, batch: Any) -> Any:
        """Call the model as ``predict`` does, on a batch without labels."""
        labels = getattr(self._trainer, "label_names", None) or ["labels"]
        return call_model(model, {k: v for k, v in batch.items() if k not in labels})

    def _acting_on(self, model: nn.Module) -> Any:
        args = self._trainer.args
        acting = _acting(
            self._trainer,
            **self.held,
            model=unwrapped(model),
            model_wrapped=model,
            optimizer=self._optimizer(),
            current_gradient_accumulation_steps=getattr(args, "gradient_accumulation_steps", 1),
            # The batch is already on its device, which may differ from the arguments' device.
            _prepare_input=lambda data: data,
            compute_loss_context_manager=contextlib.nullcontext,  # see in_precision
        )
        if next(model.parameters()).device.type == "cpu":  # TRL offloads by a GPU's streams
            acting.maybe_activation_offload_context = contextlib.nullcontext()
        return acting


def trainers_optimizer(trainer: Trainer) -> OptimizerOfModel:
    """Return a factory of optimizers as a Trainer creates them. None is set on the Trainer."""
    make = functools.partial(_created_optimizer, _without_data(trainer))
    return OptimizerOfModel(make, "create_optimizer of the Trainer")


def _created_optimizer(trainer: Trainer, model: nn.Module) -> Optimizer:
    acting = _acting(trainer, model=model, model_wrapped=model, optimizer=None)
    acting.create_optimizer()
    optimizer: Any = acting.optimizer
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()  # a schedule-free optimizer refuses its step otherwise
    return optimizer  # type: ignore[no-any-return]


def _acting(trainer: Trainer, **changes: Any) -> Any:
    """Return a copy of a Trainer that can set attributes without changing the user's."""
    acting = copy.copy(trainer)
    vars(acting).update(changes)
    return acting


def _without_data(trainer: Trainer) -> Any:
    """Return a copy of a Trainer without its data, which would go to every worker process."""
    return _acting(trainer, train_dataset=None, eval_dataset=None)


def _own(value: Any) -> Any:
    """Return a copy of a container, in which a Trainer may note metrics. Its items are shared."""
    if type(value) is list:
        return [_own(item) for item in value]
    if type(value) in (set, deque):
        return copy.copy(value)
    if type(value) in (dict, defaultdict, Counter, OrderedDict):
        own = copy.copy(value)
        for key, item in value.items():
            own[key] = _own(item)
        return own
    return value


def remarks_on(trainer: Trainer) -> list[str]:
    """Return remarks about things that a Trainer does besides its step."""
    remarks = []
    if getattr(trainer.args, "n_gpu", 1) > 1:
        remarks.append(
            "the Trainer would train with DataParallel, whose first GPU needs more memory than one "
            "that trains alone, as here. Try torchrun, with one process for each GPU"
        )
    if getattr(trainer.args, "torch_empty_cache_steps", None):  # 190 trained without, 175 with it
        remarks.append(
            "the search does not empty the cache as torch_empty_cache_steps does. If lengths vary, "
            "that fragments the memory, and training may run out of it at the answer. Try without"
        )
    # Since transformers 5, train() applies them. Before, the constructor did.
    applies_late = "transformers.integrations.liger" in sys.modules
    if applies_late and getattr(trainer.args, "use_liger_kernel", False):
        remarks.append(
            "train() gives Liger's kernels to the model, and the search trains without them: more "
            f"may fit. {_RUN_INSTEAD}"
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
    else:
        module.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs
        )


def _lower_precision(trainer: Any) -> str | None:
    """Return the precision of autocast, by the arguments or ``accelerate launch``; or None."""
    accelerator: Any = getattr(trainer, "accelerator", None)
    for name in ("bf16", "fp16"):
        is_set = getattr(accelerator, "native_amp", False) and accelerator.mixed_precision == name
        if is_set or getattr(trainer.args, name, False):
            return name
    return None


def in_precision(
    module: nn.Module, precision: str | None
) -> contextlib.AbstractContextManager[Any]:
    """Run only a model's forward pass under autocast, and convert its outputs to fp32."""
    if precision is None:
        return contextlib.nullcontext()
    forward = module.forward
    device = next(module.parameters()).device.type

    @functools.wraps(forward)  # ``generate`` reads its signature
    def in_autocast(*arguments: Any, **options: Any) -> Any:
        with torch.autocast(device, dtype=DTYPES[precision]):
            output = forward(*arguments, **options)
        return _in_fp32(output)

    return replaced(module, forward=in_autocast)


def _in_fp32(output: Any) -> Any:
    """Convert a model's outputs of lower precision to fp32, as Accelerate does."""
    if isinstance(output, Tensor):
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    if isinstance(output, Mapping):
        return type(output)({key: _in_fp32(value) for key, value in output.items()})  # type: ignore[call-arg]
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(_in_fp32, output))
    if isinstance(output, list | tuple):
        return type(output)(map(_in_fp32, output))
    return output
