"""Complete a setup: choose its sample, its step and its optimizer if the user gave none."""

from __future__ import annotations

from dataclasses import replace

from batchfinder.errors import SampleError, UsageError
from batchfinder.training.data.lengths import padding_remarks
from batchfinder.training.data.loader import batches_of_loader
from batchfinder.training.frameworks.lightning import (
    OwnTrainingStep,
    batches_of_module,
    is_lightning_module,
    own_optimizer,
)
from batchfinder.training.frameworks.manual_optimization import ManualStep, optimizes_by_hand
from batchfinder.training.frameworks.model_hints import sample_from_model
from batchfinder.training.frameworks.trainer_batch import batches_of_trainer
from batchfinder.training.frameworks.transformers_trainer import (
    TrainerStep,
    remarks_on,
    trainers_optimizer,
)
from batchfinder.training.placement import refuse_offloaded, untrained_bases
from batchfinder.training.setup import OptimizerOfModel, Trainer, TrainingSetup, check_functions
from batchfinder.training.tree import described_shapes, named_tensors


def completed(setup: TrainingSetup) -> tuple[TrainingSetup, list[str]]:
    """Return a setup with its sample, its step and its optimizer; and warnings for the user.

    The first of these supplies the sample: the setup itself, the Trainer's or LightningModule's
    data, an example input of the model.

    Unless the setup has its own, a LightningModule uses its ``training_step`` and its optimizer.
    The step does not run on the module's example input, which has no targets. A Trainer of
    transformers brings its model, loss, optimizer and data.
    """
    check_functions(setup)
    trainer = setup.model if isinstance(setup.model, Trainer) else None
    warnings: list[str] = []
    if trainer is not None:
        setup = _trained_by(trainer, setup)
        warnings += remarks_on(trainer)
    elif bases := untrained_bases(setup.model):
        warnings.append(
            f"{type(bases[0]).__name__} is in evaluation mode below {type(setup.model).__name__}, "
            "as from_pretrained() leaves it: no dropout, no checkpointing. It is trained in "
            "training mode here, as a Trainer trains it. Try model.train() before your own loop."
        )
    refuse_offloaded(setup.model)
    has_none = setup.sample is None and setup.make_batch is None
    drawn = None
    if setup.loader is not None:
        if not has_none:
            raise UsageError("there is both a loader and a sample or make_batch. Try one of them.")
        drawn = batches_of_loader(setup.loader)
    elif has_none and trainer is not None and trainer.train_dataset is not None:
        drawn = batches_of_trainer(trainer)
    elif has_none and is_lightning_module(setup.model):
        drawn = batches_of_module(setup.model, warnings.append)
    is_hint = has_none and drawn is None
    if drawn is not None:
        warnings += drawn.remarks
        made = {"sample": drawn.sample, "make_batch": drawn.make_batch, "loader": None}
        setup = replace(setup, **made, examples=setup.examples or drawn.examples)
    elif is_hint:
        setup, warning = _with_hint(setup)
        warnings.append(warning)
    if setup.make_batch is None and not is_hint:
        warnings += padding_remarks(setup.sample)
    return _trained_by_module(setup, with_its_step=not is_hint), warnings


def _trained_by(trainer: Trainer, setup: TrainingSetup) -> TrainingSetup:
    """Return a setup of the Trainer's model. The Trainer supplies a missing step or optimizer."""
    setup = replace(setup, model=trainer.model)
    if setup.step is None and setup.loss_fn is None:
        setup = replace(setup, step=TrainerStep(trainer))
    if setup.optimizer is None:
        # After training, Accelerate's wrapper is around the optimizer that the Trainer was given.
        given = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        setup = replace(setup, optimizer=given or trainers_optimizer(trainer))
    return setup


def _trained_by_module(setup: TrainingSetup, *, with_its_step: bool) -> TrainingSetup:
    """Let a LightningModule supply a missing step or optimizer; keep other setups as they are."""
    if not is_lightning_module(setup.model):
        return setup
    if with_its_step and setup.step is None and setup.loss_fn is None:
        if optimizes_by_hand(setup.model):
            return replace(setup, step=ManualStep())  # it configures its own optimizers
        setup = replace(setup, step=OwnTrainingStep())
    if setup.optimizer is None:
        optimizer = OptimizerOfModel(own_optimizer, "configure_optimizers of the LightningModule")
        setup = replace(setup, optimizer=optimizer)
    return setup


def _with_hint(setup: TrainingSetup) -> tuple[TrainingSetup, str]:
    sample = sample_from_model(setup.model)
    if sample is None:
        raise SampleError(
            "there is no example batch: return (model, sample) from the target, write a function "
            "build_sample beside it, or give --sample FILE.py:FUNCTION or "
            '--input "float32[3,224,224] int64[]:1000" or --loader FILE.py:FUNCTION '
            "(from Python: sample, make_batch or loader)"
        )
    warning = (
        "no sample was given: the answer holds for the example input that the model carries "
        f"({described_shapes(named_tensors(sample))}); give a batch as your DataLoader yields it"
    )
    return replace(setup, sample=sample), warning
