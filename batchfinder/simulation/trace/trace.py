"""A training step's requests to the allocator: births and deaths of storages, in order.

The order does not depend on the batch size ``b``. The size of a storage is a line or a parabola in
``b``, or follows from such curves by a rule. Traces at a few sizes therefore determine the trace
at every size: see :mod:`~batchfinder.simulation.trace.alignment`.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

from batchfinder.simulation.gpus import NO_GPU, Gpu
from batchfinder.simulation.trace.curve import Curve


class Kind(enum.Enum):
    """The purpose of a storage: the terms of the textbook equation."""

    PARAMETER = "parameters"
    GRADIENT = "gradients"
    OPTIMIZER_STATE = "optimizer states"
    ACTIVATION = "activations"
    INPUT = "batch data"
    TEMPORARY = "temporaries"
    WORKSPACE = "workspaces"


class Stage(enum.Enum):
    """The part of the training step in which something happens."""

    SETUP = "setup"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer step"


class Rule(NamedTuple):
    """A storage size that is not a line in the batch size, but follows from lines or the GPU.

    Attributes:
        amounts: numbers that are each a line in the batch size, at the size that was traced.
        bytes_of: the function from the amounts and the GPU to the bytes.

    Example:
        >>> Rule((4,), lambda rows, gpu: min(rows, 100) * 512).size_bytes
        2048
    """

    amounts: tuple[int, ...]
    bytes_of: Callable[..., int]

    @property
    def size_bytes(self) -> int:
        """Bytes at the batch size that was traced, on no specific GPU."""
        return self.bytes_of(*self.amounts, NO_GPU)


@dataclass
class Storage:
    """One piece of memory that lived for a while.

    Attributes:
        size_bytes: the bytes that the tensor requested, before the allocator's rounding.
        kind: the purpose of the storage.
        stage: the stage in which it was born.
        module: the dotted name of the module that made it; "" if none did.
        line: the user's source line that made it, as ``file.py:12``; "" if unknown.
        optional: True for a library's workspace without which the step runs too, but slower.
        rule: the rule for its size, if that is neither a line nor a parabola in the batch size.
    """

    size_bytes: int
    kind: Kind = Kind.TEMPORARY
    stage: Stage = Stage.SETUP
    module: str = ""
    line: str = ""
    optional: bool = False
    rule: Rule | None = None

    @property
    def amounts(self) -> tuple[int, ...]:
        """The numbers that are on a line or a parabola: its bytes, unless it has a rule."""
        return self.rule.amounts if self.rule else (self.size_bytes,)


EMPTY_CACHE = -(1 << 62)
"""The event at which the allocator returns its cached segments to the device."""


@dataclass
class Trace:
    """Every storage of a few training steps at one batch size.

    Attributes:
        batch_size: examples per forward/backward pass.
        storages: the storages in the order of their birth.
        events: ``i`` is the birth of storage ``i`` and ``~i`` its death; or ``EMPTY_CACHE``.
        stages: each stage with its first event, in order.
        steps: the first event of each step.
    """

    batch_size: int
    storages: list[Storage] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    stages: list[tuple[int, Stage]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class GeneralTrace:
    """The trace at every batch size.

    Attributes:
        example: the trace at one of the traced sizes. It names each storage.
        amounts: for each storage, its bytes by the batch size, or the amounts in its rule.

    Example:
        >>> example = Trace(2, [Storage(100), Storage(36)], [0, 1, ~1])
        >>> trace = GeneralTrace(example, [(Curve(100),), (Curve(8, 10, 2),)])
        >>> trace.sizes(10)
        [100, 308]
    """

    example: Trace
    amounts: Sequence[tuple[Curve, ...]]

    @cached_property
    def curves(self) -> list[Curve]:
        """For each storage, its bytes by the batch size, or the first amount in its rule."""
        return [first for first, *_ in self.amounts]

    @property
    def events(self) -> list[int]:
        """The births and deaths. They are the same at every size, as in :class:`Trace`."""
        return self.example.events

    def sizes(self, batch_size: int, gpu: Gpu = NO_GPU) -> list[int]:
        """Return the bytes of each storage at a batch size."""
        sizes = [round(curve.bytes_at(batch_size)) for curve in self.curves]
        for index, storage in enumerate(self.example.storages):
            if storage.rule is not None:
                amounts = (round(curve.bytes_at(batch_size)) for curve in self.amounts[index])
                sizes[index] = storage.rule.bytes_of(*amounts, gpu)
        return sizes

    @property
    def has_offsets(self) -> bool:
        """True if a storage is neither constant nor proportional to the batch size."""
        curves = zip(self.example.storages, self.curves, strict=True)
        return any(
            fixed and slope and not storage.optional for storage, (fixed, slope, _) in curves
        )

    @cached_property
    def highest_curves(self) -> dict[Stage, list[Curve]]:
        """The :meth:`live_curves`, without most curves that others of the stage always exceed."""
        by_stage: dict[Stage, set[Curve]] = {}
        for stage, curve in self.live_curves():
            by_stage.setdefault(stage, set()).add(curve)
        highest: dict[Stage, list[Curve]] = {}
        for stage, curves in by_stage.items():
            kept = highest.setdefault(stage, [])
            for curve in sorted(curves, key=lambda curve: curve[::-1], reverse=True):
                # Among curves with the same square term, each must start above the steeper ones.
                if not kept or curve[2] < kept[-1][2] or curve[0] > kept[-1][0]:
                    kept.append(curve)
        return highest

    def live_curves(self) -> Iterator[tuple[Stage, Curve]]:
        """Yield the curves of memory alive as a stage begins and after each birth: lower bounds.

        A storage counts with its requested bytes, unless it is optional or has a rule.
        """
        stages = dict(self.example.stages)
        stage = Stage.SETUP
        fixed = slope = pairs = 0.0
        for position, event in enumerate(self.events):
            if position in stages:
                stage = stages[position]
                yield stage, Curve(fixed, slope, pairs)
            if event == EMPTY_CACHE:
                continue
            index, sign = (event, 1) if event >= 0 else (~event, -1)
            storage = self.example.storages[index]
            if storage.optional or storage.rule:
                continue
            curve = self.curves[index]
            fixed += sign * curve[0]
            slope += sign * curve[1]
            pairs += sign * curve[2]
            if sign > 0:
                yield stage, Curve(fixed, slope, pairs)

    def highest_at(self, batch_size: int, stages: Collection[Stage]) -> Curve:
        """Return the curve of the most memory alive in some stages, at a batch size."""
        curves = chain.from_iterable(self.highest_curves.get(stage, ()) for stage in stages)
        return max(curves, key=lambda curve: curve.bytes_at(batch_size), default=Curve(0))

    def upper_bound(self, capacity_bytes: int) -> int | None:
        """Return an upper bound of the batch sizes that fit; None if nothing grows.

        This needs no allocator: above this size, the storages alive at once do not fit.
        """
        curves = chain.from_iterable(self.highest_curves.values())
        largest = min((curve.largest_within(capacity_bytes) for curve in curves), default=math.inf)
        return None if math.isinf(largest) else int(largest)

    def activations_per_sample(self, batch_size: int) -> Counter[str]:
        """Return the bytes per example of each module's activations in the last step."""
        shares: Counter[str] = Counter()
        for name, curve in self._module_curves.items():
            shares[name] = curve.per_sample_at(batch_size)  # type: ignore[assignment]
        return shares

    @cached_property
    def _module_curves(self) -> dict[str, Curve]:
        """The most that is alive at once of each module's activations in the last step.

        A step with several backward passes, as a GAN's, never holds the sum of all of them.
        """
        alive: dict[str, Curve] = {}
        most: dict[str, Curve] = {}
        born: set[int] = set()
        size = self.example.batch_size
        for event in self.events[self.last_step :]:
            index, sign = (event, 1) if event >= 0 else (~event, -1)
            if event == EMPTY_CACHE or (sign < 0 and index not in born):
                continue
            storage = self.example.storages[index]
            if storage.kind is Kind.ACTIVATION:
                born.add(index)
                name = storage.module
                pairs = zip(alive.get(name, Curve(0)), self.curves[index], strict=True)
                alive[name] = Curve(*(before + sign * more for before, more in pairs))
                if alive[name].bytes_at(size) > most.setdefault(name, Curve(0)).bytes_at(size):
                    most[name] = alive[name]
        return most

    @property
    def last_step(self) -> int:
        """The first event of the last step."""
        return self.example.steps[-1] if self.example.steps else 0

    def parts(self, start: int, end: int) -> list[tuple[int, int, Stage]]:
        """Return the start, end and stage of each run of events in one stage, from start to end."""
        stages = [(0, Stage.SETUP), *self.example.stages, (len(self.events), Stage.OPTIMIZER)]
        clipped = [
            (max(begin, start), min(until, end), stage)
            for (begin, stage), (until, _) in pairwise(stages)
        ]
        return [(begin, until, stage) for begin, until, stage in clipped if begin < until]

    @cached_property
    def successors(self) -> list[tuple[int, int]] | None:
        """The pairs of storages that let the last step run once more.

        Each pair is a storage that the last step found and freed, and the one that it leaves for
        the next step instead. An example is a batch that lives until the next one exists. None if
        the step leaves other storages than it found.

        Example:
            >>> events = [0, 1, ~1, 2, ~0, 3, ~3]  # batches 0 and 2, activations 1 and 3
            >>> amounts = [(Curve(0, 8),), (Curve(0, 100),)] * 2
            >>> GeneralTrace(Trace(1, [Storage(8)] * 4, events, steps=[0, 3]), amounts).successors
            [(0, 2)]
        """
        events = [event for event in self.events[self.last_step :] if event != EMPTY_CACHE]
        born = {event for event in events if event >= 0}
        died = {~event for event in events if event < 0}
        found, left = sorted(died - born), sorted(born - died)
        if [self.curves[index] for index in found] != [self.curves[index] for index in left]:
            return None
        return list(zip(found, left, strict=True))
