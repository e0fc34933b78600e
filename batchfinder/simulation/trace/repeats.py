"""Lengthen a trace whose step repeats some parts for each example, as a loop over images does.

A larger batch then does more, so traces at two sizes part. Between them, each loop grows by as many
passes as the batch by examples, which tells its body. In the first and the last pass of a loop,
other storages may be freed than in those between, so only the passes between are repeated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from batchfinder.simulation.trace.alignment import NotGeneralError, sort_deaths
from batchfinder.simulation.trace.curve import Curve
from batchfinder.simulation.trace.trace import EMPTY_CACHE, Stage, Storage, Trace

_FEWEST_PASSES = 3  # in the smaller trace: the first, the last, and one to repeat
_SURE = 3  # events that have to be the same after a loop


class _Loop(NamedTuple):
    """Passes that do the same.

    Attributes:
        start: the first event of the first pass.
        body: the events of each pass.
        passes: their number in the smaller trace.
    """

    start: int
    body: int
    passes: int


class _At(NamedTuple):
    """The place of an event at every batch size: a pass is that of a loop, or 0."""

    part: int
    offset: int
    of_pass: int


class _Freed(NamedTuple):
    """The storage that an event frees: that of another place, in a pass that is on a plane."""

    part: int
    offset: int
    fixed: int
    per_pass: int
    per_sample: int


class Repeats:
    """The trace at every batch size of a step with loops over its examples.

    Args:
        small: a trace of the step.
        large: another one, at a larger size.

    Raises:
        NotGeneralError: more differs than the number of passes.

    Example:
        >>> small = Trace(3, [Storage(8)] * 3, [0, 1, 2, ~0, ~1, ~2])
        >>> large = Trace(4, [Storage(8)] * 4, [0, 1, 2, 3, ~0, ~1, ~2, ~3])
        >>> Repeats(small, large).at(5).events == [0, 1, 2, 3, 4, ~0, ~1, ~2, ~3, ~4]
        True
    """

    def __init__(self, small: Trace, large: Trace) -> None:
        small, large = sort_deaths(small), sort_deaths(large)
        self._small, self._large = small, large
        self._loops = _loops(small, large)
        storages: dict[tuple[int, int], dict[int, set[tuple[int, ...]]]] = {}
        frees: dict[tuple[int, int, int], list[tuple[int, int, _At]]] = defaultdict(list)
        self._steps: list[_At] = []
        self._births: dict[tuple[int, int], tuple[Storage, tuple[Curve, ...]]] = {}
        for trace in (small, large):
            places = [*self._places(trace.batch_size)]
            if len(places) != len(trace.events):
                raise NotGeneralError("a loop has another number of passes than examples")
            born: dict[int, _At] = {}
            for place, event in zip(places, trace.events, strict=True):
                key = place[:2]
                if event >= 0:
                    born[event] = place
                    amounts = storages.setdefault(key, {}).setdefault(trace.batch_size, set())
                    amounts.add(trace.storages[event].amounts)
                    self._births[key] = trace.storages[event], ()
                elif event != EMPTY_CACHE:
                    found = trace.batch_size, place.of_pass, born[~event]
                    zone = (*key, self._zone(place, trace.batch_size))
                    frees[zone].append(found)
            self._steps = [places[at] for at in trace.steps]
        for key, by_size in storages.items():
            self._births[key] = self._births[key][0], self._curves(by_size)
        self._frees = {key: self._freed(found) for key, found in frees.items()}

    @property
    def events_per_sample(self) -> int:
        """The events that each example adds."""
        return sum(loop.body for loop in self._loops)

    def at(self, batch_size: int) -> Trace:
        """Return the trace at a batch size.

        Raises:
            NotGeneralError: it is too small.
        """
        if batch_size < self._small.batch_size:
            raise NotGeneralError(f"batch size {batch_size} is too small for loops")
        trace = Trace(batch_size)
        made: dict[tuple[int, int], list[int]] = defaultdict(list)
        steps = set(self._steps)
        births: dict[tuple[int, int], Storage] = {}
        for key, (storage, curves) in self._births.items():
            amounts = tuple(round(curve.bytes_at(batch_size)) for curve in curves)
            rule = storage.rule and storage.rule._replace(amounts=amounts)
            births[key] = replace(storage, size_bytes=amounts[0], rule=rule)
        for place in self._places(batch_size):
            key = place[:2]
            if place in steps:
                trace.steps.append(len(trace.events))
            if key in births:
                stage = births[key].stage
                if not trace.stages or trace.stages[-1][1] is not stage:
                    trace.stages.append((len(trace.events), stage))
                made[key].append(len(trace.storages))
                trace.events.append(len(trace.storages))
                trace.storages.append(births[key])
            elif freed := self._frees.get((*key, self._zone(place, batch_size))):
                part, offset, index, per_pass, per_sample = freed
                index += per_pass * place.of_pass + per_sample * batch_size
                if not 0 <= index < len(made[part, offset]):
                    raise NotGeneralError("a loop frees what is not there")
                trace.events.append(~made[part, offset][index])
            else:
                trace.events.append(EMPTY_CACHE)
        return trace

    def _places(self, batch_size: int) -> Iterator[_At]:
        """Yield the place of each event at a batch size. Parts with an odd number are loops."""
        more = batch_size - self._small.batch_size
        begun = 0
        end = _Loop(len(self._small.events), 0, 0)
        for number, loop in enumerate((*self._loops, end)):
            for offset in range(loop.start - begun):
                yield _At(2 * number, offset, 0)
            for index in range(loop.passes + more if loop.body else 0):
                for offset in range(loop.body):
                    yield _At(2 * number + 1, offset, index)
            begun = loop.start + loop.body * loop.passes

    def _zone(self, place: _At, batch_size: int) -> int:
        """Return where in a loop a place is: in its first pass, between, or in its last one."""
        if not place.of_pass:
            return 0
        passes = self._loops[place.part // 2].passes + batch_size - self._small.batch_size
        return 2 if place.of_pass == passes - 1 else 1

    def _curves(self, by_size: dict[int, set[tuple[int, ...]]]) -> tuple[Curve, ...]:
        """Return the lines of a storage's bytes, or of the amounts in its rule."""
        (small, before), (large, after) = sorted(by_size.items())
        if len(before) > 1 or len(after) > 1:
            raise NotGeneralError("the passes of a loop allocate different sizes")
        curves = []
        for low, high in zip(*before, *after, strict=True):
            slope = (high - low) / (large - small)
            curves.append(Curve(high - slope * large, slope))
            if curves[-1].shrinks:
                raise NotGeneralError("a storage shrinks as the batch grows")
        return tuple(curves)

    def _freed(self, found: list[tuple[int, int, _At]]) -> _Freed:
        """Return which storage an event frees, from all passes at both sizes."""
        sizes = self._small.batch_size, self._large.batch_size
        by_size = {size: [(at, freed) for b, at, freed in found if b == size] for size in sizes}
        (at, first), *others = by_size[sizes[1]]
        per_pass = others[0][1].of_pass - first.of_pass if others else 0
        more, rest = divmod(first.of_pass - by_size[sizes[0]][0][1].of_pass, sizes[1] - sizes[0])
        fixed = first.of_pass - per_pass * at - more * sizes[1]
        rule = _Freed(first.part, first.offset, fixed, per_pass, more)
        for size, index, freed in found:
            if rest or freed != (*rule[:2], fixed + per_pass * index + more * size):
                raise NotGeneralError("the passes of a loop free different storages")
        return rule


def _loops(small: Trace, large: Trace) -> list[_Loop]:
    """Return the loops that have more passes at the larger size."""
    ours, theirs = _kinds(small), _kinds(large)
    sized = [*zip(ours, _amounts(small), strict=True)]
    more = large.batch_size - small.batch_size
    loops: list[_Loop] = []
    i = j = 0
    while (i, j) != (len(ours), len(theirs)):
        if i < len(ours) and j < len(theirs) and ours[i] == theirs[j]:
            i, j = i + 1, j + 1
            continue
        body = _body(theirs, j, more, ours[i : i + _SURE])
        begun = loops[-1].start + loops[-1].body * loops[-1].passes if loops else 0
        loops.append(_passes(sized, begun, i, body))
        j += body * more
    if not loops:
        raise NotGeneralError("no loop has more passes")
    return loops


def _passes(events: Sequence[object], begun: int, end: int, body: int) -> _Loop:
    """Return the loop in some events: the longest run in which each pass does the same.

    What follows a loop may be of the same kind as what is in it, but of another size.
    """
    longest = (0, 0)
    first = begun
    for at in range(begun, end):
        if at - body < begun or events[at] != events[at - body]:
            first = at + 1 - body if at + 1 - body >= begun else begun
        longest = max(longest, (at + 1 - first, first))
    length, first = longest
    passes = length // body
    if passes < _FEWEST_PASSES:
        raise NotGeneralError("a loop has too few passes")
    return _Loop(first + length - passes * body, body, passes)


def _body(events: list[object], at: int, passes: int, after: list[object]) -> int:
    """Return the length of a pass, of those that the larger trace has in addition."""
    for body in range(1, min(at, (len(events) - at) // passes) + 1):
        end = at + body * passes
        if events[at - body] != events[at] or events[end : end + len(after)] != after:
            continue
        if events[at - body : end - body] == events[at:end]:
            return body
    raise NotGeneralError("the steps did different things")


def _kinds(trace: Trace) -> list[object]:
    """Return each event without numbers and sizes: the kind of storage that is born or freed."""
    kinds: list[tuple[Stage, str, str, bool]] = [
        (each.stage, each.module, each.line, each.optional) for each in trace.storages
    ]
    return [
        event if event == EMPTY_CACHE else (event < 0, kinds[~event if event < 0 else event])
        for event in trace.events
    ]


def _amounts(trace: Trace) -> list[tuple[int, ...]]:
    """Return the size of the storage that each event makes or frees, or the amounts in its rule."""
    return [
        () if event == EMPTY_CACHE else trace.storages[~event if event < 0 else event].amounts
        for event in trace.events
    ]
