"""Replace methods of a module for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def methods_replaced(
    module: nn.Module, **functions: Callable[..., Any]
) -> Iterator[Callable[[], None]]:
    """Replace methods of a module, such as ``forward``, while the block runs.

    Args:
        module: the module. Methods that were set on the instance itself come back afterwards.
        functions: the replacements, by the method's name. They are called without ``self``.

    Yields:
        A function that restores the module's methods before the block ends; safe to call twice.

    Example:
        >>> layer = nn.Identity()
        >>> with methods_replaced(layer, forward=lambda x: x + 1):
        ...     layer(1)
        2
        >>> layer(1)
        1
    """
    own = {name: value for name, value in vars(module).items() if name in functions}

    def put_back() -> None:
        for name in functions:
            vars(module).pop(name, None)
        vars(module).update(own)

    vars(module).update(functions)
    try:
        yield put_back
    finally:
        put_back()
