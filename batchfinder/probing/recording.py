"""Record the memory requests of a few steps to PyTorch's caching allocator. No other batchfinder.

The hook of ``batchfinder run`` loads this file in the user's script.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

# The most events to keep. Sending and replaying more takes longer than the steps they save.
MOST_EVENTS = 400_000

# The largest request, in bytes, that the allocator's small pool serves: SMALL_BYTES of
# devices/allocator/blocks.py, which this file may not import. Steps that differ in the bytes of
# these alone, such as a list of detections, need no more large blocks.
SMALL_BYTES = 2**20

# Where PyTorch's snapshot has the settings of the allocator, as text.
_CONF = "PYTORCH_CUDA_ALLOC_CONF"


class Recorder:
    """Reads the memory requests of a few steps from PyTorch's history, which has to be on.

    Args:
        index: the index of the CUDA device; None to record nothing.
        held: the blocks that were in use when the history began: their sizes and streams, by
            address.
    """

    def __init__(self, index: int | None, held: Mapping[int, tuple[int, int]]) -> None:
        self._index, self._held = index, held
        self._trace: list[dict[str, Any]] = []  # up to the end of the last step
        self._ends, self._asked = [0], list[list[int]]()
        self._validations, self._settings = 0, ""

    def end_step(self) -> bool:
        """Note that a step has ended. Return True if steps after the first make other requests."""
        step = self._end()
        sizes = (entry["size"] for entry in step if entry["action"] == "alloc")
        self._asked.append([size if size > SMALL_BYTES else 0 for size in sizes])
        return any(asked != self._asked[1] for asked in self._asked[2:])

    def end_validation(self) -> None:
        """Note that a validation and the step after it have ended. They follow all other steps."""
        self._end()
        self._validations += 1

    def _end(self) -> list[dict[str, Any]]:
        """Read the history, and return what was added to it."""
        if self._index is None:
            return []
        snapshot = torch.cuda.memory._snapshot()
        self._trace = snapshot["device_traces"][self._index]
        self._settings = snapshot.get("allocator_settings", {}).get(_CONF, "")
        added = self._trace[self._ends[-1] :]
        self._ends.append(len(self._trace))
        return added

    def recording(self) -> dict[str, Any] | None:
        """Return the fields of a ``Recording``; None if it has too many events, or none at all."""
        if self._index is None or len(self._trace) > MOST_EVENTS:
            return None
        streams = [stream for _, stream in self._held.values()]
        numbers = {address: number for number, address in enumerate(self._held)}
        count, steps = len(numbers), []
        traces = [_events(self._trace[start:end]) for start, end in pairwise(self._ends)]
        end = len(traces) - self._validations
        if torch.backends.cudnn.benchmark:
            for alike in (slice(0, end), slice(end, None)):
                if len(traces[alike]) > 1:
                    traces[alike.start] = _without_trials(*traces[alike][:2])
        for trace in traces:
            events: list[int] = []
            for entry in trace:
                if entry["action"] == "alloc":
                    numbers[entry["addr"]] = count
                    count += 1
                    events.append(entry["size"])
                    streams.append(entry["stream"])
                elif entry["addr"] in numbers:
                    events.append(~numbers.pop(entry["addr"]))
            steps.append(tuple(events))
        order = {stream: number for number, stream in enumerate(dict.fromkeys(streams))}
        return {
            "held": tuple(size for size, _ in self._held.values()),
            "steps": tuple(steps[:end]),
            "streams": tuple(order[stream] for stream in streams) if len(order) > 1 else (),
            "validations": tuple(steps[end:]),
            "settings": self._settings,
        }


def _events(trace: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in trace if entry["action"] in ("alloc", "free_completed")]


def _without_trials(
    first: list[dict[str, Any]], second: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the first of two steps without the workspaces of kernels that cuDNN only tried there.

    Each is freed at once, and not requested in the second step.
    """
    usual = Counter(entry["size"] for entry, _ in _freed_at_once(second))
    tried = set[int]()
    for entry, freed in _freed_at_once(first):
        usual[entry["size"]] -= 1
        if usual[entry["size"]] < 0:
            tried |= {id(entry), id(freed)}
    return [entry for entry in first if id(entry) not in tried]


def _freed_at_once(events: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    are_of_one_block = ((a, b) for a, b in pairwise(events) if a["addr"] == b["addr"])
    return [(a, b) for a, b in are_of_one_block if a["action"] == "alloc"]


@contextmanager
def recording(device: torch.device) -> Iterator[Recorder]:
    """Record the requests to the allocator while the block runs, if possible.

    Nothing is recorded on devices other than CUDA, or if this build of PyTorch cannot record. A
    recording that the user has started continues, so nothing is recorded then either.
    """
    if device.type != "cuda" or not begin():
        yield Recorder(None, {})
        return
    try:
        yield Recorder(device.index, _blocks_in_use(device.index))
    finally:
        end()


def begin() -> bool:
    """Start PyTorch's history of requests. Return False if that is impossible, or it is on.

    Allocators other than PyTorch's own, such as ``cudaMallocAsync``, have no history.
    """
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    is_on = getattr(torch._C, "_cuda_isHistoryEnabled", lambda: True)
    if record is None or torch.cuda.get_allocator_backend() != "native" or is_on():
        return False
    record(enabled="all", context=None, max_entries=2 * MOST_EVENTS)
    return True


def end() -> None:
    """End PyTorch's history of requests."""
    torch.cuda.memory._record_memory_history(enabled=None)


def _blocks_in_use(index: int) -> dict[int, tuple[int, int]]:
    blocks = [
        (block["address"], (block["requested_size"], segment["stream"]))
        for segment in torch.cuda.memory._snapshot()["segments"]
        if segment["device"] == index
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    return dict(sorted(blocks))
