"""Combine traces at a few batch sizes into the trace at every batch size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import groupby, zip_longest
from typing import Any

from batchfinder.probing.devices.allocator.blocks import round_request
from batchfinder.simulation.trace.curve import Curve
from batchfinder.simulation.trace.trace import EMPTY_CACHE, GeneralTrace, Stage, Storage, Trace


class NotGeneralError(Exception):
    """A few traces do not determine the trace at every size. The text says where they differ."""


class NotInLineError(NotGeneralError):
    """The traces differ only in the sizes of storages. More traces may determine the curves."""


def align(*traces: Trace) -> GeneralTrace:
    """Return the trace at every batch size, from traces at a few.

    Two traces determine lines. A parabola needs three, and more to check it: through three sizes
    there is always one.

    Args:
        traces: at least two traces of the same steps, in the order of their batch sizes.

    Raises:
        NotInLineError: a storage shrinks as the batch grows, or is on no line and no parabola.
        NotGeneralError: the steps did different things.
    """
    traces = tuple(map(sort_deaths, traces))
    first = traces[0]
    for other in traces[1:]:
        if other.events != first.events:
            pairs = enumerate(zip_longest(first.events, other.events))
            parting = next(i for i, (event, instead) in pairs if event != instead)
            raise NotGeneralError(
                f"the steps at batch sizes {first.batch_size} and {other.batch_size} part"
                f"{_place(other, parting)}"
            )
    batch_sizes = [trace.batch_size for trace in traces]
    each = []
    for index in range(len(traces[1].storages)):
        numbers = zip(*(trace.storages[index].amounts for trace in traces), strict=True)
        points = (list(zip(batch_sizes, amounts, strict=True)) for amounts in numbers)
        each.append(tuple(_curve(traces, index, of_one) for of_one in points))
    return GeneralTrace(traces[1], each)


def _curve(traces: Sequence[Trace], index: int, points: Sequence[tuple[int, int]]) -> Curve:
    """Return the curve through a storage's points: its bytes, or an amount in its rule."""
    (small, before), (large, after), *further = points
    slope = (after - before) / (large - small)
    line = Curve(after - slope * large, slope)
    is_checked = further and not traces[1].storages[index].optional
    curve = _bent(line, points) if is_checked else line
    # A line that starts below 0 bytes would mislead: the storage bends somewhere.
    if curve is None or curve.shrinks or curve.fixed_bytes < -round_request(1):
        raise _not_in_line(traces, index)
    return curve


def check_lines(trace: GeneralTrace, third: Trace) -> None:
    """Refuse a trace at every size that does not hold at a third one.

    A line through two points always exists. For a matrix of batch by batch, that line is too low
    above both points. Its start may still be above 0, if the matrix has more rows and columns.

    Raises:
        NotInLineError: a storage has another size there, or the steps did other things.
    """
    sizes = trace.sizes(third.batch_size)
    for index, (storage, size) in enumerate(zip(third.storages, sizes, strict=False)):
        if storage.optional or abs(storage.size_bytes - size) <= round_request(1):
            continue
        raise _not_in_line([trace.example, third], index)


def alike(trace: GeneralTrace, other: Trace) -> GeneralTrace:
    """Return the trace at every batch size of more steps, or of other steps with the same passes.

    The same line of the same module allocates the same in every forward and backward pass, in the
    same order. What an optimizer allocates does not depend on the batch.

    Raises:
        NotGeneralError: the other passes allocate something else.
    """
    known: dict[Any, list[tuple[Curve, ...]]] = defaultdict(list)
    for index, storage in enumerate(trace.example.storages):
        known[_origin(storage)].append(trace.amounts[index])
    distinct = {origin: {*found} for origin, found in known.items()}
    each = []
    places: dict[Any, list[int]] = defaultdict(list)
    for index, storage in enumerate(other.storages):
        found = known.get(origin := _origin(storage), [])
        constant = tuple(map(Curve, storage.amounts))
        is_constant = distinct.get(origin, set()) <= {constant}
        if storage.stage in (Stage.SETUP, Stage.OPTIMIZER) and is_constant:
            each.append(constant)
        elif found and other.batch_size == trace.example.batch_size:
            each.append(found[len(places[origin]) % len(found)])
            places[origin].append(index)
        else:
            raise NotGeneralError(f"the steps differ{_place(other, index)}")
    for origin, indices in places.items():
        if len(distinct[origin]) > 1 and len(indices) % len(known[origin]):
            raise NotGeneralError(f"the steps differ{_place(other, indices[0])}")
    return GeneralTrace(sort_deaths(other), each)


def first_step(trace: Trace) -> Trace:
    """Return the beginning of a trace, up to the end of its first step."""
    end = trace.steps[1]
    events = trace.events[:end]
    storages = trace.storages[: sum(event >= 0 for event in events)]
    stages = [(start, stage) for start, stage in trace.stages if start < end]
    return Trace(trace.batch_size, storages, events, stages, trace.steps[:1])


def sort_deaths(trace: Trace) -> Trace:
    """Return the same trace, with deaths between two births in the order of birth.

    Clearing a cache frees in the order of its hash table, which differs from run to run. The state
    of the allocator afterward does not depend on that order.
    """
    events: list[int] = []
    for is_death, group in groupby(trace.events, lambda event: EMPTY_CACHE < event < 0):
        run = list(group)
        events += sorted(run, reverse=True) if is_death else run
    return replace(trace, events=events)


def _bent(line: Curve, points: Sequence[tuple[int, int]]) -> Curve | None:
    """Return the line through the first two points if it meets all, or else such a parabola."""
    miss = max(abs(size - line.bytes_at(batch_size)) for batch_size, size in points)
    parabola = _parabola(points) if miss else None
    # Sizes rounded up to whole blocks are near their line. They meet a parabola only by chance.
    return parabola or (line if miss <= round_request(1) else None)


def _parabola(points: Sequence[tuple[int, int]]) -> Curve | None:
    """Return the parabola through the first three points if it meets the others to the byte."""
    (a, at_a), (b, at_b), (c, at_c), *others = points
    slope = Fraction(at_b - at_a, b - a)
    per_pair = (Fraction(at_c - at_b, c - b) - slope) / (c - a)
    per_sample = slope - per_pair * (a + b)
    fixed = at_a - (per_sample + per_pair * a) * a
    if any(fixed + (per_sample + per_pair * at) * at != size for at, size in others):
        return None
    return Curve(float(fixed), float(per_sample), float(per_pair))


def _origin(storage: Storage) -> tuple[Any, ...]:
    """Return what tells where a storage comes from, and its size at the batch size traced."""
    return storage.stage, storage.module, storage.line, storage.amounts


def _not_in_line(traces: Sequence[Trace], index: int) -> NotInLineError:
    first, *others = ((t.batch_size, t.storages[index].amounts[0]) for t in traces)
    parts = [f"{first[1]} B at batch size {first[0]}", *(f"{size} B at {b}" for b, size in others)]
    sizes = f"{', '.join(parts[:-1])} and {parts[-1]}"
    return NotInLineError(f"a storage is {sizes}, which is not in line{_place(traces[-1], index)}")


def _place(trace: Trace, at: int) -> str:
    storage = trace.storages[min(at, len(trace.storages) - 1)] if trace.storages else None
    where = [text for text in (storage.module, storage.line) if text] if storage else []
    return f" ({', '.join(where)})" if where else ""
