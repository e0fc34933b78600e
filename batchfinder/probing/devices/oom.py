"""The decision whether an error means out of memory, by the table in ``oom_table.py``.

The type decides where it can (``torch.OutOfMemoryError``, ``MemoryError``). Texts count only in
exceptions that PyTorch and the drivers raise, ``RuntimeError`` and its subclasses. A ``ValueError``
that mentions memory is a bug in the user's code.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from batchfinder.errors import DeviceError
from batchfinder.probing.devices.oom_table import TABLE, Row, Tier
from batchfinder.units import format_bytes

_REASON_LENGTH = 160
# GCC, which the system may have killed to free memory, and Clang.
_COMPILER_RAN_OUT = re.compile(
    "out of memory allocating|virtual memory exhausted|Killed signal terminated"
    "|LLVM ERROR: out of memory"
)


@dataclass(frozen=True)
class Failure:
    """A failure that bounds the batch size.

    Attributes:
        tier: what the failure says about memory.
        reason: one line for people, quoted from the error.
    """

    tier: Tier
    reason: str

    @property
    def is_memory(self) -> bool:
        """True if memory ran out, for sure or probably."""
        return self.tier in (Tier.CERTAIN, Tier.PROBABLE)


def classify(error: BaseException, handled: BaseException | None = None) -> Failure | None:
    """Decide whether an exception, or another one in its chain, bounds the batch size.

    The whole chain counts, also behind ``raise … from None``, which hides a traceback but not the
    fact that memory ran out. The highest tier in the chain wins. The exception must have been
    raised outside our own ``except`` blocks, or its chain holds old failures.

    Args:
        error: the exception of the training step.
        handled: the exception that the user was handling when the step ran. It does not count: a
            user may search for another size after training has run out of memory.

    Returns:
        The failure; None if it is not about memory, such as a bug in the user's code or Ctrl-C.

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
            for link in chain(error, handled)
            for row in TABLE
            if isinstance(link, row.types) and (match := _search(row, str(link)))
        )
    except MemoryError:  # too little is left to read the error
        return Failure(Tier.CERTAIN, "out of memory")


def classify_text(text: str) -> Failure | None:
    """Decide the same from the last lines that a process wrote to stderr before it died.

    This is weaker than :func:`classify`, because text has no types; use it for processes that leave
    nothing else. Rows of the probable tier do not count if exceptions have them too: a library may
    have printed such a text long before, as a warning.

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


def refuse_if_compiler_ran_out(error: BaseException, budget_bytes: int) -> None:
    """Raise a DeviceError if the compiler of C++ kernels ran out of memory.

    The compiler is a child process. On the CPU it has the same limit as this process, whatever the
    batch size.
    """
    for link in chain(error):
        if type(link).__name__ == "CppCompileError" and _COMPILER_RAN_OUT.search(str(link)):
            raise DeviceError(
                "torch.compile's C++ compiler ran out of memory, as it gets no more than "
                f"{format_bytes(budget_bytes)} either; give a larger memory limit"
            ) from error


def chain(error: BaseException, handled: BaseException | None = None) -> Iterator[BaseException]:
    """Yield the exception and all others in its chain once each, except the handled one's."""
    pending: list[BaseException | None] = [error]
    seen = {id(link) for link in chain(handled)} - {id(error)} if handled else set()
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
    """Return the line around the match, from the start of its sentence on."""
    text = match.string
    start = max(text.rfind("\n", 0, match.start()) + 1, text.rfind(". ", 0, match.start()) + 1)
    line = text[start:].strip().partition("\n")[0]
    return textwrap.shorten(line, _REASON_LENGTH, placeholder=" …")
