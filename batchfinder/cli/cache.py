"""``batchfinder cache``: the remembered answers of earlier searches."""

from __future__ import annotations

import json

import click

from batchfinder.errors import UsageError
from batchfinder.results.cache import AnswerCache
from batchfinder.units import count

# Characters of a key to show: enough to distinguish a thousand answers.
SHOWN = 8


def list_answers() -> None:
    """Print one line for each answer, the newest first."""
    cache = AnswerCache()
    answers = cache.answers()
    for answer in answers:
        size, device = (answer.result.get(name, "?") for name in ("batch_size", "device"))
        key = answer.key[:SHOWN]
        click.echo(f"{key}  {answer.when}  batch size {size} on {device}  {answer.command}")
    if not answers:
        click.echo(f"No answers in {cache.path}", err=True)


def show_answer(start_of_key: str) -> None:
    """Print an answer and what it depends on, as one JSON object.

    Raises:
        UsageError: not exactly one key starts like this.
    """
    found = AnswerCache().answers(start_of_key)
    if len(found) != 1:
        raise UsageError(
            f"{len(found)} answers have a key that starts with {start_of_key!r}. "
            "Try batchfinder cache list"
        )
    click.echo(json.dumps(vars(found[0]), indent=2))


def clear_answers() -> None:
    """Remove all answers."""
    cache = AnswerCache()
    click.echo(f"Removed {count(cache.clear(), 'answer')} from {cache.path}")
