"""The memory of a simulated step, term by term."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

from batchfinder.probing.devices.allocator.blocks import MIN_BLOCK_BYTES, round_up
from batchfinder.simulation.gpus import Gpu
from batchfinder.simulation.trace.trace import EMPTY_CACHE, GeneralTrace, Kind, Stage

TIMELINE_POINTS = 60  # at most, one for each column in a terminal
TOP_MODULES = 10  # to list
STATES = (Kind.PARAMETER, Kind.GRADIENT, Kind.OPTIMIZER_STATE)
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Moment:
    """A point of the timeline: the peak within a short part of the step."""

    stage: Stage
    allocated_bytes: int
    bytes_by_kind: Mapping[str, int]


@dataclass(frozen=True)
class Explanation:
    """The peak of one training step, term by term.

    Attributes:
        batch_size: examples per forward/backward pass.
        terms: bytes of each term at the peak; their sum is the memory used on the device.
        model_state_bytes: most bytes of parameters, of gradients and of optimizer states in the
            step, added up. They need not all be there at the peak.
        peak_stage: the stage of the step in which the peak occurs.
        peak_module: the module that runs at the peak; "" if there is none.
        peak_line: the line of the user's code at the peak; "" if there is none.
        top_modules: the modules whose activations grow most, with bytes per example. Equal layers
            are one entry, such as ``blocks.*.mlp``.
        timeline: the memory during the last step.
    """

    batch_size: int
    terms: Mapping[str, int]
    model_state_bytes: int
    peak_stage: Stage
    peak_module: str
    peak_line: str
    top_modules: tuple[tuple[str, float], ...]
    timeline: tuple[Moment, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain data, ready for JSON."""
        return {
            "batch_size": self.batch_size,
            "terms": dict(self.terms),
            "model_state_bytes": self.model_state_bytes,
            "peak": {
                "stage": self.peak_stage.value,
                "module": self.peak_module,
                "line": self.peak_line,
            },
            "activation_bytes_per_sample": dict(self.top_modules),
            "timeline": [{**vars(moment), "stage": moment.stage.value} for moment in self.timeline],
        }


def explain(trace: GeneralTrace, batch_size: int, *, gpu: Gpu, reserved_bytes: int) -> Explanation:
    """Split the peak of a trace's last step into its terms."""
    storages = trace.example.storages
    sizes = [round_up(size, MIN_BLOCK_BYTES) for size in trace.sizes(batch_size, gpu)]
    # Each event is an index into this list: the end of storage i is ~i, counted from the back.
    changes = [*sizes, *(-size for size in reversed(sizes))]
    moves = [event for event in trace.events if event != EMPTY_CACHE]
    first = trace.last_step - trace.events[: trace.last_step].count(EMPTY_CACHE)
    curve = list(accumulate(map(changes.__getitem__, moves)))[first:]
    peak = max(curve)
    until_peak = moves[: first + curve.index(peak) + 1]
    by_kind: Counter[Kind] = Counter()
    freed = {~event for event in until_peak if event < 0}
    for index in {event for event in until_peak if event >= 0} - freed:
        by_kind[storages[index].kind] += sizes[index]
    terms = {kind.value: by_kind[kind] for kind in Kind}
    terms["fragmentation"] = max(0, reserved_bytes - peak)
    terms["context and libraries"] = gpu.overhead_bytes
    culprit = storages[next(event for event in reversed(until_peak) if event >= 0)]
    largest = _layers_together(trace.activations_per_sample(batch_size)).most_common(TOP_MODULES)
    kinds = [storages[max(event, ~event)].kind for event in moves]
    states = 0
    for state in STATES:
        held = (changes[e] if kind is state else 0 for e, kind in zip(moves, kinds, strict=True))
        states += max(islice(accumulate(held), first, None))
    return Explanation(
        batch_size,
        terms,
        states,
        culprit.stage,
        culprit.module,
        culprit.line,
        tuple((name or "(outside any module)", float(size)) for name, size in largest),
        _timeline(trace, moves, changes, curve, first),
    )


def _layers_together(bytes_by_module: Mapping[str, int]) -> Counter[str]:
    """Add up equal modules whose names differ only in their first number."""
    alike: dict[tuple[str, int], list[str]] = {}
    for module, size in bytes_by_module.items():
        alike.setdefault((_NUMBER.sub("*", module, count=1), size), []).append(module)
    together: Counter[str] = Counter()
    for (pattern, size), modules in alike.items():
        together[pattern if len(modules) > 1 else modules[0]] += size * len(modules)
    return together


def _timeline(
    trace: GeneralTrace, moves: list[int], changes: list[int], curve: list[int], first: int
) -> tuple[Moment, ...]:
    """Return the highest moment of each part of the last step, which starts at move ``first``."""
    stride = max(1, -(-len(curve) // TIMELINE_POINTS))
    highest = [
        max(range(start, min(start + stride, len(curve))), key=curve.__getitem__)
        for start in range(0, len(curve), stride)
    ]
    by_kind: Counter[Kind] = Counter()
    moments = []
    done = 0
    for at in highest:
        for event in moves[done : first + at + 1]:
            by_kind[trace.example.storages[max(event, ~event)].kind] += changes[event]
        done = first + at + 1
        position = trace.last_step + at
        stage = next(stage for begin, stage in reversed(trace.example.stages) if begin <= position)
        held = {kind.value: size for kind, size in by_kind.items() if size}
        moments.append(Moment(stage, curve[at], held))
    return tuple(moments)
