"""Methods of a module, for a while other ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def methods_replaced(
    module: nn.Module, **functions: Callable[..., Any]
) -> Iterator[Callable[[], None]]:
    """Run other functions in the place of a module's methods, ``forward`` among them.

    Args:
        module: keeps what was put into the instance itself.
        functions: called in their place, by the method's name; without ``self``.

    Yields:
        What puts the module's own methods back before the block ends; safe to call twice.

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
