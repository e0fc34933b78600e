"""The variables of a user's ``step``, kept alive as those of a loop at module level. No torch.

People write their loop at module level and hand its body to a search as a function. The variables
of a function end with it. Those of the loop hold their values until the next step gives them new
ones: during the forward pass of a language model, gigabytes of old logits are alive.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


class LoopVariables:
    """Calls a function, and keeps its variables until the next call gives them new values.

    A variable of the call before is released at the first line that finds it assigned. Where a
    debugger or a coverage tool traces the process, and for functions that are not written in
    Python, nothing is kept.

    Attributes:
        values: the variables of the last call that are still kept, by name.

    Example:
        >>> def step(n):
        ...     doubled = [n, n]
        ...     return n
        >>> variables = LoopVariables(step)
        >>> variables(3), variables.values
        (3, {'n': 3, 'doubled': [3, 3]})
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._code = _code_of(function)
        self._frame: FrameType | None = None
        self.values: dict[str, Any] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Call the function. If it raises, nothing is kept."""
        if self._code is None or sys.gettrace() is not None:
            return self._function(*arguments)
        sys.settrace(self._watch_calls)
        try:
            result = self._function(*arguments)
            # A frame that is held outlives its call, and its variables with it.
            self.values = {**self._frame.f_locals} if self._frame else {}
        except BaseException:
            self.values = {}
            raise
        finally:
            sys.settrace(None)
            self._frame = None
        return result

    def _watch_calls(self, frame: FrameType, *_: Any) -> Callable[..., Any] | None:
        if self._frame is not None or frame.f_code is not self._code:
            return None
        self._frame = frame
        return self._watch_lines

    def _watch_lines(self, frame: FrameType, *_: Any) -> Callable[..., Any] | None:
        for name in frame.f_locals:
            self.values.pop(name, None)
        if self.values:
            return self._watch_lines
        sys.settrace(None)  # each call of a function would take longer
        return None


def _code_of(function: Any) -> CodeType | None:
    """Return the code that a call runs first; None if it is not Python's."""
    while isinstance(function, functools.partial):
        function = function.func
    called = function if hasattr(function, "__code__") else type(function).__call__
    code = getattr(called, "__code__", None)
    return code if isinstance(code, CodeType) else None
