"""Which errors mean out of memory: the table of ``oom_table.py``, applied.

Types decide where they can (``torch.OutOfMemoryError``, ``MemoryError``). Texts count only in the
exceptions that PyTorch and the drivers raise, that is ``RuntimeError`` and its kinds: a
``ValueError`` of the user's own that talks about memory is a bug of theirs.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from batchfinder.probing.devices.oom_table import TABLE, Row, Tier

_REASON_LENGTH = 160
# GCC, which the system may have killed for memory, and Clang.
_COMPILER_RAN_OUT = re.compile(
    "out of memory allocating|virtual memory exhausted|Killed signal terminated"
    "|LLVM ERROR: out of memory"
)
NEEDS_MORE_THAN_ONE = "Expected more than 1 value per channel when training"


@dataclass(frozen=True)
class Failure:
    """A failure that bounds the batch size.

    Attributes:
        tier: what it says about memory.
        reason: one line for people, in the words of the error itself.
    """

    tier: Tier
    reason: str


def classify(error: BaseException, handled: BaseException | None = None) -> Failure | None:
    """Tell whether an exception, or one that it was raised from or during, bounds the batch size.

    The whole chain counts, ``raise … from None`` included: that hides a traceback from people, but
    memory did run out. The highest tier in the chain wins. Call it on an exception
    that was raised outside any ``except`` block of our own, or its chain holds old failures.

    Args:
        error: what the training step raised.
        handled: what was being handled when it ran, by the user, who looks for another size once
            training has run out of memory: that is not the step's.

    Returns:
        The failure; None if it is not one of memory: the user's own bug, or Ctrl-C.

    Example:
        >>> classify(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."))
        Failure(tier=<Tier.CERTAIN: 'certain'>, reason='CUDA out of memory. Tried to allocate 2.00 GiB.')
        >>> classify(ValueError("the CUDA out of memory handler is missing")) is None
        True
    """  # noqa: E501 - a doctest's output cannot be broken
    if isinstance(error, KeyboardInterrupt):
        return None
    try:
        return _highest(
            Failure(row.tier, _reason(match) or type(link).__name__)
            for link in _chain(error, handled)
            for row in TABLE
            if isinstance(link, row.types) and (match := _search(row, str(link)))
        )
    except MemoryError:  # so little is left that the error cannot even be read
        return Failure(Tier.CERTAIN, "out of memory")


def classify_text(text: str) -> Failure | None:
    """Tell the same from what a process wrote to stderr before it died.

    Weaker than :func:`classify`, as text has no types: for processes that leave nothing else. What
    libraries print of errors that are only probably memory may be a warning, and long past.

    Args:
        text: the last lines, with a traceback or the C++ runtime's last words.

    Returns:
        The failure; None if no row of the table is found in the text.

    Example:
        >>> classify_text("terminate called after throwing an instance of 'std::bad_alloc'").tier
        <Tier.CERTAIN: 'certain'>
    """
    return _highest(
        Failure(row.tier, _reason(match))
        for row in TABLE
        if row.pattern
        and (row.tier is not Tier.PROBABLE or not row.types)
        and (match := _search(row, text))
    )


def needs_more_than_one_sample(error: BaseException, handled: BaseException | None = None) -> bool:
    """Whether a normalization layer asks for a larger batch; the arguments are as for `classify`.

    Source: ``torch.nn.functional.batch_norm``, which takes no statistics of a single value.

    Example:
        >>> import torch
        >>> try:
        ...     torch.nn.BatchNorm1d(3)(torch.ones(1, 3))
        ... except ValueError as error:
        ...     needs_more_than_one_sample(error)
        True
    """
    return any(
        isinstance(link, (ValueError, RuntimeError)) and NEEDS_MORE_THAN_ONE in str(link)
        for link in _chain(error, handled)
    )


def compiler_ran_out(error: BaseException) -> bool:
    """Whether it was the compiler of C++ kernels that ran out of memory, a process of its own.

    The limit of this process on the CPU is its limit too, whatever the size of the batch.

    Example:
        >>> class CppCompileError(RuntimeError):  # as torch._inductor.exc has it
        ...     pass
        >>> compiler_ran_out(CppCompileError("cc1plus: out of memory allocating 48 bytes"))
        True
    """
    return any(
        type(link).__name__ == "CppCompileError" and _COMPILER_RAN_OUT.search(str(link))
        for link in _chain(error)
    )


def _chain(error: BaseException, handled: BaseException | None = None) -> Iterator[BaseException]:
    """The exception and all that it was raised from or during, each once; but what was handled."""
    pending: list[BaseException | None] = [error]
    seen = {id(link) for link in _chain(handled)} - {id(error)} if handled else set()
    while pending:
        link = pending.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            pending += [link.__context__, link.__cause__]


def _search(row: Row, text: str) -> re.Match[str] | None:
    return re.search(row.pattern, text, re.MULTILINE)


def _highest(failures: Iterable[Failure]) -> Failure | None:
    ranks = list(Tier)
    return max(failures, key=lambda failure: ranks.index(failure.tier), default=None)


def _reason(match: re.Match[str]) -> str:
    """The line around the match, from the sentence it begins in: what comes before is noise."""
    text = match.string
    start = max(text.rfind("\n", 0, match.start()) + 1, text.rfind(". ", 0, match.start()) + 1)
    line = text[start:].strip().partition("\n")[0]
    return textwrap.shorten(line, _REASON_LENGTH, placeholder=" …")
