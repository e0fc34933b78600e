"""The options for a language model named by its configuration (``hf:``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource

from batchfinder.errors import UsageError

# The names in training/frameworks/language_model.py, which is not imported because it needs torch.
METHODS = ("full", "lora", "qlora", "dpo")
ATTENTION = ("eager", "sdpa", "flash")

LANGUAGE_MODEL_OPTIONS = (
    click.option(
        "--seq",
        "lengths",
        metavar="TOKENS",
        multiple=True,
        help="hf: tokens in each example. Repeatable, or 1024,4096: a table of lengths.  "
        "[default: 2048]",
    ),
    click.option("--lora", type=int, metavar="RANK", help="hf: train adapters of this rank."),
    click.option("--4bit", "four_bit", is_flag=True, help="hf: quantize the weights (nf4)."),
    click.option(
        "--method",
        type=click.Choice(METHODS),
        help="hf: train all weights, LoRA, LoRA on 4-bit weights, or DPO.",
    ),
    click.option(
        "--checkpointing", is_flag=True, help="hf: recompute activations in the backward."
    ),
    click.option("--attention", type=click.Choice(ATTENTION), help="hf: [default: sdpa]"),
)


def of_language_model(
    target: str, precision: str, options: Mapping[str, Any]
) -> tuple[dict[str, Any], list[int], str]:
    """Return what the options say of a language model.

    Args:
        target: the target of the command. The options are for ``hf:`` only.
        precision: the value of --precision. A language model takes it as an argument, if given.
        options: the values of :data:`LANGUAGE_MODEL_OPTIONS`.

    Returns:
        The arguments of the target, the lengths, and the precision of the steps. The step of a
        language model has its own autocast, so its precision is ``"fp32"``.

    Raises:
        UsageError: an option is given for another target, or a length is no number.
    """
    from batchfinder.training.user_module import is_language_model  # late: --help must be fast

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
            given["precision"] = precision
        return given, [*dict.fromkeys(sizes)], "fp32"
    if given or sizes:
        raise UsageError(
            "--seq, --lora, --4bit, --method, --checkpointing and --attention are for a model "
            "named by its configuration. Try hf:meta-llama/Llama-3.1-8B as the target."
        )
    return {}, [], precision


def of_one_length(
    target: str, precision: str, options: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """Return the arguments with the length, and the precision, for a command that takes one length.

    Raises:
        UsageError: there are several lengths, or as :func:`of_language_model`.
    """
    arguments, lengths, precision = of_language_model(target, precision, options)
    if len(lengths) > 1:
        listed = ",".join(map(str, lengths))
        raise UsageError(f"--seq is one length here. Try batchfinder sweep {target} --seq {listed}")
    return arguments | ({"seq": lengths[0]} if lengths else {}), precision


def _is_given(option: str) -> bool:
    """Return True for an option on the command line, False for a default."""
    context = click.get_current_context(silent=True)
    source = None if context is None else context.get_parameter_source(option)
    return source not in (None, ParameterSource.DEFAULT)


def _length(text: str) -> int:
    if text.strip().isdecimal() and int(text) > 1:
        return int(text)
    raise UsageError(f"--seq {text!r} is no number of tokens. Try --seq 2048.")
