"""Load the setup that the user names: the target and its sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial

from batchfinder.errors import SampleError
from batchfinder.training.complete_setup import completed
from batchfinder.training.data.input_spec import parse_input_spec
from batchfinder.training.frameworks.language_model import described, language_model
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.target import (
    call_with_arguments,
    load_function,
    load_target,
    name_of,
    refuse_unknown_arguments,
)
from batchfinder.training.user_module import PREFIX, is_language_model


def load_setup(
    target: str,
    arguments: Mapping[str, object],
    *,
    sample: str | None = None,
    input_spec: str | None = None,
    loader: str | None = None,
    optimizer: str | None = None,
) -> tuple[TrainingSetup, list[str]]:
    """Load a target, complete it with sample, step and optimizer; return it and the warnings.

    The texts are those of the command line. Each function gets the arguments that it accepts. A
    loader replaces every sample, and an optimizer the setup's own.
    """
    remarks: list[str] = []
    is_given = any(value is not None for value in (sample, input_spec, loader))
    if is_language_model(target):
        make = partial(language_model, target.removeprefix(PREFIX))
        refuse_unknown_arguments(target, arguments, make)
        setup: TrainingSetup = call_with_arguments(make, arguments)
        remarks = described(target, setup, **arguments)
    else:
        others = [name for name in (sample, loader) if name is not None]
        setup = load_target(target, arguments, use_build_sample=not is_given, others=others)
    if loader is not None:
        made = call_with_arguments(load_function(loader), arguments)
        if made is None:
            raise SampleError(f"{loader} returned None; it must return a DataLoader or a data set")
        setup = dataclasses.replace(setup, sample=None, make_batch=None, loader=made)
    setup, ignored = _with_sample(setup, arguments, sample, input_spec)
    setup, warnings = completed(setup)
    setup = dataclasses.replace(setup, optimizer=optimizer or setup.optimizer)
    return setup, [*remarks, *ignored, *warnings]


def _with_sample(
    setup: TrainingSetup,
    arguments: Mapping[str, object],
    sample: str | None,
    input_spec: str | None,
) -> tuple[TrainingSetup, list[str]]:
    """Return a setup with the sample given, and a warning for each option without effect."""
    # A mistake in an option is an error, even if the option has no effect.
    function = load_function(sample) if sample else None
    batch = None if input_spec is None else parse_input_spec(input_spec)
    given = [name for name, text in (("--sample", sample), ("--input", input_spec)) if text]
    if setup.loader is not None:
        why = "the loader brings the batches"
    elif setup.sample is not None or setup.make_batch is not None:
        why = "the target brings batches of its own"
    else:
        why, given = "--sample comes first", given[1:]
        if function is not None:
            batch = call_with_arguments(function, arguments)
            if batch is None:
                raise SampleError(f"{name_of(function)} returned None; it must return one batch")
        setup = dataclasses.replace(setup, sample=batch)
    return setup, [f"{name} is ignored, as {why}; leave one of them out" for name in given]
