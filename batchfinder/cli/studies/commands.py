"""The commands ``compare`` and ``sweep``, as ``--help`` shows them."""

from __future__ import annotations

from typing import Any

import click

from batchfinder.cli.exiting import exit_with
from batchfinder.cli.options import (
    DEVICE_OPTIONS,
    GPU_OPTIONS,
    LANGUAGE_MODEL_OPTIONS,
    OUTPUT_OPTIONS,
    STUDY_OPTIONS,
    argument,
    flag,
    number,
    quiet_option,
    with_options,
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
    quiet_option,
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
    quiet_option,
)


@click.command(short_help="Compare precision, checkpointing, optimizers and sharding.")
@argument("target")
@with_options(*COMPARE_OPTIONS)
def compare(**options: Any) -> None:
    """Compare what each strategy gives: the largest batch size, its memory, and its speed.

    TARGET is the same as for `find`. Without --measure no GPU is needed, and nothing is timed.
    Strategies are made of: fp32, bf16, fp16, pure-bf16, checkpointing, selective-checkpointing,
    no-checkpointing, accumulate, compile, ddp, fsdp, adamw-fused, adamw-8bit, and any class of
    torch.optim.
    """
    exit_with("studies.compare:compare", **options)


@click.command(short_help="Find it for each sequence length, image size, or depth.")
@argument("target")
@with_options(*SWEEP_OPTIONS)
def sweep(**options: Any) -> None:
    """Find the largest batch size for each value of an argument, such as seq_len=512,1024,2048.

    TARGET is the same as for `find`; it, its build_sample or its make_batch takes the argument.
    Every size is confirmed by real steps, and none is remembered; with --gpu or --memory it is
    estimated. For an hf: target, use --seq 512,1024,2048 instead.
    """
    exit_with("studies.sweep:sweep", **options)
