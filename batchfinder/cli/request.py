"""The request of a command: the options that `find`, `estimate`, `compare` and `sweep` share."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource

from batchfinder.errors import UsageError
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.setup_source import SetupSource
from batchfinder.search.bounds import Bounds
from batchfinder.training.user_module import is_language_model
from batchfinder.units import bytes_if_given, parse_headroom

_OF_SOURCE = ("sample", "input_spec", "loader", "optimizer")
_OF_STEPS = (
    "device", "strategy", "mode", "eval_batch_size", "accumulate", "compiled", "confirm_steps",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What to train, and within which bounds.

    Attributes:
        source: the target and its arguments.
        options: the options of the steps and of the budget.
        bounds: the sizes that may be tried.
        lengths: the lengths of a language model's examples, for a command that takes several.
    """

    source: SetupSource
    options: ProbeOptions
    bounds: Bounds
    lengths: list[int]


def request_of(target: str, given: Mapping[str, Any], *, one_length: bool = True) -> Request:
    """Read the shared options of a command. Those that the command does not have are defaults.

    With ``one_length``, the command takes one length of a language model's examples.

    Raises:
        UsageError: an option is invalid.
    """
    bounds = Bounds.of(given["min_batch_size"], given["max_batch_size"], given["multiple_of"])
    chosen, lengths, precision = _of_language_model(target, given)
    if one_length and len(lengths) > 1:
        listed = ",".join(map(str, lengths))
        raise UsageError(f"--seq is one length here. Try batchfinder sweep {target} --seq {listed}")
    if one_length and lengths:
        chosen["seq"] = lengths.pop()
    limit = given.get("memory_limit")
    options = ProbeOptions(
        memory_limit=bytes_if_given(limit),
        headroom=parse_headroom(given["headroom"]),
        precision=precision,
        smallest=bounds.first,
        **{name: given[name] for name in _OF_STEPS if name in given},
    )
    arguments = {**parse_arguments(given["pairs"]), **chosen}
    source = SetupSource(target, arguments, **{name: given[name] for name in _OF_SOURCE})
    return Request(source, options, bounds, lengths)


def refuse_real_steps(given: Mapping[str, Any]) -> None:
    """Refuse the options of a command that nothing on a simulated GPU can follow.

    Raises:
        UsageError: there is one.
    """
    for name, option in (("device", "--device"), ("compiled", "--compile")):
        if given.get(name):
            raise UsageError(
                f"{option} is for real steps, and --gpu simulates them. Try one of the two."
            )


def _of_language_model(
    target: str, options: Mapping[str, Any]
) -> tuple[dict[str, Any], list[int], str]:
    """Return the arguments of a language model, its lengths, and the precision of the steps.

    A language model takes --precision as an argument, if given. Its step has its own autocast, so
    the precision of the steps is ``"fp32"``.
    """
    given: dict[str, Any] = {
        "lora": options["lora"],
        "quantize": "4bit" if options["four_bit"] else None,
        "method": options["method"],
        "checkpointing": options["checkpointing"] or None,
        "attention": options["attention"],
    }
    given = {name: value for name, value in given.items() if value is not None}
    sizes = [_length(text) for listed in options["lengths"] for text in listed.split(",")]
    if is_language_model(target):
        if _is_given("precision"):
            given["precision"] = options["precision"]
        return given, [*dict.fromkeys(sizes)], "fp32"
    if given or sizes:
        raise UsageError(
            "--seq, --lora, --4bit, --method, --checkpointing and --attention are for a model "
            "named by its configuration. Try hf:meta-llama/Llama-3.1-8B as the target."
        )
    return {}, [], options["precision"]


def _is_given(option: str) -> bool:
    """Return True for an option on the command line, False for a default."""
    context = click.get_current_context(silent=True)
    source = None if context is None else context.get_parameter_source(option)
    return source not in (None, ParameterSource.DEFAULT)


def _length(text: str) -> int:
    if text.strip().isdecimal() and int(text) > 1:
        return int(text)
    raise UsageError(f"--seq {text!r} is no number of tokens. Try --seq 2048.")


def parse_arguments(pairs: Sequence[str]) -> dict[str, object]:
    """Read the values of ``--arg``.

    Args:
        pairs: texts ``NAME=VALUE``. A Python literal is read as one, also true, false and none in
            lower case. Any other value is text. If a name occurs twice, the last one counts.

    Example:
        >>> parse_arguments(["depth=12", "lr=1e-3", "name=gpt2", "pretrained=false"])
        {'depth': 12, 'lr': 0.001, 'name': 'gpt2', 'pretrained': False}
    """
    arguments = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--arg {pair!r} cannot be read; write it as NAME=VALUE")
        arguments[name] = _parse_value(value)
    return arguments


def _parse_value(text: str) -> object:
    words = {"true": True, "false": False, "none": None}
    if text in words:
        return words[text]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes in strings
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
