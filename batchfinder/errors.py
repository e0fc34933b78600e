"""Every exception and warning that batchfinder raises.

The tree::

    BatchFinderError
    ├── UsageError (also a ValueError)      an argument makes no sense; exit code 2
    ├── TargetError                         FILE.py:FUNCTION cannot be used
    ├── SampleError                         no usable example batch
    ├── StepError                           the training step cannot be made, or trains nothing
    ├── BatchTooSmallError                  a layer needs more than one example to train on
    ├── DeviceError                         the device or the limit asked for is not to be had
    ├── WorkerError                         the worker process is of no use
    │   ├── WorkerDiedError                 it ended without an answer
    │   ├── WorkerGarbledError              something else than an answer came from it
    │   ├── WorkerHungError                 it did not answer in time
    │   └── WorkerReleasedError             its answer is of no use any more: another rank failed
    ├── RankError                           the ranks of a job do not agree, or one is missing
    └── UserCodeError                       the user's own code raised; carries their traceback

In-process, the user's own exceptions are raised as they are, never wrapped. ``UserCodeError``
stands for one that happened in a worker process, from which no exception object comes back.
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterable


class BatchFinderError(Exception):
    """Base of all errors of batchfinder.

    Its text is one line that says what is wrong and what to do about it.

    Attributes:
        exit_code: what the command line exits with: 1, or 2 for a ``UsageError``.

    Example:
        >>> try:
        ...     raise UsageError("--multiple-of must be at least 1")
        ... except BatchFinderError as error:
        ...     print(error.exit_code, error)
        2 --multiple-of must be at least 1
    """

    exit_code = 1


class UsageError(BatchFinderError, ValueError):
    """An argument or option makes no sense, whatever the model is."""

    exit_code = 2


class TargetError(BatchFinderError):
    """The target was found but cannot be used: its function returns something else, say."""


class SampleError(BatchFinderError):
    """There is no example batch, or none that a batch of another size can be made from."""


class StepError(BatchFinderError):
    """The training step cannot be made from the model, or does not train anything."""


class BatchTooSmallError(BatchFinderError):
    """A layer, such as BatchNorm on 1x1 maps, needs more than one example to train on."""


def too_small(batch_size: int) -> BatchTooSmallError:
    """The error of a step that needs more than so many examples."""
    examples = "example" if batch_size == 1 else "examples"
    return BatchTooSmallError(
        f"a layer of the model needs more than {batch_size} {examples} to train on; "
        f"try sizes from {batch_size + 1} on"
    )


class DeviceError(BatchFinderError):
    """The device, or the memory limit asked for on it, is not to be had."""


class WorkerError(BatchFinderError):
    """The worker process is of no use."""


class WorkerDiedError(WorkerError):
    """The worker process ended without an answer.

    Attributes:
        exit_status: as :class:`subprocess.Popen` has it.
        signal_number: the signal that ended it; None if it ended by itself.
        output: the last lines that it printed.
    """

    def __init__(self, exit_status: int, output: str) -> None:
        self.exit_status = exit_status
        self.signal_number = -exit_status if exit_status < 0 else None
        self.output = output
        if self.signal_number is None:
            reason = f"the process ended itself with exit status {exit_status}"
        else:
            reason = f"the process died of {_signal_name(self.signal_number)}"
        super().__init__(reason)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of the real-time signals, only the first and the last have one
        return f"signal {number}"


class WorkerGarbledError(WorkerError):
    """Something else than an answer came from the worker process.

    Attributes:
        text: what came.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(
            f"the code wrote to a file descriptor that is not its own: {text[:40]!r}; let it write "
            "to files that it has opened"
        )


class WorkerHungError(WorkerError):
    """The worker process did not answer in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"hung: no step ended within {seconds:.0f} s")


class WorkerReleasedError(WorkerError):
    """The worker process was given up, as another rank of the job has failed."""

    def __init__(self) -> None:
        super().__init__("stopped, as another rank had failed")


class RankError(BatchFinderError):
    """The ranks of a job do not ask for the same, or one of them is missing.

    Attributes:
        is_known_to_rank_0: whether rank 0 raises it too, and so tells it.
    """

    def __init__(self, message: str, *, is_known_to_rank_0: bool = True) -> None:
        self.is_known_to_rank_0 = is_known_to_rank_0
        super().__init__(message)


class UserCodeError(BatchFinderError):
    """The user's own code raised in a worker process.

    Attributes:
        user_traceback: their traceback as Python prints it, frames of batchfinder left out. Python
            shows it as the cause of this error where nobody catches it.
    """

    def __init__(self, message: str, user_traceback: str = "") -> None:
        super().__init__(message)
        self.user_traceback = user_traceback
        if user_traceback:
            self.__cause__ = Exception("\n" + user_traceback.rstrip())


class BatchFinderWarning(UserWarning):
    """Something that the caller should know of an answer; the result has it in ``warnings``."""


def warn_of(texts: Iterable[str]) -> None:
    """Warn the caller of the function that this is called in."""
    for text in texts:
        warnings.warn(text, BatchFinderWarning, stacklevel=3)
