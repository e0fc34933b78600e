"""Scale the requests of a recorded confirmation, as matched at two sizes, to others. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence, Set
from itertools import chain

from batchfinder.probing.devices.allocator.caching import CachingAllocator, DeviceFullError
from batchfinder.probing.devices.allocator.recorded import Replay
from batchfinder.probing.devices.allocator.recorded_step import (
    last_pieces,
    requests_of,
)
from batchfinder.probing.steadiness import PeakWatch
from batchfinder.search.prober import Recording
from batchfinder.simulation.recordings.pairing import grows_faster, paired


class ScaledRecording:
    """Scales the requests of a confirmation to any size, and replays them.

    Make one :meth:`between` two sizes, or :meth:`in_proportion` to one.

    Args:
        size: the recorded batch size.
        model: the requests at that size. Its events are replayed.
        growth: the bytes that each request of each step, and then of each validation, grows by: for
            each example, and for each pair of examples.
        is_matched: True if another size made the same requests, none of which grows with all pairs.
    """

    def __init__(
        self,
        size: int,
        model: Recording,
        growth: Sequence[Sequence[tuple[float, float]]],
        *,
        is_matched: bool = True,
    ) -> None:
        self._large, self._model, self._growth = size, model, growth
        self._steps = [*model.steps, *model.validations]
        self.is_matched = is_matched

    @classmethod
    def in_proportion(
        cls, size: int, model: Recording, fixed: Set[int], always: Set[int]
    ) -> ScaledRecording:
        """Scale requests in proportion to the examples, except those of fixed bytes.

        Where a loss is made in pieces (:func:`last_pieces`), the last one stays as it is too.

        Args:
            size: the recorded batch size.
            model: the requests at that size.
            fixed: the bytes of the requests that do not grow.
            always: more of these, in validations.
        """

        def growing(step: Sequence[int], fixed: Set[int]) -> list[tuple[float, float]]:
            requests = requests_of(step)
            stay = last_pieces(requests, fixed)
            return [
                (0.0 if e in fixed or place in stay else e / size, 0.0)
                for place, e in enumerate(requests)
            ]

        growth = [growing(step, fixed) for step in model.steps]
        growth += [growing(step, fixed | always) for step in model.validations]
        return cls(size, model, growth)

    @classmethod
    def of_loop(
        cls, small: int, recorded: Recording, large: int, model: Recording
    ) -> ScaledRecording | None:
        """Scale the requests of a loop over the examples; None if most are made outside of one.

        More examples make more of these requests, not larger ones. Each grows by its share of the
        blocks of its size that are alive at once. Other requests grow in proportion.
        """
        before, now = (len(requests_of(each.steps[-1])) for each in (recorded, model))
        if (now - before) / (large - small) * small <= before / 2:
            return None
        known, alive = _most_alive(recorded), _most_alive(model)

        def growth(size: int) -> tuple[float, float]:
            more = alive[size] - known[size]
            share = more / (large - small) / alive[size] if known[size] else 1 / large
            return size * share, 0.0

        steps = [*model.steps, *model.validations]
        grown = [[*map(growth, requests_of(step))] for step in steps]
        return cls(large, model, grown, is_matched=False)

    @classmethod
    def between(
        cls,
        small: int,
        recorded: Recording,
        large: int,
        model: Recording,
        far: int = 0,
        beginning: Recording | None = None,
    ) -> ScaledRecording:
        """Match the requests of two sizes. They grow by the same bytes for each example.

        Args:
            small: the smaller recorded batch size.
            recorded: the requests at that size.
            large: the larger one.
            model: the requests at that size.
            far: a still larger size that ran out of memory after its first step; 0 if there is
                none.
            beginning: the requests at that size.
        """
        last = len(recorded.steps) - 1
        smaller = [recorded.steps[min(number, last)] for number in range(len(model.steps))]
        asked = [requests_of(step) for step in (*model.steps, *model.validations)]
        known = [requests_of(step) for step in [*smaller, *recorded.validations]]
        pairs = [
            paired(each, larger, large / small) for each, larger in zip(known, asked, strict=True)
        ]
        growths = _growths_to(beginning, far, pairs[0], asked[0], large) if beginning else {}

        def growth(size: int, other: int | None) -> tuple[float, float]:
            if other is not None and grows_faster(other, size, large / small):
                return 0.0, (size - other) / (large**2 - small**2)
            if (other, size) in growths:
                return growths[other, size], 0.0
            return (size / large if other is None else (size - other) / (large - small)), 0.0

        grown = [[*map(growth, *step)] for step in zip(asked, pairs, strict=True)]
        has_pairs = any(square for _, square in chain(*grown))
        is_same = None not in chain(*pairs) and [*map(len, known)] == [*map(len, asked)]
        return cls(large, model, grown, is_matched=is_same and not has_pairs)

    def fits(self, batch_size: int, allocator: CachingAllocator, watch: PeakWatch) -> bool:
        """Return True if the allocator serves a confirmation, as a new watch judges it."""
        try:
            replay = Replay(self.at(batch_size), allocator)
            for peak, flushes in replay.steps(watch.most_steps):
                watch.note(peak, flushes)
                if watch.is_over:
                    break
            if watch.objection():
                return False
            replay.validations()
        except DeviceFullError:
            return False
        return True

    def end_of_tensors(self, limit_bytes: int) -> float:
        """Return the batch size beyond which even the sum of all requests passes a limit."""
        # The bytes of each block, and how they grow.
        blocks = [(size, 0.0, 0.0) for size in self._model.held]
        left, linear, square, more = limit_bytes - sum(self._model.held), 0.0, 0.0, math.inf
        for step, growth in zip(self._steps, self._growth, strict=True):
            each = iter(growth)
            for event in step:
                if event < 0:
                    size, for_example, for_pair = blocks[~event]
                    left, linear, square = left + size, linear - for_example, square - for_pair
                    continue
                blocks.append((event, *next(each)))
                _, for_example, for_pair = blocks[-1]
                left, linear, square = left - event, linear + for_example, square + for_pair
                slope = linear + 2 * self._large * square
                if slope > 0:  # slope * more + square * more ** 2 is left
                    root = math.sqrt(max(0.0, slope**2 + 4 * square * left))
                    more = min(more, 2 * left / (slope + root))
        return self._large + more

    def at(self, batch_size: int) -> Recording:
        """Return what a confirmation at a size would request."""
        more, more_pairs = batch_size - self._large, batch_size**2 - self._large**2
        steps = []
        for step, growth in zip(self._steps, self._growth, strict=True):
            added = (linear * more + square * more_pairs for linear, square in growth)
            steps.append([e if e < 0 else max(0, round(e + next(added))) for e in step])
        end = len(self._model.steps)
        return self._model._replace(steps=steps[:end], validations=steps[end:])


def _most_alive(recording: Recording) -> Counter[int]:
    """Return how many blocks of each size, in bytes, are alive at once."""
    blocks, alive, most = [*recording.held], Counter(recording.held), Counter(recording.held)
    for event in chain(*recording.steps, *recording.validations):
        size = event if event >= 0 else blocks[~event]
        alive[size] += 1 if event >= 0 else -1
        most[size] = max(most[size], alive[size])
        if event >= 0:
            blocks.append(event)
    return most


def _growths_to(
    beginning: Recording, far: int, pairs: Sequence[int | None], asked: Sequence[int], large: int
) -> dict[tuple[int | None, int], float]:
    """Return how requests grow from the larger size to a still larger one, by their bytes.

    Those of the first step are compared one by one; later steps repeat many of them. Buffers of
    reductions, for example, stop growing once the kernel fills the device. If requests of the same
    bytes grow differently, the largest growth counts.
    """
    reached = requests_of(beginning.steps[0])
    if len(reached) != len(asked) or None in paired(asked, reached, far / large):
        return {}
    growths: dict[tuple[int | None, int], float] = {}
    for other, size, end in zip(pairs, asked, reached, strict=True):
        growth = (end - size) / (far - large)
        growths[other, size] = max(growth, growths.get((other, size), 0))
    return growths
