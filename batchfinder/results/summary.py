"""Results that show their summary in a notebook or a debugger. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable


class Summarized:
    """A result whose ``repr`` is its summary. With all its parts it would fill screens.

    Example:
        >>> class Answer(Summarized):
        ...     def __str__(self) -> str:
        ...         return "batch size 8"
        >>> Answer()
        <Answer: batch size 8>
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"


def answer(batch_size: int, note: str) -> str:
    """Return one of several answers as text; ``note`` says why it is 0, if that is known."""
    return f"batch size {batch_size}" if batch_size else note or "nothing fits"


def table_of(device: str, *, is_measured: bool, rows: Iterable[object]) -> str:
    """Return rows as lines of text, below the device that they are for."""
    made = "measured" if is_measured else "estimated"
    return "\n  ".join([f"{made} on {device}", *map(str, rows)])
