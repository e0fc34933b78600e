"""``batchfinder cache``: the remembered answers of earlier searches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from batchfinder.errors import UsageError

if TYPE_CHECKING:
    from batchfinder.results.cache import AnswerCache

# Characters of a key to show: enough to distinguish a thousand answers.
SHOWN = 8


def _cache() -> AnswerCache:
    from batchfinder.results.cache import AnswerCache  # late, because --help must be fast

    return AnswerCache()


def list_answers() -> int:
    """Print one line for each answer, the newest first; return the exit status."""
    cache = _cache()
    answers = cache.answers()
    for answer in answers:
        size, device = (answer.result.get(name, "?") for name in ("batch_size", "device"))
        key = answer.key[:SHOWN]
        click.echo(f"{key}  {answer.when}  batch size {size} on {device}  {answer.command}")
    if not answers:
        click.echo(f"No answers in {cache.path}", err=True)
    return 0


def show_answer(start_of_key: str) -> int:
    """Print an answer and what it depends on, as one JSON object; return the exit status.

    Raises:
        UsageError: not exactly one key starts like this.
    """
    import json

    found = _cache().answers(start_of_key)
    if len(found) != 1:
        raise UsageError(
            f"{len(found)} answers have a key that starts with {start_of_key!r}. "
            "Try batchfinder cache list"
        )
    answer = found[0]
    content = {**vars(answer), "when": answer.when}
    click.echo(json.dumps(content, indent=2))
    return 0


def clear_answers() -> int:
    """Remove all answers; return the exit status."""
    cache = _cache()
    count = cache.clear()
    click.echo(f"Removed {count} answer{'s' * (count != 1)} from {cache.path}")
    return 0


@click.group(short_help="List, show or clear remembered answers.")
def cache() -> None:
    """List, show or clear the answers that `find` and `run` remember.

    They are in the folder that BATCHFINDER_CACHE names, or the system's usual one. An answer is
    confirmed by real steps each time before it is used.
    """


@cache.command("list")
def cache_list() -> None:
    """List the remembered answers, the newest first."""
    from batchfinder.cli.app import exit_with

    exit_with(list_answers)


@cache.command("show")
@click.argument("key")
def cache_show(key: str) -> None:
    """Print an answer, and what it depends on, as JSON.

    KEY is the start of its key, as `list` shows it.
    """
    from batchfinder.cli.app import exit_with

    exit_with(show_answer, start_of_key=key)


@cache.command("clear")
def cache_clear() -> None:
    """Remove all remembered answers."""
    from batchfinder.cli.app import exit_with

    exit_with(clear_answers)
