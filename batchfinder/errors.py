"""Every exception and warning that batchfinder raises.

The tree::

    BatchFinderError
    ├── UsageError (also a ValueError)      an argument is invalid; exit status 2
    ├── TargetError                         FILE.py:FUNCTION cannot be used
    ├── SampleError                         no usable example batch
    ├── StepError                           the training step cannot be built, or trains nothing
    ├── BatchTooSmallError                  the step needs more examples, or groups of them
    ├── DeviceError                         the device or the requested limit is unavailable
    │   └── NothingFitsError                not even one example fits (also a RuntimeError)
    ├── WorkerError                         a worker process failed
    │   ├── WorkerDiedError                 it ended without an answer
    │   ├── WorkerGarbledError              its answer could not be read
    │   ├── WorkerHungError                 it did not answer in time
    │   └── WorkerReleasedError             it was stopped because another rank failed
    ├── TimeLimitError                      the time limit came before any confirmation
    ├── CacheError                          remembered answers cannot be read or written
    ├── RankError                           the ranks of a job disagree, or one is missing
    └── UserCodeError                       the user's code raised; carries its traceback

In this process, the user's own exceptions are raised unchanged. A worker process cannot return an
exception object, so its exceptions are raised as ``UserCodeError``.
"""

from __future__ import annotations

import difflib
import re
import signal
import warnings
from collections.abc import Callable, Iterable


class BatchFinderError(Exception):
    """Base of all errors of batchfinder: one line that says what is wrong and what to do about it.

    Attributes:
        exit_code: exit status of the command line.
    """

    exit_code = 1


class UsageError(BatchFinderError, ValueError):
    """An argument or option is invalid for any model."""

    exit_code = 2


class TargetError(BatchFinderError):
    """The target cannot be used, for example because its function returns the wrong type."""


class SampleError(BatchFinderError):
    """There is no example batch, or batches of other sizes cannot be made from it."""


class StepError(BatchFinderError):
    """The training step cannot be built from the model, or trains nothing."""


class BatchTooSmallError(BatchFinderError):
    """The step needs more examples, as BatchNorm does on 1x1 feature maps, or whole groups of them.

    Args:
        text: what is wrong, and what to do about it.
        least: the smallest size that runs; None if the next one may.
        multiple_of: sizes that run are multiples of it.
    """

    least: int | None = None
    multiple_of: int = 1

    def __init__(self, text: str, least: int | None = None, multiple_of: int = 1) -> None:
        super().__init__(text)
        self.least, self.multiple_of = least, multiple_of


class DeviceError(BatchFinderError):
    """The device, or the requested memory limit, is unavailable."""


class NothingFitsError(DeviceError, RuntimeError):
    """Not even one example fits into memory, in training that cannot go on without an answer."""


class WorkerError(BatchFinderError):
    """A worker process failed."""


# As faulthandler prints it: where a thread was when it caused a fatal signal.
_FIRST_FRAME = re.compile(r'Current thread .*\n  File "(?:.*/(?=.*/))?(.+)", line (\d+) in (.+)')


class WorkerDiedError(WorkerError):
    """The worker process ended without an answer.

    Attributes:
        exit_status: as :class:`subprocess.Popen` has it.
        signal_number: the signal that killed it; None if it exited by itself.
        output: the last lines it printed.
        last_words: the last of them before the stack that a fatal signal printed.
    """

    def __init__(self, exit_status: int, output: str) -> None:
        self.exit_status = exit_status
        self.signal_number = -exit_status if exit_status < 0 else None
        self.output = output
        printed, _, stack = output.partition("Fatal Python error: ")
        self.last_words = printed.rstrip().rpartition("\n")[2]
        frame = _FIRST_FRAME.search(stack)
        if self.signal_number is None:
            reason = f"the process exited with status {exit_status}"
        else:
            reason = f"the process was killed by {_signal_name(self.signal_number)}"
        super().__init__(f"{reason} in {frame[3]} ({frame[1]}:{frame[2]})" if frame else reason)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # only the first and the last real-time signal have a name
        return f"signal {number}"


class WorkerGarbledError(WorkerError):
    """The answer of the worker process could not be read.

    Attributes:
        text: what came instead.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(
            f"the training code wrote {text[:40]!r} to a file descriptor that it had not opened. "
            "Try writing only to files that the code opens itself."
        )


class WorkerHungError(WorkerError):
    """The worker process did not answer in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"hung: no step finished within {seconds:.0f} s")


class WorkerReleasedError(WorkerError):
    """The worker process was stopped because another rank of the job failed."""

    def __init__(self) -> None:
        super().__init__("stopped because another rank failed")


class TimeLimitError(BatchFinderError):
    """The time limit ended the search before any batch size was confirmed."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"no batch size was confirmed within the time limit of {seconds:g} s. "
            f"Try --time-limit {4 * seconds:g}."
        )


class CacheError(BatchFinderError):
    """The answers of earlier searches cannot be read or written.

    Attributes:
        is_damaged: True if the file itself is the reason, so that removing it helps.
    """

    def __init__(self, message: str, *, is_damaged: bool = False) -> None:
        self.is_damaged = is_damaged
        super().__init__(message)


class RankError(BatchFinderError):
    """The ranks of a job make different requests, or one of them is missing.

    Attributes:
        is_known_to_rank_0: True if rank 0 raises the error too, so that rank 0 reports it.
    """

    def __init__(self, message: str, *, is_known_to_rank_0: bool = True) -> None:
        self.is_known_to_rank_0 = is_known_to_rank_0
        super().__init__(message)


class UserCodeError(BatchFinderError):
    """The user's code raised in a worker process.

    Attributes:
        user_traceback: the traceback as Python prints it, without batchfinder's own frames. Python
            shows it as the cause of this error.
    """

    def __init__(self, message: str, user_traceback: str = "") -> None:
        super().__init__(message)
        self.user_traceback = user_traceback
        if user_traceback:
            self.__cause__ = Exception("\n" + user_traceback.rstrip())


class BatchFinderWarning(UserWarning):
    """A problem that the user should act on; also in the result's ``warnings``."""


def warn_of(texts: Iterable[str]) -> None:
    """Warn whoever called the function that calls this one."""
    for text in texts:
        warnings.warn(text, BatchFinderWarning, stacklevel=3)


def is_of_the_user(error: Exception) -> bool:
    """Return True if the user's code raised an error, in this process or a worker process."""
    return isinstance(error, UserCodeError) or not isinstance(error, BatchFinderError)


def reason_of(error: Exception) -> str:
    """Return why something is impossible, on one line."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    if isinstance(error, BatchFinderError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def did_you_mean(
    wrong: str,
    names: Iterable[str],
    shown: Callable[[str], str] = str,
    otherwise: str = "",
) -> str:
    """Return the end of a message about an unknown name: up to three close names, or ``otherwise``.

    ``shown`` returns the text to write for a known name.

    Example:
        >>> did_you_mean("adm", ["adam", "sgd"])
        '; did you mean adam?'
    """
    known = list(names)
    # A name that differs by a letter alone leaves no doubt.
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.9)
    close = close or difflib.get_close_matches(wrong, known, n=3)
    texts = dict.fromkeys(map(shown, close))
    return f"; did you mean {' or '.join(texts)}?" if texts else otherwise
