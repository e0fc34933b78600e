"""The commands ``compare`` and ``sweep``, as ``--help`` shows them."""

from __future__ import annotations

from typing import Any

import click

from batchfinder.cli.exiting import exit_with
from batchfinder.cli.options import with_options
from batchfinder.cli.studies.options import COMPARE_OPTIONS, SWEEP_OPTIONS


@click.command(short_help="Compare precision, checkpointing, optimizers and sharding.")
@click.argument("target")
@with_options(*COMPARE_OPTIONS)
def compare(**options: Any) -> None:
    """Compare what each strategy gives: the largest batch size, its memory, and its speed.

    TARGET is the same as for `find`. Without --measure no GPU is needed, and nothing is timed.
    Strategies are made of: fp32, bf16, fp16, pure-bf16, checkpointing, selective-checkpointing,
    accumulate, compile, ddp, fsdp, adamw-fused, adamw-8bit, and any class of torch.optim.
    """
    exit_with("studies.compare:compare", **options)


@click.command(short_help="Find it for each sequence length, image size, or depth.")
@click.argument("target")
@with_options(*SWEEP_OPTIONS)
def sweep(**options: Any) -> None:
    """Find the largest batch size for each value of an argument, such as seq_len=512,1024,2048.

    TARGET is the same as for `find`; it, its build_sample or its make_batch takes the argument.
    Every size is confirmed by real steps, and none is remembered; with --gpu or --memory it is
    estimated. For an hf: target, --seq 512,1024,2048 says it.
    """
    exit_with("studies.sweep:sweep", **options)
