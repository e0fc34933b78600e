"""What a training step asks of the allocator: storages born and died, in order.

The order does not depend on the batch size ``b``; the size of a storage is ``fixed + per_sample *
b``. Two traces at two sizes, laid side by side, are therefore the trace at every size.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby

from batchfinder.simulation.rounding import round_request


class Kind(enum.Enum):
    """What a storage is for: the terms of the textbook equation."""

    PARAMETER = "parameters"
    GRADIENT = "gradients"
    OPTIMIZER_STATE = "optimizer states"
    ACTIVATION = "activations"
    INPUT = "batch data"
    TEMPORARY = "temporaries"
    WORKSPACE = "workspaces"


class Stage(enum.Enum):
    """Where in the training step something happens."""

    SETUP = "setup"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer step"


@dataclass
class Storage:
    """One piece of memory that lived for a while.

    Attributes:
        size_bytes: as the tensor asked for it, before the allocator's rounding.
        kind: what it was for.
        stage: when it was born.
        module: the dotted name of the module that made it; "" where there is none.
        line: the user's source line that made it, as ``file.py:12``; "" where there is none.
        optional: whether the step also runs without it, slower: a library's workspace.
    """

    size_bytes: int
    kind: Kind = Kind.TEMPORARY
    stage: Stage = Stage.SETUP
    module: str = ""
    line: str = ""
    optional: bool = False


EMPTY_CACHE = -(1 << 62)
"""An event in which the cached segments are given back to the device."""


@dataclass
class Trace:
    """Every storage of a few training steps at one batch size.

    Attributes:
        batch_size: examples per forward/backward pass.
        storages: in the order of their birth.
        events: ``i`` is the birth of storage ``i`` and ``~i`` its death; or ``EMPTY_CACHE``.
        stages: the event from which on each stage runs, in order.
        steps: the event with which each step begins.
    """

    batch_size: int
    storages: list[Storage] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    stages: list[tuple[int, Stage]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


class NotAffineError(Exception):
    """Two traces do not tell the trace at every size; the text says where they part."""


@dataclass(frozen=True)
class AffineTrace:
    """The trace at every batch size.

    Attributes:
        example: the trace that names each storage, at the larger of the two sizes traced.
        fixed_bytes: of each storage, what does not depend on the batch size.
        per_sample_bytes: of each storage, what each example adds.

    Example:
        >>> two = Trace(2, [Storage(100), Storage(28)], [0, 1, ~1])
        >>> four = Trace(4, [Storage(100), Storage(48)], [0, 1, ~1])
        >>> align(two, four).sizes(10)
        [100, 108]
    """

    example: Trace
    fixed_bytes: Sequence[float]
    per_sample_bytes: Sequence[float]

    @property
    def events(self) -> list[int]:
        """The births and deaths, the same at every size; see :class:`Trace`."""
        return self.example.events

    def sizes(self, batch_size: int) -> list[int]:
        """The bytes of each storage at a batch size."""
        sizes, growing = self._parts
        sizes = sizes.copy()
        for index, fixed, slope in growing:
            sizes[index] = round(fixed + slope * batch_size)
        return sizes

    @property
    def has_offsets(self) -> bool:
        """Whether a storage neither stays as it is nor grows as the batch does, but in between."""
        lines = zip(self.example.storages, self.fixed_bytes, self.per_sample_bytes, strict=True)
        return any(fixed and slope and not storage.optional for storage, fixed, slope in lines)

    @cached_property
    def _parts(self) -> tuple[list[int], list[tuple[int, float, float]]]:
        """The sizes without an example; and the storages that grow, most in whole bytes."""
        growing = [
            (index, _whole(fixed), _whole(slope))
            for index, (fixed, slope) in enumerate(
                zip(self.fixed_bytes, self.per_sample_bytes, strict=True)
            )
            if slope
        ]
        return [round(fixed) for fixed in self.fixed_bytes], growing

    @cached_property
    def highest_lines(self) -> dict[Stage, list[tuple[float, float]]]:
        """Those of :meth:`live_lines` that no other one of the stage exceeds at every size."""
        by_stage: dict[Stage, set[tuple[float, float]]] = {}
        for stage, fixed, slope in self.live_lines():
            by_stage.setdefault(stage, set()).add((fixed, slope))
        highest: dict[Stage, list[tuple[float, float]]] = {}
        for stage, lines in by_stage.items():
            kept = highest.setdefault(stage, [])
            for fixed, slope in sorted(lines, key=lambda line: line[::-1], reverse=True):
                if not kept or fixed > kept[-1][0]:
                    kept.append((fixed, slope))
        return highest

    def live_lines(self) -> Iterator[tuple[Stage, float, float]]:
        """What is alive as a stage begins and after each birth: lower bounds.

        Each storage counts with the bytes asked for, no less than the smallest block.

        Yields:
            The stage, the bytes without an example, the bytes per example.
        """
        stages = dict(self.example.stages)
        stage = Stage.SETUP
        fixed = slope = 0.0
        for position, event in enumerate(self.events):
            if position in stages:
                stage = stages[position]
                yield stage, fixed, slope
            if event == EMPTY_CACHE:
                continue
            index = event if event >= 0 else ~event
            if self.example.storages[index].optional:
                continue
            sign = 1 if event >= 0 else -1
            fixed += sign * self.fixed_bytes[index]
            slope += sign * self.per_sample_bytes[index]
            if sign > 0:
                yield stage, fixed, slope

    def growth_at(self, batch_size: int, stages: Collection[Stage]) -> float:
        """What one more example adds to the most that is alive in some stages, in bytes."""
        lines = [line for stage in stages for line in self.highest_lines.get(stage, ())]
        _, slope = max(lines, key=lambda line: line[0] + line[1] * batch_size, default=(0.0, 0.0))
        return slope

    def upper_bound(self, capacity_bytes: int) -> int | None:
        """No batch size above this one fits in the capacity; None: nothing grows.

        This needs no allocator: it is where the storages alive at once no longer fit.
        """
        largest: float | None = None
        for fixed, slope in chain.from_iterable(self.highest_lines.values()):
            if slope > 0:
                size = (capacity_bytes - fixed) / slope
                largest = size if largest is None or size < largest else largest
            elif fixed > capacity_bytes:
                return 0
        return None if largest is None else max(0, int(largest))

    @cached_property
    def module_growth(self) -> Counter[str]:
        """What each module's activations of the last step take per example, in bytes."""
        growth: Counter[str] = Counter()
        for event in self.events[self.last_step :]:
            if event >= 0 and self.example.storages[event].kind is Kind.ACTIVATION:
                name = self.example.storages[event].module
                growth[name] += self.per_sample_bytes[event]  # type: ignore[assignment]
        return growth

    @property
    def last_step(self) -> int:
        """The event with which the last step begins."""
        return self.example.steps[-1] if self.example.steps else 0


def align(small: Trace, large: Trace) -> AffineTrace:
    """The trace at every batch size, from two.

    Args:
        small: traced at one size.
        large: the same steps traced at a larger size.

    Raises:
        NotAffineError: the two steps did different things, or a storage shrinks as the batch grows.
    """
    small, large = sort_deaths(small), sort_deaths(large)
    if small.events != large.events:
        pairs = zip(small.events, large.events, strict=False)
        shorter = min(len(small.events), len(large.events))
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        raise NotAffineError(
            f"the steps at batch sizes {small.batch_size} and {large.batch_size} part"
            f"{_place(large, at)}"
        )
    span = large.batch_size - small.batch_size
    fixed_bytes: list[float] = []
    per_sample_bytes: list[float] = []
    for index, (before, after) in enumerate(zip(small.storages, large.storages, strict=True)):
        slope = (after.size_bytes - before.size_bytes) / span
        fixed = after.size_bytes - slope * large.batch_size
        # What starts below nothing bends somewhere: a line through it would mislead.
        if slope < 0 or fixed < -round_request(1):
            raise NotAffineError(
                f"a storage is {before.size_bytes} B at batch size {small.batch_size} and "
                f"{after.size_bytes} B at {large.batch_size}{_place(large, index)}"
            )
        fixed_bytes.append(fixed)
        per_sample_bytes.append(slope)
    return AffineTrace(large, fixed_bytes, per_sample_bytes)


def check_line(trace: AffineTrace, third: Trace) -> None:
    """Refuse a trace at every size that does not hold at a third one.

    A line through two points always exists. That of a matrix of batch by batch is too low above
    them, and does not start below nothing where the matrix has further rows and columns.

    Args:
        trace: from two sizes.
        third: the beginning of the same steps, traced at a size that is larger by some times.

    Raises:
        NotAffineError: a storage is none of this size there, or the steps did other things.
    """
    small, large = trace.example.batch_size, third.batch_size
    for index, (storage, size) in enumerate(zip(third.storages, trace.sizes(large), strict=False)):
        if storage.optional or abs(storage.size_bytes - size) <= round_request(1):
            continue
        raise NotAffineError(
            f"a storage is {trace.example.storages[index].size_bytes} B at batch size {small} and "
            f"{storage.size_bytes} B at {large}, which is not in line{_place(third, index)}"
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


def _whole(number: float) -> float:
    """As an integer if it is one: to compute with those is faster."""
    return int(number) if number == int(number) else number


def _place(trace: Trace, at: int) -> str:
    storage = trace.storages[min(at, len(trace.storages) - 1)] if trace.storages else None
    where = [text for text in (storage.module, storage.line) if text] if storage else []
    return f" ({', '.join(where)})" if where else ""
