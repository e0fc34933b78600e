"""The command line: options in, answer out, and the only place that exits."""

from __future__ import annotations

import errno
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from batchfinder.cli.run import run_options
from batchfinder.errors import BatchFinderError, UserCodeError
from batchfinder.probing.ranks.job import Job
from batchfinder.results.version import VERSION

SHARED_OPTIONS = (
    click.option(
        "--sample",
        metavar="TARGET",
        help="Function that returns one batch, as FILE.py:FUNCTION; with the longest sequences.",
    ),
    click.option(
        "--input",
        "input_spec",
        metavar="SPEC",
        help='Shapes of one example instead: "float32[3,224,224] int64[]:1000" '
        "(integers: the bound).",
    ),
    click.option(
        "--arg",
        "pairs",
        metavar="NAME=VALUE",
        multiple=True,
        help="Keyword argument for the target's function. Repeatable.",
    ),
    click.option(
        "--headroom",
        metavar="PCT",
        default="5",
        show_default=True,
        help="Percentage of the memory to keep free.",
    ),
    click.option(
        "--precision",
        type=click.Choice(["fp32", "bf16", "fp16"]),
        default="fp32",
        show_default=True,
        help="With autocast; fp16 also with a GradScaler.",
    ),
    click.option(
        "--optimizer",
        metavar="NAME",
        help="Any class of torch.optim but LBFGS. [default: the target's, or adamw]",
    ),
    click.option(
        "--accumulate",
        is_flag=True,
        help="With gradient accumulation: gradients live on in the next forward pass.",
    ),
    click.option(
        "--min-batch-size",
        type=int,
        metavar="N",
        default=1,
        show_default=True,
        help="The smallest size to try.",
    ),
    click.option(
        "--max-batch-size",
        type=int,
        metavar="N",
        help="The largest: the size of the data set, say.",
    ),
    click.option(
        "--multiple-of",
        type=int,
        metavar="N",
        default=1,
        show_default=True,
        help="Try multiples of this only.",
    ),
)
"""What `find` and `estimate` have in common: the training step, and the sizes allowed."""


def shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add :data:`SHARED_OPTIONS` to a command, in their order."""
    for option in reversed(SHARED_OPTIONS):
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(VERSION, "-V", "--version", prog_name="batchfinder")
def cli() -> None:
    """Find the largest batch size that really trains on your device."""


@cli.command(short_help="Find the largest batch size by real training steps.")
@click.argument("target")
@click.option(
    "--device", metavar="D", help="cuda:0, cpu, mps ... [default: an accelerator if there is one]"
)
@click.option(
    "--memory-limit", metavar="SIZE", help="As if the device had no more than this, as 24GiB."
)
@shared_options
@click.option(
    "--strategy",
    type=click.Choice(["ddp", "fsdp"]),
    help="On all ranks of a job that torchrun has started.",
)
@click.option("--compile", "compiled", is_flag=True, help="Train through torch.compile.")
@click.option(
    "--confirm-steps",
    type=int,
    metavar="N",
    default=3,
    show_default=True,
    help="Least number of full steps that prove the answer; on the CPU 6 at least.",
)
@click.option(
    "--probe-timeout",
    type=float,
    metavar="S",
    help="Seconds after which a probe is taken for hung. [default: by the steps seen]",
)
@click.option(
    "--start-from-estimate",
    is_flag=True,
    help="Confirm early what `estimate` expects of this GPU. [default: where full steps take 1 s]",
)
@click.option(
    "--global-batch-size",
    type=int,
    metavar="N",
    help="Also say how to reach it by gradient accumulation; see --accumulate.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="Print the answer alone.")
@click.option("-v", "--verbose", is_flag=True, help="Show more, and what the target prints.")
@click.pass_obj
def find(make_prober: Any, /, **options: Any) -> None:
    """Find the largest batch size that really trains, by real training steps.

    TARGET is FILE.py:FUNCTION or package.module:FUNCTION. The function returns the model; or
    (model, sample), where the sample is one batch as the DataLoader yields it; or a
    batchfinder.TrainingSetup; or a transformers.Trainer.

    Exit status: 0 found, 1 error, 2 usage, 3 not even the smallest size fits, 130 Ctrl-C,
    143 SIGTERM.
    """
    _expect_no_numpy()
    # Not before: its imports take longer than --help may.
    from batchfinder.cli.find import find_batch_size

    _exit_with(find_batch_size, **options, make_prober=make_prober)


@cli.command("run", short_help="Find it for a training script, unmodified.")
@run_options
@click.argument(
    "command_line", metavar="COMMAND...", nargs=-1, type=click.UNPROCESSED, required=True
)
def run_script(**options: Any) -> None:
    """Find the largest batch size that a training script really trains with.

    COMMAND is how you start the script, with {batch_size} where the size belongs, as in:
    batchfinder run -- python train.py --batch-size {batch_size}

    It is launched at several sizes, and each launch is ended after a few steps, before it saves
    anything. {scratch} is an empty folder, a new one for each launch.

    Exit status: 0 found, 1 error, 2 usage, 3 not even the smallest size fits, 130 Ctrl-C,
    143 SIGTERM.
    """
    _expect_no_numpy()
    from batchfinder.cli.run import run_command

    _exit_with(run_command, **options)


@cli.command(short_help="Estimate the same for GPUs you do not have.")
@click.argument("target")
@click.option("--gpu", "gpu_names", metavar="NAME", multiple=True, help="As rtx3090. Repeatable.")
@click.option(
    "--memory",
    metavar="SIZE",
    help="The GPU's memory, as 24GiB: of those named, or of any other GPU.",
)
@click.option(
    "--overhead", metavar="SIZE", help="What a process takes beside its tensors. [default: known]"
)
@shared_options
@click.option(
    "--expandable-segments",
    is_flag=True,
    help="As with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
)
@click.option(
    "--strategy",
    type=click.Choice(["ddp", "fsdp", "zero1", "zero2"]),
    help="On each rank of a job, with --world-size.",
)
@click.option(
    "--world-size", type=int, metavar="N", help="Ranks of the job; also shows 1, 2, 4 ... of them."
)
@click.option(
    "--calibrate",
    metavar="JSON",
    help="A result of `find --json` on your GPU to learn from, of the same target and options.",
)
@click.option("--forget-calibration", is_flag=True, help="Remove what was learned before.")
@click.option("--explain", is_flag=True, help="Show what the memory goes to, and where.")
@click.option(
    "--plot",
    metavar="FILE.png",
    help="Also draw the memory over one step; several GPUs share the picture.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def estimate(**options: Any) -> None:
    """Estimate the largest batch size on GPUs you do not have; no GPU is needed.

    TARGET is as for `find`. The training step runs on tensors without data, and its allocations
    in a model of the CUDA caching allocator.

    Exit status: 0 estimated, 1 error, 2 usage, 3 not even the smallest size fits on any of the
    GPUs, 130 Ctrl-C.
    """
    _expect_no_numpy()
    from batchfinder.cli.estimate import estimate_batch_size

    _exit_with(estimate_batch_size, **options)


@cli.command(short_help="List the GPUs that can be simulated.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array on stdout.")
def gpus(**options: Any) -> None:
    """List the GPUs that `estimate` knows, with the sources of their facts.

    Of AMD's, the compute capability is that of NVIDIA's generation with the same choice of kernels.
    """
    from batchfinder.cli.gpus import list_gpus

    _exit_with(list_gpus, **options)


def _expect_no_numpy() -> None:
    """Where there is no NumPy, PyTorch warns of it on import; nothing here needs it."""
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")


def _exit_with(command: Callable[..., int], **options: Any) -> None:
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set by main()
            signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(command(**options))
    except KeyboardInterrupt:  # before there was anything to tell
        sys.exit(130)
    except BatchFinderError as error:
        if isinstance(error, UserCodeError):
            click.echo(error.user_traceback, err=True, nl=False)
        click.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno == errno.EPIPE:  # a reader such as `head` that has seen enough: for click
            raise
        _end_output()
        click.echo(
            f"Error: the system refused something that is needed here ({error.strerror or error}); "
            "look for a full disk, or for a limit on files or processes",
            err=True,
        )
        sys.exit(1)


def _end_output() -> None:
    """Let what could not be written go nowhere, or Python complains of it once more on exiting."""
    with suppress(OSError), Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), 1)


def run() -> None:
    """Run the command line; where ranks are refused, the first tells it for all."""
    try:
        cli(standalone_mode=Job.from_environment().rank == 0)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as refusal:
        from batchfinder.cli.find import tell_rank_0

        tell_rank_0(refusal.format_message())
