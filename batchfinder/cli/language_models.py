"""The options of ``estimate`` for a language model named by its configuration (``hf:``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

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


def arguments_by_length(
    is_language_model: bool,
    *,
    lengths: Iterable[str],
    lora: int | None,
    four_bit: bool,
    method: str | None,
    checkpointing: bool,
    attention: str | None,
    precision: str | None,
) -> list[tuple[int | None, dict[str, Any]]]:
    """Return the arguments of the target for each length; one without any for other targets.

    Raises:
        UsageError: an option is given for another target, or a length is no number.
    """
    sizes = [_length(text) for given in lengths for text in given.split(",")]
    given: dict[str, Any] = {
        "lora": lora,
        "quantize": "4bit" if four_bit else None,
        "method": method,
        "checkpointing": checkpointing or None,
        "attention": attention,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not is_language_model:
        if given or sizes:
            raise UsageError(
                "--seq, --lora, --4bit, --method, --checkpointing and --attention are for a model "
                "named by its configuration. Try hf:meta-llama/Llama-3.1-8B as the target."
            )
        return [(None, {})]
    if precision is not None:
        given["precision"] = precision
    if not sizes:
        return [(None, given)]
    return [(size, {**given, "seq": size}) for size in dict.fromkeys(sizes)]


def _length(text: str) -> int:
    if text.strip().isdecimal() and int(text) > 1:
        return int(text)
    raise UsageError(f"--seq {text!r} is no number of tokens. Try --seq 2048.")
