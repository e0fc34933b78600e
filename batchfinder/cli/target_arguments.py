"""Read the text of ``--arg NAME=VALUE`` as keyword arguments. Imports no torch."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Sequence

from batchfinder.errors import UsageError


def parse_arguments(pairs: Sequence[str]) -> dict[str, object]:
    """Read the values of ``--arg``.

    Args:
        pairs: texts ``NAME=VALUE``. A Python literal is read as one, also true, false and none in
            lower case. Any other value is text. If a name occurs twice, the last one counts.

    Example:
        >>> parse_arguments(["depth=12", "lr=1e-3", "name=gpt2", "pretrained=false"])
        {'depth': 12, 'lr': 0.001, 'name': 'gpt2', 'pretrained': False}
    """
    arguments = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--arg {pair!r} cannot be read; write it as NAME=VALUE")
        arguments[name] = _parse_value(value)
    return arguments


def _parse_value(text: str) -> object:
    words = {"true": True, "false": False, "none": None}
    if text in words:
        return words[text]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes in strings
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
