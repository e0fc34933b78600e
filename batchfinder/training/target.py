"""Load a target: turn a text such as ``train.py:build_model`` into a training setup."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from batchfinder.errors import SampleError, TargetError, UsageError, did_you_mean
from batchfinder.training.setup import Trainer, TrainingSetup, described, parameters_taken
from batchfinder.training.user_module import (
    as_script,
    it_has,
    load_module,
    no_function,
    split_target,
)


def load_target(
    target: str,
    arguments: Mapping[str, object] | None = None,
    *,
    use_build_sample: bool = True,
    others: Sequence[str] = (),
) -> TrainingSetup:
    """Call the function that a target names, and return its result as a training setup.

    If the setup has neither a sample nor ``make_batch``, a function ``build_sample`` in the same
    module supplies the sample, unless the user gave another. Each function gets only the arguments
    that it accepts; ``others`` names further functions that get some.

    The target's own folder (for a module: the current one) becomes the first on ``sys.path`` and
    stays there, as for a script. A model may import more when it runs, and worker processes of a
    DataLoader must find its module.

    Raises:
        UsageError: there is no such file, module or function, or the arguments do not fit it.
        TargetError: the function returned something other than a model, ``(model, sample)``, a
            ``TrainingSetup`` or a Trainer; or the user's code called ``sys.exit``.
        SampleError: ``build_sample`` returned None.
        Exception: whatever the user's own code raised, unchanged.
    """
    arguments = arguments or {}
    place, name = split_target(target)
    module = load_module(place)
    function = _function(module, name, place)
    build_sample = getattr(module, "build_sample", None) if use_build_sample else None
    refuse_unknown_arguments(target, arguments, function, build_sample, *map(load_function, others))

    setup = _as_setup(target, call_with_arguments(function, arguments))
    if setup.sample is not None or setup.make_batch is not None or build_sample is None:
        return setup
    sample = call_with_arguments(build_sample, arguments)
    if sample is None:
        raise SampleError(f"build_sample in {place} returned None; it must return one batch")
    return dataclasses.replace(setup, sample=sample)


def load_function(target: str) -> Callable[..., Any]:
    """Return the function that a target names, such as ``data.py:build_batch``.

    A file that is already loaded does not run again.
    """
    place, name = split_target(target, is_model=False)
    return _function(load_module(place), name, place)


def call_with_arguments(function: Callable[..., Any], arguments: Mapping[str, object]) -> Any:
    """Call a user's function with only the arguments that it accepts.

    Example:
        >>> call_with_arguments(lambda width: width * 2, {"width": 4, "depth": 3})
        8
    """
    name = name_of(function)
    missing = [
        key
        for key, parameter in parameters_taken(function).items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and key not in arguments
    ]
    if missing:
        options = " ".join(f"--arg {key}=VALUE" for key in missing)
        raise UsageError(f"{name} needs {', '.join(missing)}; give it by {options}")
    accepted = {key: value for key, value in arguments.items() if accepts(function, key)}
    module = sys.modules.get(getattr(function, "__module__", ""))
    with as_script(name, file=getattr(module, "__file__", None)):
        return function(**accepted)


def _function(module: ModuleType, name: str, place: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function) and not isinstance(function, nn.Module):
        return function  # type: ignore[no-any-return]
    if hasattr(module, name):
        raise UsageError(
            f"{name} in {place} is {described(function)}, not a function. Try one that returns the "
            "model"
        )
    functions = [
        key
        for key, value in vars(module).items()
        if callable(value)
        and not key.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    ]
    raise no_function(place, name, functions)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a user's function, for messages."""
    return getattr(function, "__name__", "the function")


def refuse_unknown_arguments(
    target: str, arguments: Mapping[str, object], *functions: Callable[..., Any] | None
) -> None:
    """Raise a UsageError for the first argument that none of the functions accepts."""
    known = [function for function in functions if function is not None]
    for name in arguments:
        if not any(accepts(function, name) for function in known):
            names = list(dict.fromkeys(n for function in known for n in parameters_taken(function)))
            otherwise = it_has(names) or f". Try a function with the parameter {name}."
            hint = did_you_mean(name, names, otherwise=otherwise)
            raise UsageError(f"{target} takes no argument {name}{hint}")


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Return True if a function takes an argument by keyword."""
    parameters = parameters_taken(function)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return True
    parameter = parameters.get(name)
    return parameter is not None and parameter.kind in (
        parameter.POSITIONAL_OR_KEYWORD,
        parameter.KEYWORD_ONLY,
    )


def _as_setup(target: str, returned: Any) -> TrainingSetup:
    if isinstance(returned, TrainingSetup):
        setup = returned
    elif isinstance(returned, tuple) and len(returned) == 2:
        setup = TrainingSetup(*returned)
    else:
        setup = TrainingSetup(returned)
    if isinstance(setup.model, nn.Module | Trainer):
        return setup
    hint = ""
    if isinstance(returned, tuple) and isinstance(next(iter(returned), None), nn.Module):
        has_functions = any(isinstance(part, Optimizer) or callable(part) for part in returned[1:])
        parts = "model, (inputs, targets)"
        if has_functions:
            parts = "TrainingSetup(model, sample, optimizer=..., loss_fn=...)"
        hint = f". Try return {parts}"
    raise TargetError(
        f"{target} returned {described(returned)}; it must return the model (a torch.nn.Module), "
        f"(model, sample), a batchfinder.TrainingSetup or a transformers.Trainer{hint}"
    )
