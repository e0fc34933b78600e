"""The options that several commands share."""

from __future__ import annotations

from collections.abc import Callable

import click

SHARED_OPTIONS = (
    click.option(
        "--sample",
        metavar="TARGET",
        help="Function that returns one batch, as FILE.py:FUNCTION. Use your longest sequences.",
    ),
    click.option(
        "--input",
        "input_spec",
        metavar="SPEC",
        help='Make the batch from the shapes of one example: "float32[3,224,224] int64[]:1000" '
        "(1000: integers are below it).",
    ),
    click.option(
        "--arg",
        "pairs",
        metavar="NAME=VALUE",
        multiple=True,
        help="Pass a keyword argument to the target's function. Repeatable.",
    ),
    click.option(
        "--headroom",
        metavar="PCT",
        default="5",
        show_default=True,
        help="Keep this percentage of the memory free.",
    ),
    click.option(
        "--precision",
        type=click.Choice(["fp32", "bf16", "fp16"]),
        default="fp32",
        show_default=True,
        help="Train under autocast; fp16 also with a GradScaler.",
    ),
    click.option(
        "--optimizer",
        metavar="NAME",
        help="Train with this class of torch.optim. [default: the target's, or adamw]",
    ),
    click.option(
        "--accumulate",
        is_flag=True,
        help="Measure with gradient accumulation: gradients stay alive in the next forward pass.",
    ),
    click.option(
        "--min-batch-size",
        type=int,
        metavar="N",
        default=1,
        show_default=True,
        help="Try no smaller size.",
    ),
    click.option(
        "--max-batch-size",
        type=int,
        metavar="N",
        help="Try no larger size, for example the size of the data set.",
    ),
    click.option(
        "--multiple-of",
        type=int,
        metavar="N",
        default=1,
        show_default=True,
        help="Try only multiples of this.",
    ),
)
"""The options of both `find` and `estimate`: the training step, and the sizes allowed."""

HEADROOM_AND_SIZES = (SHARED_OPTIONS[3], *SHARED_OPTIONS[-3:])


def shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add :data:`SHARED_OPTIONS` to a command, in their order."""
    for option in reversed(SHARED_OPTIONS):
        command = option(command)
    return command
