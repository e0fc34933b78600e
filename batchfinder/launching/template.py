"""The command of ``batchfinder run`` with placeholders, and the command at one batch size."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from batchfinder.errors import UsageError

BATCH_SIZE, ACCUMULATION, SCRATCH = "batch_size", "accumulation", "scratch"
NAMES = (BATCH_SIZE, ACCUMULATION, SCRATCH)
# The value of {scratch} in a command to paste, for which nothing creates an empty folder.
SCRATCH_IN_COMMAND = "scratch"

_PLACEHOLDER = re.compile(r"\{([\w-]+)\}")

# A launcher, with how many processes it shall start on this machine. Options of the script follow
# the first .py, and those of several machines count the processes of all.
_RANKS = re.compile(
    r"\b(?:accelerate|accelerate\.commands\.launch|torchrun|torch\.distributed\.\w+) "
    r"(?!.*--num[-_]machines[ =](?!1\b))"
    r"(?:(?!\S+\.py\b).)*?--(?:num[-_]processes|nproc[-_]per[-_]node)[ =](\d+)\b"
)


@dataclass(frozen=True)
class Template:
    """A command with placeholders.

    Attributes:
        arguments: the program and its arguments.
        environment: variables to set.
        files: configuration files with placeholders, as the command names them.
        global_batch_size: the product of batch size and accumulation steps; None: no accumulation.

    Raises:
        UsageError: a placeholder or a file is missing, misspelled or superfluous.

    Example:
        >>> template = Template(["train.py", "--bs={batch_size}"])
        >>> template.fill(8, Path("scratch"))
        (['train.py', '--bs=8'], {})
        >>> template.command(8)
        'train.py --bs=8'
    """

    arguments: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    global_batch_size: int | None = None

    def __post_init__(self) -> None:
        for name, text in self._texts.items():
            if not any(f"{{{known}}}" in text for known in NAMES):
                raise UsageError(
                    f"--file {name} has no placeholder. Try {{batch_size}} in place of the size"
                )
            if not any(name in argument for argument in self.arguments):
                raise UsageError(f"the command does not name --file {name}. Try to add it")
        found = self._placeholders
        if BATCH_SIZE not in found:
            _refuse_missing(found)
        _refuse_misspelled(found)
        if ACCUMULATION in found and self.global_batch_size is None:
            raise UsageError("{accumulation} needs a product. Try --global-batch-size 512")

    @cached_property
    def _texts(self) -> dict[str, str]:
        return {name: _read(name) for name in self.files}

    @property
    def _placeholders(self) -> set[str]:
        everything = [*self.arguments, *self.environment.values(), *self._texts.values()]
        return {name for text in everything for name in _PLACEHOLDER.findall(text)}

    def remark_on_ranks(self, processes: int) -> str:
        """Return the warning if a launcher was asked for another number of processes; else "".

        Example:
            >>> command = ["accelerate", "launch", "--cpu", "--num_processes", "2", "a.py"]
            >>> Template([*command, "{batch_size}"]).remark_on_ranks(1)
            "the command asks for 2 processes, and 1 trained. Check the launcher's options"
        """
        found = _RANKS.search(" ".join(self.arguments))
        if found is None or int(found[1]) == processes:
            return ""
        asked = f"the command asks for {found[1]} processes, and {processes} trained"
        return f"{asked}. Check the launcher's options"

    def remark_on_accumulation(self) -> str:
        """Return the warning if the command does not get the accumulation steps; else ""."""
        if self.global_batch_size is None or ACCUMULATION in self._placeholders:
            return ""
        return (
            "the command has no {accumulation}, so the script has to reach "
            f"{self.global_batch_size} by itself. Only sizes that divide it are tried"
        )

    def fill(self, batch_size: int, folder: Path) -> tuple[list[str], dict[str, str]]:
        """Return the command at one batch size, and variables to add to its environment.

        ``folder`` gets copies of files and the scratch. A copied script still imports the modules
        that stand beside it.
        """
        values = self._values(batch_size, str(folder / "scratch"))
        arguments = [_replaced(argument, values) for argument in self.arguments]
        for number, name in enumerate(self.files):
            copy = folder / str(number) / Path(name).name
            copy.parent.mkdir(parents=True)
            copy.write_text(_replaced(_read(name), values), encoding="utf-8")
            arguments = [argument.replace(name, str(copy)) for argument in arguments]
        environment = {name: _replaced(text, values) for name, text in self.environment.items()}
        if homes := [str(Path(name).parent.resolve()) for name in self.files if name[-3:] == ".py"]:
            usual = environment.get("PYTHONPATH") or os.environ.get("PYTHONPATH")
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*homes, usual]))
        return arguments, environment

    def command(self, batch_size: int) -> str:
        """Return the command at one batch size, for a shell."""
        values = self._values(batch_size, SCRATCH_IN_COMMAND)
        arguments = [_replaced(argument, values) for argument in self.arguments]
        lines = []
        for name in self.files:
            path, text = Path(name), _read(name)
            copy = str(path.with_name(f"{path.stem}-{batch_size}{path.suffix}"))
            held = {key: value for key, value in values.items() if f"{{{key}}}" in text}
            swaps = " ".join(f"-e 's/{{{key}}}/{value}/g'" for key, value in held.items())
            lines.append(f"sed {swaps} {shlex.quote(name)} > {shlex.quote(copy)} && ")
            arguments = [argument.replace(name, copy) for argument in arguments]
        settings = "".join(
            f"{name}={shlex.quote(_replaced(text, values))} "
            for name, text in self.environment.items()
        )
        return f"{''.join(lines)}{settings}{shlex.join(arguments)}"

    def _values(self, batch_size: int, scratch: str) -> dict[str, str]:
        values = {BATCH_SIZE: str(batch_size), SCRATCH: scratch}
        if self.global_batch_size is not None:
            values[ACCUMULATION] = str(self.global_batch_size // batch_size)
        return values


def _replaced(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def not_started(program: str, why: str) -> UsageError:
    """Return the error for a program that the system does not start."""
    fix = f"python {program}" if program.endswith(".py") else "its full path, or bash before it"
    return UsageError(f"{program} cannot be started: {why}. Try {fix}")


def _read(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(
            f"--file {name} cannot be read: {reason}. Try the path of a file with {{batch_size}}"
        ) from None


def _refuse_missing(found: Iterable[str]) -> None:
    near = [name for name in found if difflib.get_close_matches(name, [BATCH_SIZE])]
    hint = f"{{{near[0]}}} is not it. " if near else ""
    raise UsageError(
        f"the command has no {{batch_size}}. {hint}"
        "Try: batchfinder run -- python train.py --batch-size {batch_size}. If the size stands in "
        "the script, a configuration file or a variable, see --file and --env in batchfinder run "
        "--help"
    )


def _refuse_misspelled(found: Iterable[str]) -> None:
    for name in sorted(set(found) - set(NAMES)):
        if near := difflib.get_close_matches(name, NAMES, n=1, cutoff=0.75):
            raise UsageError(f"there is no placeholder {{{name}}}. Try {{{near[0]}}}")
