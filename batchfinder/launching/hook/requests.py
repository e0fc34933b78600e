"""Record what a script requests from PyTorch's CUDA allocator. Imports no batchfinder."""

from __future__ import annotations

import contextlib
from typing import Any

# Each reading converts the whole history, so later ones are not recorded.
MOST_READINGS = 12


class Requests:
    """Record the requests of this process from its first one, so that they can be replayed.

    ``recorder`` is the module that reads PyTorch's history, probing/recording.py.
    """

    def __init__(self, recorder: Any, report: Any) -> None:
        self._recorder, self._report = recorder, report
        self._history: Any = None
        self._readings = 0
        self._is_on = False

    def begin_cuda(self) -> None:
        """Start to record."""
        with contextlib.suppress(Exception):  # the script must run on in any case
            self._is_on = self._recorder.begin()

    def end_reading(self, index: int | None, *, waits: bool) -> None:
        """Note the end of a reading on a CUDA device. If the process waits now, report all."""
        if not self._is_on or index is None:
            return
        try:
            self._end_reading(index, waits)
        except Exception:  # noqa: BLE001 - the script must run on in any case
            self._is_on = False

    def end_validation(self) -> None:
        """Note the end of a validation and of the step after it, if one follows. Report all."""
        history, self._history = self._history, None
        if self._is_on and history is not None:
            with contextlib.suppress(Exception):  # as above
                history.end_validation()
                self._report_all(history)

    def forget_validation(self) -> None:
        """Report no validation, as requests came between that are made only once."""
        self._history = None

    def _end_reading(self, index: int, waits: bool) -> None:
        self._readings += 1
        if self._readings > MOST_READINGS:
            self._recorder.end()
            self._is_on, self._history = False, None
            return
        if self._history is None:
            self._history = self._recorder.Recorder(index, {})
        self._history.end_step()
        if waits:
            self._report_all(self._history)

    def _report_all(self, history: Any) -> None:
        if recording := history.recording():
            self._report("recording", **recording)
