"""The forward method of a module, for a while another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def forward_replaced(
    module: nn.Module, function: Callable[..., Any]
) -> Iterator[Callable[[], None]]:
    """Run another function in the place of a module's forward, around which wrappers do their work.

    Args:
        module: keeps a forward that was put into the instance itself.
        function: called in its place.

    Yields:
        What puts the module's own forward back before the block ends; safe to call twice.

    Example:
        >>> layer = nn.Identity()
        >>> with forward_replaced(layer, lambda x: x + 1):
        ...     layer(1)
        2
        >>> layer(1)
        1
    """
    own = {name: value for name, value in vars(module).items() if name == "forward"}

    def put_back() -> None:
        vars(module).pop("forward", None)
        vars(module).update(own)

    module.forward = function
    try:
        yield put_back
    finally:
        put_back()
