"""Ask a slow question about many numbers, in several processes side by side. No torch."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

Holds: TypeAlias = Callable[[Sequence[int]], Iterable[bool]]
"""Tells for each of some numbers, one after the other, whether something holds."""

# A new process imports only this package, without site-packages and what they do at start-up.
_FOLDER = Path(__file__).parents[3]
_CHILD = f"""import sys
sys.path.append({str(_FOLDER)!r})
from {__name__} import answer
answer()"""


def first_that_fails(holds: Holds, numbers: Sequence[int]) -> int | None:
    """Return the first number for which something does not hold; None if it holds for all.

    Each core of this machine gets as many of the numbers. Processes that are no longer needed are
    killed. What one of them does not answer, this process does.

    Args:
        holds: the question. Functions of this package, and what else pickle can copy.
        numbers: the numbers.
    """
    count = min(_cores(), len(numbers))
    question = pickle.dumps(holds)
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(_child()) for _ in range(count)]
        for place, child in enumerate(children):
            _ask(child, question + pickle.dumps(numbers[place::count]))
        for place, number in enumerate(numbers):
            answer = _answer_of(children[place % count])
            if not (all(holds([number])) if answer is None else answer):
                return number
    return None


def answer() -> None:
    """Answer what standard input asks, in a process of its own."""
    holds, numbers = (pickle.load(sys.stdin.buffer) for _ in range(2))
    for each in holds(numbers):
        os.write(sys.stdout.fileno(), b"1" if each else b"0")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@contextlib.contextmanager
def _child() -> Iterator[subprocess.Popen[bytes] | None]:
    """Start a process, and kill it at the end; None if the system has no memory for it."""
    try:
        child = subprocess.Popen(
            [sys.executable, "-ISc", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        yield None
        return
    with child:
        try:
            yield child
        finally:
            child.kill()


def _ask(child: subprocess.Popen[bytes] | None, question: bytes) -> None:
    if child and child.stdin:
        with contextlib.suppress(BrokenPipeError), child.stdin:  # it has ended
            child.stdin.write(question)


def _answer_of(child: subprocess.Popen[bytes] | None) -> bool | None:
    """Return the next answer; None if the process has ended without it."""
    answer = child.stdout.read(1) if child and child.stdout else b""
    return answer == b"1" if answer else None
