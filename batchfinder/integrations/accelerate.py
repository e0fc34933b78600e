"""Accelerate's ``find_executable_batch_size``, which also grows and remembers. A drop-in.

Accelerate itself is not imported. Without ``max_batch_size`` it tries the same sizes as Accelerate.
It recognizes more kinds of out-of-memory errors, by the table that ``find`` uses.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from batchfinder.errors import NothingFitsError, UsageError
from batchfinder.integrations.ranks import collectives_begun, reason_of_any_rank
from batchfinder.probing.devices.choose_device import choose_device
from batchfinder.probing.devices.oom import classify
from batchfinder.probing.devices.oom_table import Tier

# As in Accelerate: a tenth less after each failure.
REDUCTION = 0.9

# Growing ends when the smallest size that failed is at most 5 % above the largest that worked: each
# attempt costs the time until it runs out of memory.
RESOLUTION = 0.05

_log = logging.getLogger(__name__)


@dataclass
class _Sizes:
    """The batch sizes of one function, as far as they are known.

    Attributes:
        next: the size to try next.
        worked: the largest size that ran to its end.
        failed: the smallest size that ran out of memory.
    """

    next: int
    worked: int = 0
    failed: int | None = None

    def reduced(self) -> int:
        """Return the size after ``next`` has failed."""
        return int(self.next * REDUCTION)


# Sizes of functions that grow, by code: each call of an enclosing function may decorate them anew.
_remembered: dict[object, _Sizes] = {}


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    max_batch_size: int | None = None,
) -> Callable[..., Any]:
    """Run a training function with a batch size that fits, as Accelerate's decorator does.

    The function is called with ``starting_batch_size``. When it runs out of memory, its memory is
    released and it is called again with a smaller size. Later calls start with the size that
    worked. The function is not changed: a model or optimizer made outside of it keeps the steps of
    a call that failed. Make them inside, or load a checkpoint there.

    Ranks that run collectives in a call agree on its outcome: if one runs out of memory, all try
    the next size. If the others wait for it within a collective, it ends with an error.

    With ``max_batch_size`` later calls also try larger sizes: twice the size that worked, then half
    of the way to the one that failed, until 5 % are left. Each call returns a result: if the larger
    size fails, the call goes back to the one that worked. The sizes of a function are remembered
    until the process ends, even if it is decorated anew. They are logged at the level ``INFO`` by
    ``batchfinder.integrations.accelerate``.

    Args:
        function: ``function(batch_size, ...)``. None: return a decorator.
        starting_batch_size: the size of the first call.
        reduce_batch_size_fn: called without arguments after a failure, returns the next size.
            Default: nine tenths of the last one, rounded down.
        max_batch_size: no call tries a larger size. Default: do not grow.

    Returns:
        The function without its first argument; or the decorator.

    Raises:
        UsageError: ``max_batch_size`` is combined with ``reduce_batch_size_fn``, or is too small.
        TypeError: the batch size was passed by the caller.
        NothingFitsError: size 0 was reached. It is a ``RuntimeError``, as Accelerate raises.
        RankError: a rank ran out of memory where no other can follow it to the next size.
        Exception: what the function raises, except out-of-memory errors.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=64)
        ... def train(batch_size, epochs):
        ...     if batch_size > 60:
        ...         raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        ...     return batch_size, epochs
        >>> train(3)
        (57, 3)
    """
    if max_batch_size is not None and reduce_batch_size_fn is not None:
        raise UsageError(
            "reduce_batch_size_fn holds sizes of its own, so they cannot grow. Try it without "
            "max_batch_size"
        )
    if max_batch_size is not None and max_batch_size < starting_batch_size:
        raise UsageError(
            f"max_batch_size, {max_batch_size}, is less than starting_batch_size, "
            f"{starting_batch_size}. Try max_batch_size={starting_batch_size}"
        )
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            max_batch_size=max_batch_size,
        )
    sizes = _Sizes(starting_batch_size)
    code = getattr(function, "__code__", None)
    if max_batch_size is not None and isinstance(code, CodeType):
        sizes = _remembered.setdefault(code, sizes)

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        _check_arguments(function, arguments)
        if max_batch_size is not None:
            sizes.next = _grown(sizes, max_batch_size)
        while sizes.next > 0:
            _give_back_memory()
            size = sizes.next
            began = collectives_begun()
            result, reason = _tried(function, size, *arguments, **options)
            if collectives_begun() != began:
                reason = reason_of_any_rank(reason, size)
            if not reason:
                sizes.worked = size
                _log.info("%s: batch size %d works", run.__name__, size)
                return result
            result, sizes.failed = None, size
            sizes.worked = sizes.worked if sizes.worked < size else 0
            sizes.next = sizes.worked or (reduce_batch_size_fn or sizes.reduced)()
            _log.info("%s: batch size %d ran out of memory (%s)", run.__name__, size, reason)
        _remembered.pop(code, None)
        raise NothingFitsError(
            f"No executable batch size found, reached zero. Try a smaller model or shorter "
            f"sequences in {run.__name__}"
        )

    return run


def _tried(
    function: Callable[..., Any], size: int, *arguments: Any, **options: Any
) -> tuple[Any, str]:
    """Return the function's result, and the text of its out-of-memory error, "" without one."""
    # Once this has returned, no frame of the error holds the tensors of the failed call.
    try:
        return function(size, *arguments, **options), ""
    except Exception as error:
        if not (reason := _out_of_memory(error)):
            raise
        return None, reason


def _grown(sizes: _Sizes, most: int) -> int:
    """Return the size to try next: a larger one, if there is room below the size that failed."""
    worked, failed = sizes.worked, sizes.failed
    if not worked:
        return min(sizes.next, most)
    if failed is None:
        return min(2 * worked, most)
    is_narrow = failed - worked <= max(1, RESOLUTION * worked)
    return min(worked if is_narrow else (worked + failed) // 2, most)


def _check_arguments(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    names = [*inspect.signature(function).parameters]
    if len(names) <= len(arguments):
        values = zip(names[1:], arguments[1:], strict=False)
        call = ", ".join(f"{name}={value}" for name, value in values)
        raise TypeError(
            f"Batch size was passed into `{function.__name__}` as the first argument when called. "
            f"The decorator does so already. Try `{function.__name__}({call})`"
        )


def _out_of_memory(error: Exception) -> str:
    """Return the text of an out-of-memory error; "" for any other error."""
    failure = classify(error)
    if failure is not None:
        # A broken context does not train at any size.
        return "" if failure.tier is Tier.POISONED else failure.reason
    is_named = isinstance(error, RuntimeError) and " out of memory." in str(error)
    return str(error) if is_named else ""


def _give_back_memory() -> None:
    gc.collect()
    # Do not start CUDA here: a function that forks its own processes could not use it then.
    is_started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_started or not torch.cuda.is_available():
        choose_device(None).release_cache()
