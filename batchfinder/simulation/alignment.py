"""From traces at a few batch sizes, laid side by side, to the trace at every one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import groupby

from batchfinder.simulation.curve import Curve
from batchfinder.simulation.rounding import round_request
from batchfinder.simulation.trace import EMPTY_CACHE, GeneralTrace, Trace


class NotGeneralError(Exception):
    """A few traces do not tell the trace at every size; the text says where they part."""


class NotInLineError(NotGeneralError):
    """They part in the sizes of storages alone: more traces may tell how those bend."""


def align(*traces: Trace) -> GeneralTrace:
    """The trace at every batch size, from those at a few.

    Two traces tell lines. A parabola takes three, and more to check it: through three sizes there
    is always one.

    Args:
        traces: of the same steps, each at a larger size than the one before; at least two.

    Raises:
        NotInLineError: a storage shrinks as the batch grows, or is on no line and no parabola.
        NotGeneralError: the steps did different things.
    """
    traces = tuple(map(sort_deaths, traces))
    first = traces[0]
    for other in traces[1:]:
        if other.events != first.events:
            raise NotGeneralError(
                f"the steps at batch sizes {first.batch_size} and {other.batch_size} part"
                f"{_place(other, _parting(first.events, other.events))}"
            )
    batch_sizes = [trace.batch_size for trace in traces]
    curves = []
    for index, storages in enumerate(zip(*(trace.storages for trace in traces), strict=True)):
        sizes = [storage.size_bytes for storage in storages]
        curve = _curve(batch_sizes, sizes, storages[0].optional)
        if curve is None:
            raise NotInLineError(
                f"a storage is {_told(batch_sizes, sizes)}{_place(traces[-1], index)}"
            )
        curves.append(curve)
    return GeneralTrace(traces[1], curves)


def check_lines(trace: GeneralTrace, third: Trace) -> None:
    """Refuse a trace at every size that does not hold at a third one.

    A line through two points always exists. That of a matrix of batch by batch is too low above
    them, and does not start below nothing where the matrix has further rows and columns.

    Args:
        trace: from two sizes.
        third: the beginning of the same steps, traced at a size that is larger by some times.

    Raises:
        NotInLineError: a storage is none of this size there, or the steps did other things.
    """
    small, large = trace.example.batch_size, third.batch_size
    for index, (storage, size) in enumerate(zip(third.storages, trace.sizes(large), strict=False)):
        if storage.optional or abs(storage.size_bytes - size) <= round_request(1):
            continue
        sizes = [trace.example.storages[index].size_bytes, storage.size_bytes]
        raise NotInLineError(
            f"a storage is {_told([small, large], sizes)}, which is not in line"
            f"{_place(third, index)}"
        )


def sort_deaths(trace: Trace) -> Trace:
    """The same trace, with deaths between two births in the order of birth.

    A cache that is cleared frees in the order of its hash table, which differs from run to run;
    what is left in the allocator does not depend on it.
    """
    events: list[int] = []
    for is_death, group in groupby(trace.events, lambda event: EMPTY_CACHE < event < 0):
        run = list(group)
        events += sorted(run, reverse=True) if is_death else run
    return replace(trace, events=events)


def _curve(batch_sizes: Sequence[int], sizes: Sequence[int], optional: bool) -> Curve | None:
    """The line through the first two sizes if it holds at the others, or else the parabola."""
    slope = (sizes[1] - sizes[0]) / (batch_sizes[1] - batch_sizes[0])
    curve = Curve(sizes[1] - slope * batch_sizes[1], slope)
    further = zip(batch_sizes[2:], sizes[2:], strict=True)
    miss = max((abs(size - curve.bytes_at(b)) for b, size in further), default=0)
    if miss and not optional:
        parabola = _parabola(batch_sizes, sizes)
        # What is rounded up to whole blocks is near its line, and a parabola through it misleads.
        if parabola is None and miss > round_request(1):
            return None
        curve = parabola or curve
    # What starts below nothing bends somewhere: a line through it would mislead.
    return None if curve.shrinks or curve.fixed_bytes < -round_request(1) else curve


def _parabola(batch_sizes: Sequence[int], sizes: Sequence[int]) -> Curve | None:
    """The parabola through the first three sizes, if it meets the others to the byte."""
    (a, b, c), (at_a, at_b, at_c) = batch_sizes[:3], sizes[:3]
    slope = Fraction(at_b - at_a, b - a)
    per_pair = (Fraction(at_c - at_b, c - b) - slope) / (c - a)
    per_sample = slope - per_pair * (a + b)
    fixed = at_a - (per_sample + per_pair * a) * a
    for batch_size, size in zip(batch_sizes[3:], sizes[3:], strict=True):
        if fixed + (per_sample + per_pair * batch_size) * batch_size != size:
            return None
    return Curve(float(fixed), float(per_sample), float(per_pair))


def _parting(events: Sequence[int], others: Sequence[int]) -> int:
    pairs = zip(events, others, strict=False)
    shorter = min(len(events), len(others))
    return next((i for i, (event, other) in enumerate(pairs) if event != other), shorter)


def _told(batch_sizes: Sequence[int], sizes: Sequence[int]) -> str:
    first, *others = zip(sizes, batch_sizes, strict=True)
    parts = [f"{first[0]} B at batch size {first[1]}", *(f"{size} B at {b}" for size, b in others)]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def _place(trace: Trace, at: int) -> str:
    storage = trace.storages[min(at, len(trace.storages) - 1)] if trace.storages else None
    where = [text for text in (storage.module, storage.line) if text] if storage else []
    return f" ({', '.join(where)})" if where else ""
