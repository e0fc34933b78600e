"""The options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import click
from click import Context, Parameter
from click.shell_completion import CompletionItem

from batchfinder.probing.options import MODES, PRECISIONS
from batchfinder.training.frameworks import ATTENTION, METHODS

Option: TypeAlias = Callable[[Callable[..., None]], Callable[..., None]]
"""What ``click.option()`` returns: it adds the option to a command."""


def complete_files(_: Context, __: Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the names of files, as in a target before its colon."""
    return [CompletionItem(incomplete, type="file")]


def complete_gpus(_: Context, __: Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names of GPUs, without their spaces."""
    from batchfinder.simulation.gpus import all_gpus

    names = (gpu.name.lower().replace(" ", "") for gpu in all_gpus())
    return [CompletionItem(name) for name in names if name.startswith(incomplete.lower())]


argument = partial(click.argument, shell_complete=complete_files)
number = partial(click.option, type=int, metavar="N")
seconds = partial(click.option, type=float, metavar="S")
flag = partial(click.option, is_flag=True)


def with_options(*options: Option) -> Option:
    """Return a decorator that adds options to a command, in their order."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


DEVICE_OPTIONS = (
    click.option(
        "--device",
        metavar="D",
        help="cuda:0, cpu, mps ... [default: an accelerator if there is one]",
    ),
    click.option(
        "--memory-limit", metavar="SIZE", help="Use no more memory than this, such as 24GiB."
    ),
)
gpu_memory_option = click.option(
    "--memory",
    metavar="SIZE",
    help="Give the GPU this much memory, such as 24GiB. Enough alone, without --gpu.",
)
GPU_OPTIONS = (
    click.option(
        "--gpu",
        "gpu_names",
        metavar="NAME",
        multiple=True,
        shell_complete=complete_gpus,
        help="Simulate a GPU, such as rtx3090. Repeatable.",
    ),
    gpu_memory_option,
)
TARGET_OPTIONS = (
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
        "--loader",
        metavar="TARGET",
        help="Function that returns your DataLoader, data set or LightningDataModule, as "
        "FILE.py:FUNCTION: train on batches of it, the longest first.",
    ),
    click.option(
        "--arg",
        "pairs",
        metavar="NAME=VALUE",
        multiple=True,
        help="Pass a keyword argument to the target's function. Repeatable.",
    ),
)
headroom_option = click.option(
    "--headroom",
    metavar="PCT",
    default="5",
    show_default=True,
    help="Keep this percentage of the memory free, as for the smaller last batch of an epoch.",
)
STEP_OPTIONS = (
    click.option(
        "--precision",
        type=click.Choice(PRECISIONS),
        default="fp32",
        show_default=True,
        help="Train under autocast; fp16 also with a GradScaler.",
    ),
    click.option(
        "--optimizer",
        metavar="NAME",
        help="Train with this class of torch.optim, or adamw-fused. [default: the target's, or "
        "adamw]",
    ),
)
MODE_OPTIONS = (
    click.option(
        "--mode",
        type=click.Choice(MODES),
        default="train",
        show_default=True,
        help="Run forward passes only: with a training's states, after small steps (eval), or "
        "without (inference). For validation inside a training, --eval-batch-size N is the proof.",
    ),
    number("--eval-batch-size", help="Also validate after every step, with batches of N examples."),
)
accumulate_option = flag(
    "--accumulate",
    help="Measure with gradient accumulation: gradients stay alive in the next forward pass.",
)
compile_option = flag("--compile", "compiled", help="Train through torch.compile.")
env_option = click.option(
    "--env",
    "settings",
    metavar="NAME=VALUE",
    multiple=True,
    help="Set a variable for the script; placeholders are replaced. Repeatable.",
)
file_option = click.option(
    "--file",
    "files",
    metavar="FILE",
    multiple=True,
    help="Replace placeholders, as in batch_size: {batch_size}, in a copy of a file that "
    "COMMAND names, such as the script. Repeatable.",
)
json_option = flag("--json", "as_json", help="Print one JSON object on stdout.")
SIZE_OPTIONS = (
    number("--min-batch-size", default=1, show_default=True, help="Try no smaller size."),
    number("--max-batch-size", help="Try no larger size, for example the size of the data set."),
    number("--multiple-of", default=1, show_default=True, help="Try only multiples of this."),
)
STUDY_OPTIONS = (
    *TARGET_OPTIONS,
    headroom_option,
    *STEP_OPTIONS,
    accumulate_option,
    *SIZE_OPTIONS,
)
"""The training step and the sizes allowed, for commands that search several times."""

SHARED_OPTIONS = (*STUDY_OPTIONS, *MODE_OPTIONS)
"""The options of both `find` and `estimate`: the training step, and the sizes allowed."""

SEARCH_OPTIONS = (
    seconds("--time-limit", help="End within S seconds, with the largest size confirmed by then."),
    flag("--no-cache", help="Neither use the answer of an earlier search nor remember this one."),
)
"""The time limit of a search, and whether its answer is remembered."""

PLAN_OPTIONS = (
    number(
        "--global-batch-size",
        help="Also show how to reach this size by gradient accumulation; -v adds lines to paste. "
        "Add --accumulate.",
    ),
    flag(
        "--noise-scale",
        help="Also measure beyond how many examples larger batches stop helping; needs --loader.",
    ),
)
"""The plan for an optimizer step."""

quiet_option = flag("-q", "--quiet", help="Print only the answer.")
OUTPUT_OPTIONS = (
    json_option,
    click.option("--report", metavar="FILE.html", help="Also write a page with pictures."),
)

LANGUAGE_MODEL_OPTIONS = (
    click.option(
        "--seq",
        "lengths",
        metavar="TOKENS",
        multiple=True,
        help="hf: tokens in each example. Repeatable, or 1024,4096: a table of lengths.  "
        "[default: 2048]",
    ),
    click.option(
        "--lora",
        type=click.IntRange(min=1),
        metavar="RANK",
        help="hf: train adapters of this rank.",
    ),
    flag("--4bit", "four_bit", help="hf: quantize the weights (nf4)."),
    click.option(
        "--method",
        type=click.Choice(METHODS),
        help="hf: train all weights, LoRA, LoRA on 4-bit weights, or DPO.",
    ),
    flag("--checkpointing", help="hf: recompute activations in the backward pass."),
    click.option(
        "--attention",
        type=click.Choice([*ATTENTION]),
        help="hf: [default: sdpa, or eager if the model has no sdpa]",
    ),
)
"""The options for a language model named by its configuration (``hf:``)."""

chart_option = flag("--chart", help="Also draw memory against batch size.")


RUN_OPTIONS = (
    click.option(
        "--device", metavar="D", help="cuda, cuda:1, cpu ... [default: a GPU if there is one]"
    ),
    click.option(
        "--memory-limit",
        metavar="SIZE",
        help="Use no more than this, such as 24GiB. Without it, the CPU gets 10 minutes.",
    ),
    headroom_option,
    *SIZE_OPTIONS,
    number(
        "--global-batch-size",
        help="Try only sizes that divide N. {accumulation} times {batch_size} is N.",
    ),
    env_option,
    file_option,
    click.option(
        "--steps",
        type=int,
        metavar="K",
        default=3,
        show_default=True,
        help="Least number of optimizer steps in each launch; on the CPU 6 at least.",
    ),
    click.option(
        "--mode",
        type=click.Choice(MODES),
        default="train",
        show_default=True,
        help="Count forward passes without gradients as steps (eval, inference).",
    ),
    seconds(
        "--timeout",
        help="Seconds without a step after which a launch counts as hung. [default: by the first]",
    ),
    *SEARCH_OPTIONS,
    *OUTPUT_OPTIONS,
    chart_option,
    quiet_option,
    flag("-v", "--verbose", help="Show more, and what the script prints."),
)

CHECK_OPTIONS = (
    number("--batch-size", required=True, help="Try this size."),
    click.option(
        "--gpu",
        metavar="NAME",
        shell_complete=complete_gpus,
        help="Estimate it for this GPU, such as a10g.",
    ),
    gpu_memory_option,
    *DEVICE_OPTIONS,
    click.option("--max-memory", metavar="SIZE", help="Exit 3 if the peak is above this."),
    *TARGET_OPTIONS,
    headroom_option,
    *STEP_OPTIONS,
    *MODE_OPTIONS,
    accumulate_option,
    *LANGUAGE_MODEL_OPTIONS,
    compile_option,
    env_option,
    file_option,
    json_option,
    quiet_option,
    flag("-v", "--verbose", help="Show what the code prints."),
)
