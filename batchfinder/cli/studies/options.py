"""The options of ``compare`` and ``sweep``."""

from __future__ import annotations

import click

from batchfinder.cli.options import (
    DEVICE_OPTIONS,
    GPU_OPTIONS,
    LANGUAGE_MODEL_OPTIONS,
    OUTPUT_OPTIONS,
    STUDY_OPTIONS,
    flag,
    number,
)

COMPARE_OPTIONS = (
    *GPU_OPTIONS,
    flag("--measure", help="Run each strategy on this machine, as `find` does."),
    click.option(
        "--strategy",
        "strategies",
        metavar="A+B",
        multiple=True,
        help="Compare only these, such as bf16+checkpointing. Repeatable. [default: what tells "
        "most]",
    ),
    *DEVICE_OPTIONS,
    *STUDY_OPTIONS,
    *LANGUAGE_MODEL_OPTIONS,
    number("--world-size", default=1, help="Also compare ddp and fsdp on N ranks."),
    number(
        "--global-batch-size",
        help="Show how each strategy reaches this size, and which is the fastest at it.",
    ),
    flag("--explain", help="Fill in the memory equation, side by side."),
    *OUTPUT_OPTIONS,
)

SWEEP_OPTIONS = (
    click.option(
        "--over",
        "swept",
        metavar="NAME=A,B,C",
        multiple=True,
        help="Sweep an argument of the target over these values. Give it twice for pairs.",
    ),
    *GPU_OPTIONS,
    *DEVICE_OPTIONS,
    *STUDY_OPTIONS,
    *LANGUAGE_MODEL_OPTIONS,
    *OUTPUT_OPTIONS,
)
