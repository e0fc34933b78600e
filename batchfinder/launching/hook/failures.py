"""Report errors that a script may swallow, and errors that end it. Imports no batchfinder."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

_LAST_LINES = 40  # of a traceback in a report: enough for the innermost ten calls

# Marks errors that were reported.
SEEN = "_batchfinder_seen"


def _ignore(*_: Any) -> None:
    """Trace no function that is called from now on."""


class Failures:
    """Report errors. A certain out-of-memory error stops the script until the launch is ended.

    Attributes:
        is_in_step: True from the start of a backward pass to the next forward pass. Neither a
            backward pass nor an optimizer has gradients enabled.
        has_optimizer: True once the script has made an optimizer.
    """

    is_in_step = has_optimizer = False

    def __init__(self, torch: ModuleType, order: dict[str, Any], report: Any, memory: Any) -> None:
        self._torch: Any = torch
        self._report, self._memory = report, memory
        self._certain = re.compile("|".join(order["certain"]), re.MULTILINE)
        self._doubtful = re.compile("|".join(order["doubtful"]), re.MULTILINE)

    def install(self) -> None:
        """Watch errors that the script does not catch."""
        sys.excepthook = self._excepthook(sys.excepthook)
        threading.excepthook = self._thread_excepthook(threading.excepthook)

    def begin_cuda(self) -> None:
        """Watch CUDA's allocator. An observer only reaches devices that exist by now."""
        with contextlib.suppress(RuntimeError):  # the backend cudaMallocAsync has no observers
            self._torch._C._cuda_attach_out_of_memory_observer(self._ran_out)

    def look_at(self, error: BaseException) -> None:
        """Report an error that the script may swallow, if it is an out-of-memory error."""
        if getattr(error, SEEN, False):
            return
        setattr(error, SEEN, True)
        text = str(error)
        is_memory = isinstance(error, (MemoryError, self._torch.cuda.OutOfMemoryError))
        if is_memory or (isinstance(error, RuntimeError) and self._certain.search(text)):
            self._fail(text or type(error).__name__)
        # With most of CUDA's memory free, a kernel is missing, as of bf16 on a T4.
        budget = self._memory.facts.get("budget_bytes", 0)
        may_be_memory = self._memory.peaks()["reserved"] >= budget / 2
        is_runtime = isinstance(error, RuntimeError)
        if is_runtime and may_be_memory and (match := self._doubtful.search(text)):
            self._report("doubtful", text=match.group())

    def _ran_out(self, device: int, requested: int, total: int, free: int) -> None:
        """Report an out-of-memory error that reaches the script, even if that would swallow it.

        It may not: without a workspace for one kernel of cuDNN, PyTorch goes on with another one.
        """
        before = sys.gettrace()
        try:
            frame = sys._getframe(1)
        except ValueError:  # no Python: a backward pass raises it to ``look_at``
            return
        if before is _ignore:  # of one operation, the first says enough
            return

        def look(frame: Any, event: str, argument: Any) -> None:
            frame.f_trace = None
            sys.settrace(before)
            if event == "exception":
                self._memory.train_on(self._torch.device("cuda", device))
                self._fail(f"CUDA out of memory. Tried to allocate {requested / 2**20:.2f} MiB")

        frame.f_trace = look  # told of what follows the operation, in the function that runs it
        sys.settrace(_ignore)

    def _fail(self, text: str) -> None:
        facts = {**self._memory.identity(), **self._memory.peaks()}
        has_gradients = self.is_in_step or self._torch.is_grad_enabled()
        self._report("out_of_memory", text=text, has_gradients=has_gradients, **facts)
        while True:
            self._report.pause()

    def _excepthook(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def hook(kind: Any, error: Any, trace: Any) -> None:
            if isinstance(error, Exception):
                self.look_at(error)
                lines = "".join(traceback.format_exception(kind, error, trace)).splitlines()
                only = "".join(traceback.format_exception_only(error)).splitlines()
                said = next(line for line in only if line[:1].strip())  # after a line of code
                last = "\n".join(lines[-_LAST_LINES:])
                self._report("raised", error=said, traceback=last, has_optimizer=self.has_optimizer)
            before(kind, error, trace)

        return hook

    def _thread_excepthook(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def hook(arguments: Any) -> None:
            if arguments.exc_value is not None:
                self.look_at(arguments.exc_value)
            before(arguments)

        return hook
