"""Deliver the answer of any command, and name the files that its launches left."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from batchfinder.launching.leftovers import Leftovers


def typed() -> str:
    """Return what was typed after ``batchfinder``, for a shell."""
    return shlex.join(sys.argv[1:])


def deliver(data: Mapping[str, Any], *, as_json: bool, report: str | None) -> None:
    """Print the answer as one JSON object, and write the report, as requested.

    The command that gave the answer is added to it as ``reproduce``.

    Raises:
        UsageError: the page cannot be written.
    """
    data = {**data, "reproduce": f"batchfinder {typed()}"}
    if as_json:
        click.echo(json.dumps(data, allow_nan=False))
    if report is not None:
        from batchfinder.reporting.page.page import write_page

        write_page([data], report)


def print_notes(texts: Iterable[str], *, quiet: bool = False) -> None:
    """Print each text once on stderr, unless only the answer is wanted."""
    for text in dict.fromkeys(() if quiet else filter(None, texts)):
        click.echo(f"Note: {text}", err=True)


def width_of_table() -> float:
    """Return ``COLUMNS``, or those of the terminal on stdout; infinity for a file or a pipe."""
    return shutil.get_terminal_size((0, 0)).columns or math.inf


@contextmanager
def live_line(*, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what runs now on the last line of a terminal.

    Each text replaces the one before; "" clears the line. Pipes and files get a line for each piece
    of work, ``name: what it does ...``, not for each probe of it. With ``quiet`` nothing is shown.
    Rich's status would need a thread, and a search on the CPU forks this process.
    """
    is_live = os.isatty(2) and os.environ.get("TERM") != "dumb"
    named = ""

    def show(text: str) -> None:
        nonlocal named
        if quiet:
            return
        if not is_live:
            name = text.partition(": ")[0] if text.endswith("...") else text
            if name not in ("", named):
                click.echo(text, err=True)
                named = name
        else:
            room = shutil.get_terminal_size().columns - 1  # a wrapped line could not be cleared
            click.echo(f"\r\033[K{text[:room]}", err=True, nl=False)

    try:
        yield show
    finally:
        show("")


def report_results(files: Sequence[str], *, output: str) -> None:
    """Run ``batchfinder report``."""
    from batchfinder.reporting.page.page import check_report, read_results, write_page

    check_report(output)
    write_page(read_results(files), output)
    click.echo(f"Wrote {output}")


@contextmanager
def leftovers_named() -> Iterator[Leftovers]:
    """Name on standard error, at the end, the files that launches have left, once each."""
    leftovers = Leftovers(Path.cwd())
    try:
        yield leftovers
    finally:
        if text := leftovers.warning():
            click.echo(f"Warning: {text}", err=True)
