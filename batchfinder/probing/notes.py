"""Texts for the user, each kept once."""

from __future__ import annotations


class Notes:
    """Texts for the user, without repeats, in the order in which they first came.

    Example:
        >>> notes = Notes()
        >>> notes.add("small", "slow")
        >>> notes.add("small")
        >>> notes.texts
        ('small', 'slow')
    """

    def __init__(self) -> None:
        self._texts: dict[str, None] = {}

    def add(self, *texts: str | None) -> None:
        """Add the texts that are not there yet; None and "" are no texts."""
        self._texts.update(dict.fromkeys(filter(None, texts)))

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts so far."""
        return tuple(self._texts)
