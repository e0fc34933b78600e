"""The commands and their options."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from batchfinder.cli.exiting import CTRL_C, exit_with
from batchfinder.cli.options import (
    CHECK_OPTIONS,
    DEVICE_OPTIONS,
    GPU_OPTIONS,
    LANGUAGE_MODEL_OPTIONS,
    OUTPUT_OPTIONS,
    PLAN_OPTIONS,
    RUN_OPTIONS,
    SEARCH_OPTIONS,
    SHARED_OPTIONS,
    argument,
    chart_option,
    compile_option,
    flag,
    number,
    quiet_option,
    seconds,
    with_options,
)
from batchfinder.cli.studies.commands import compare, sweep
from batchfinder.results.version import VERSION


class Commands(click.Group):
    """The commands."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. An option that it lacks is refused with the commands that have it."""
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            having = [
                name
                for name, command in self.commands.items()
                if any(error.option_name in option.opts for option in command.params)
            ]
            if not having:
                raise
            text = f"{error.message.rstrip('.')}. It is an option of {', '.join(having)}."
            raise click.NoSuchOption(error.option_name, text, ctx=error.ctx) from None


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(VERSION, "-V", "--version", prog_name="batchfinder")
def cli() -> None:
    """Find the largest batch size that really trains on your device.

    \b
    On this machine, by real training steps:
        batchfinder find train.py:build_model
    On a GPU that you do not have, by simulation:
        batchfinder estimate train.py:build_model --gpu h100
    For a training script as it is:
        batchfinder run -- python train.py --batch-size {batch_size}

    train.py:build_model is a function in your file that returns the model and one batch:
    `return model, (inputs, targets)`.
    """  # noqa: D301 - click keeps the lines after a backspace as they are


@cli.command(short_help="Find it on this machine, by real training steps.")
@argument("target")
@with_options(*DEVICE_OPTIONS, *SHARED_OPTIONS)
@click.option(
    "--strategy",
    type=click.Choice(["ddp", "fsdp"]),
    help="Train on all ranks of a job that torchrun started.",
)
@flag("--throughput", help="Also find the smallest size that is as fast.")
@with_options(compile_option)
@number(
    "--confirm-steps",
    default=3,
    show_default=True,
    help="Confirm the answer by at least this many full steps; at least 6 on the CPU.",
)
@seconds(
    "--probe-timeout",
    help="Give up on a probe after this many seconds. [default: from the steps seen]",
)
@flag("--start-from-estimate", help="Start from what `estimate` expects of this GPU.")
@with_options(
    *PLAN_OPTIONS, *LANGUAGE_MODEL_OPTIONS, *SEARCH_OPTIONS, *OUTPUT_OPTIONS, chart_option
)
@with_options(quiet_option)
@flag("-v", "--verbose", help="Show more, and what the target prints.")
@click.pass_obj
def find(make_prober: Any, /, **options: Any) -> None:
    """Find the largest batch size that really trains, by real training steps.

    TARGET is FILE.py:FUNCTION or package.module:FUNCTION. The function returns the model; or
    (model, sample), where the sample is one batch as the DataLoader yields it; or a
    batchfinder.TrainingSetup; or a transformers.Trainer. Or TARGET is hf: and a language model, as
    for `estimate`; its weights are random.

    Exit status: 0 found, 1 error, 2 usage, 3 not even the smallest size fits, 130 Ctrl-C,
    143 SIGTERM.
    """
    exit_with("find:find_batch_size", **options, make_prober=make_prober)


@cli.command("run", short_help="Find it for a training script, unmodified.")
@with_options(*RUN_OPTIONS)
@argument("command_line", metavar="COMMAND...", nargs=-1, type=click.UNPROCESSED, required=True)
def run_script(**options: Any) -> None:
    """Find the largest batch size that a training script really trains with.

    COMMAND is how you start the script, with {batch_size} where the size belongs, as in:
    batchfinder run -- python train.py --batch-size {batch_size}

    It is launched at several sizes. Each launch runs a few steps, ends its epoch early so that the
    script validates, and is stopped before most scripts save anything. Weights that were there
    before are not saved over. {scratch} is an empty folder, a new one for each launch.

    Exit status: 0 found, 1 error, 2 usage, 3 not even the smallest size fits, 130 Ctrl-C,
    143 SIGTERM.
    """
    exit_with("run:run_command", **options)


@cli.command(short_help="Estimate it for a GPU that you do not have.")
@argument("target")
@with_options(*GPU_OPTIONS)
@click.option(
    "--overhead",
    metavar="SIZE",
    help="Memory outside PyTorch's allocator. [default: the GPU's]",
)
@with_options(*SHARED_OPTIONS, *LANGUAGE_MODEL_OPTIONS)
@flag("--expandable-segments", help="Simulate PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.")
@click.option(
    "--strategy",
    type=click.Choice(["ddp", "fsdp", "zero1", "zero2"]),
    help="Simulate one rank of a job; needs --world-size.",
)
@number("--world-size", help="Ranks of the job; also shows 1, 2, 4 ... ranks.")
@click.option(
    "--calibrate",
    metavar="JSON",
    help="Learn from a result of `find --json` on your GPU with the same target and options.",
)
@flag("--forget-calibration", help="Remove what --calibrate learned.")
@flag("--explain", help="Show what uses the memory, and where.")
@with_options(*OUTPUT_OPTIONS, quiet_option)
def estimate(**options: Any) -> None:
    """Estimate the largest batch size on GPUs you do not have; no GPU is needed.

    TARGET is the same as for `find`. The training step runs on tensors without data, and its
    allocations run in a model of the CUDA caching allocator. A model that exceeds your memory can
    be built under torch.device("meta"); its batch needs data.

    Or TARGET is hf: and a language model of the Hugging Face hub, or a folder with its config.json.
    No code is needed: hf:meta-llama/Llama-3.1-8B --lora 16 --4bit --seq 4096. Its --precision is
    that of the weights too, and bf16 unless given.

    Exit status: 0 estimated, 1 error, 2 usage, 3 not even the smallest size fits on any of the
    GPUs, 130 Ctrl-C.
    """
    exit_with("estimating.estimate:estimate_batch_size", **options)


@cli.command(short_help="Does one batch size train?")
@with_options(*CHECK_OPTIONS)
@argument("words", metavar="TARGET | -- COMMAND...", nargs=-1, required=True)
def check(**options: Any) -> None:
    """Say whether a batch size trains, by one confirmation.

    TARGET is the same as for `find`. COMMAND is the same as for `run`:
    batchfinder check --batch-size 64 -- python train.py --batch-size {batch_size}

    Exit status: 0 it trains, 1 error, 2 usage, 3 it does not train, 130 Ctrl-C, 143 SIGTERM.
    """
    exit_with("check:check_batch_size", **options)


@cli.command(short_help="Draw results as one HTML page.")
@argument("files", metavar="RESULT.json...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    metavar="FILE.html",
    default="report.html",
    show_default=True,
    help="The page.",
)
def report(**options: Any) -> None:
    """Draw results that --json printed as one self-contained HTML page."""
    exit_with("output:report_results", **options)


@cli.command(short_help="Show the memory of a training while it runs.")
@argument("command_line", metavar="[COMMAND]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--pid", type=int, metavar="P", help="Watch this process and its children.")
@seconds("--every", default=1.0, show_default=True, help="Seconds between lines.")
@flag("--json", "as_json", help="Print one JSON object a line on stdout.")
def watch(**options: Any) -> None:
    """Show the memory of one training: GPUs (through NVML) and host, by it and by others.

    COMMAND is watched until it ends, and with it how often PyTorch's allocator flushed its cache.
    """
    exit_with("watch:watch_training", **options)


@cli.command(short_help="List the GPUs that can be simulated.")
@flag("--json", "as_json", help="Print one JSON array on stdout.")
def gpus(**options: Any) -> None:
    """List the GPUs that `estimate` knows, with the sources of their facts.

    For AMD's GPUs, the compute capability is that of the NVIDIA generation with the same kernels.
    """
    exit_with("gpus:list_gpus", **options)


@cli.group(short_help="List, show or clear remembered answers.")
def cache() -> None:
    """List, show or clear the answers that `find` and `run` remember.

    They are in the folder that BATCHFINDER_CACHE names, or the system's usual one. An answer is
    confirmed by real steps each time before it is used.
    """


@cache.command("list")
def cache_list() -> None:
    """List the remembered answers, the newest first."""
    exit_with("cache:list_answers")


@cache.command("show")
@click.argument("key")
def cache_show(key: str) -> None:
    """Print an answer, and what it depends on, as JSON.

    KEY is the start of its key, as `list` shows it.
    """
    exit_with("cache:show_answer", start_of_key=key)


@cache.command("clear")
def cache_clear() -> None:
    """Remove all remembered answers."""
    exit_with("cache:clear_answers")


cli.add_command(compare)
cli.add_command(sweep)
for runner in (run_script, watch):
    runner.allow_interspersed_args = False  # options after COMMAND are its own


def run() -> None:
    """Run the command line. If options are refused on several ranks, only rank 0 prints it."""
    try:
        cli(standalone_mode=os.environ.get("RANK", "0") == "0")
    except click.Abort:
        sys.exit(CTRL_C)
    except click.ClickException as refusal:
        from batchfinder.cli.ranks import tell_rank_0

        tell_rank_0(refusal.format_message())
