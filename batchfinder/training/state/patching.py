"""Replace attributes of modules, classes and objects for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, /, **values: Any) -> Iterator[Callable[[], None]]:
    """Replace attributes, such as ``forward``, while the block runs.

    Args:
        owner: a module, a class or an object. Attributes that it inherits come back too.
        values: the replacements, by name. Functions of an object are called without ``self``.

    Yields:
        A function that restores the attributes before the block ends; safe to call twice.

    Example:
        >>> from torch import nn
        >>> layer = nn.Identity()
        >>> with replaced(layer, forward=lambda x: x + 1):
        ...     layer(1)
        2
        >>> layer(1)
        1
    """
    # The owner's class may have a __setattr__ of its own, as nn.Module has: it must not react.
    kind: Any = type if isinstance(owner, type) else object
    own = {name: value for name, value in vars(owner).items() if name in values}

    def put_back() -> None:
        for name in values:
            if name in own:
                kind.__setattr__(owner, name, own[name])
            elif name in vars(owner):
                kind.__delattr__(owner, name)

    for name, value in values.items():
        kind.__setattr__(owner, name, value)
    try:
        yield put_back
    finally:
        put_back()
