"""With what ``find_max_batch`` and the estimates tell what is to be known of an answer."""

from __future__ import annotations

import warnings
from collections.abc import Iterable


class BatchFinderWarning(UserWarning):
    """Something that the caller should know of an answer; the result has it in ``warnings``."""


def warn_of(texts: Iterable[str]) -> None:
    """Warn the caller of the function that this is called in."""
    for text in texts:
        warnings.warn(text, BatchFinderWarning, stacklevel=3)
