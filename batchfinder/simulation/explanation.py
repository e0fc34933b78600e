"""Where the memory of a simulated step goes: the textbook equation, filled in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchfinder.simulation.rounding import round_request
from batchfinder.simulation.trace import EMPTY_CACHE, AffineTrace, Kind, Stage

TIMELINE_POINTS = 60
TOP_MODULES = 10


@dataclass(frozen=True)
class Moment:
    """A point of the timeline: the peak within a short stretch of the step.

    Attributes:
        stage: what runs.
        allocated_bytes: held by tensors.
    """

    stage: Stage
    allocated_bytes: int


@dataclass(frozen=True)
class Explanation:
    """The peak of one training step, taken apart.

    Attributes:
        batch_size: examples per forward/backward pass.
        terms: bytes of each term of the equation at the peak; their sum is what the device holds.
        peak_stage: when the peak is.
        peak_module: the module at work then; "" where there is none.
        peak_line: its line in the user's code; "" where there is none.
        top_modules: the modules whose activations grow most, with bytes per example.
        timeline: the last step from its beginning to its end.
    """

    batch_size: int
    terms: Mapping[str, int]
    peak_stage: Stage
    peak_module: str
    peak_line: str
    top_modules: tuple[tuple[str, float], ...]
    timeline: tuple[Moment, ...]

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data: raw bytes."""
        return {
            "batch_size": self.batch_size,
            "terms": dict(self.terms),
            "peak": {
                "stage": self.peak_stage.value,
                "module": self.peak_module,
                "line": self.peak_line,
            },
            "activation_bytes_per_sample": dict(self.top_modules),
            "timeline": [
                {"stage": moment.stage.value, "allocated_bytes": moment.allocated_bytes}
                for moment in self.timeline
            ],
        }


def explain(
    trace: AffineTrace,
    batch_size: int,
    *,
    reserved_bytes: int,
    overhead_bytes: int,
    workspace_bytes: int = 0,
) -> Explanation:
    """Take the peak of a trace's last step apart.

    Args:
        trace: of some training steps.
        batch_size: examples per forward/backward pass.
        reserved_bytes: the peak of the allocator at that size; what it holds beyond the tensors
            is called fragmentation.
        overhead_bytes: of the process, outside the allocator.
        workspace_bytes: what libraries keep of the allocator's memory.
    """
    storages = trace.example.storages
    sizes = [round_request(size) for size in trace.sizes(batch_size)]
    first = trace.example.steps[-1] if trace.example.steps else 0
    held = peak = peak_at = 0
    curve: list[int] = []
    for position, event in enumerate(trace.events):
        if event == EMPTY_CACHE:
            continue
        held += sizes[event] if event >= 0 else -sizes[~event]
        if position >= first:
            curve.append(held)
            if held > peak:
                peak, peak_at = held, position
    terms = Counter({kind.value: 0 for kind in Kind})
    for index in _alive_after(trace.events, peak_at):
        terms[storages[index].kind.value] += sizes[index]
    terms[Kind.WORKSPACE.value] += workspace_bytes
    terms["fragmentation"] = max(0, reserved_bytes - peak - workspace_bytes)
    terms["context and libraries"] = overhead_bytes
    culprit = storages[_born_last(trace.events, peak_at)]
    return Explanation(
        batch_size,
        dict(terms),
        culprit.stage,
        culprit.module,
        culprit.line,
        _top_modules(trace, first),
        _timeline(trace, first, curve),
    )


def _alive_after(events: list[int], position: int) -> set[int]:
    past = [event for event in events[: position + 1] if event != EMPTY_CACHE]
    return {event for event in past if event >= 0} - {~event for event in past if event < 0}


def _born_last(events: list[int], position: int) -> int:
    return next(events[i] for i in range(position, -1, -1) if events[i] >= 0)


def _top_modules(trace: AffineTrace, first: int) -> tuple[tuple[str, float], ...]:
    growth: Counter[str] = Counter()
    for event in trace.events[first:]:
        if event >= 0 and trace.example.storages[event].kind is Kind.ACTIVATION:
            name = trace.example.storages[event].module or "(outside any module)"
            growth[name] += trace.per_sample_bytes[event]  # type: ignore[assignment]
    return tuple((name, float(size)) for name, size in growth.most_common(TOP_MODULES))


def _timeline(trace: AffineTrace, first: int, curve: list[int]) -> tuple[Moment, ...]:
    stride = max(1, -(-len(curve) // TIMELINE_POINTS))
    moments = []
    for start in range(0, len(curve), stride):
        stage = next(s for at, s in reversed(trace.example.stages) if at <= first + start)
        moments.append(Moment(stage, max(curve[start : start + stride])))
    return tuple(moments)
