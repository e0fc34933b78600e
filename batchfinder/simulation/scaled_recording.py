"""The requests of a recorded confirmation, scaled to other batch sizes. No torch."""

from __future__ import annotations

import math
from itertools import chain

from batchfinder.probing.devices.allocator.caching import CachingAllocator, DeviceFullError
from batchfinder.probing.devices.allocator.recorded import Replay
from batchfinder.probing.devices.allocator.recorded_step import requests_of
from batchfinder.probing.steadiness import PeakWatch
from batchfinder.search.prober import Recording
from batchfinder.simulation.matched_requests import grows_faster, growths_to, paired


class ScaledRecording:
    """Scales the requests of a confirmation to any size, and replays them.

    Args:
        small, large: the two recorded batch sizes.
        recorded: the requests at the smaller size.
        model: the requests at the larger size. Its events are replayed.
        far: a still larger size that ran out of memory after its first step; 0 if there is none.
        beginning: the requests at that size.

    Attributes:
        is_matched: True if both sizes made the same requests, none of which grows with all pairs.
        repeats_for_examples: True if most requests are made again for each example, as in a loop
            over the examples. Then a larger batch makes requests that were not recorded.
    """

    def __init__(
        self,
        small: int,
        recorded: Recording,
        large: int,
        model: Recording,
        far: int = 0,
        beginning: Recording | None = None,
    ) -> None:
        self._large, self._model = large, model
        self._steps = [*model.steps, *model.validations]
        last = len(recorded.steps) - 1
        smaller = [recorded.steps[min(number, last)] for number in range(len(model.steps))]
        asked = [requests_of(step) for step in self._steps]
        known = [requests_of(step) for step in [*smaller, *recorded.validations]]
        pairs = [
            paired(each, larger, large / small) for each, larger in zip(known, asked, strict=True)
        ]
        growths = growths_to(beginning, far, pairs[0], asked[0], large) if beginning else {}

        def growth(size: int, other: int | None) -> tuple[float, float]:
            if other is not None and grows_faster(other, size, large / small):
                return 0.0, (size - other) / (large**2 - small**2)
            if (other, size) in growths:
                return growths[other, size], 0.0
            return (size / large if other is None else (size - other) / (large - small)), 0.0

        # The bytes that each request grows by: for each example, and for each pair of examples.
        self._growth = [[*map(growth, *step)] for step in zip(asked, pairs, strict=True)]
        has_pairs = any(square for _, square in chain(*self._growth))
        counts, grown = [*map(len, known)], [*map(len, asked)]
        self.is_matched = None not in chain(*pairs) and counts == grown and not has_pairs
        for_each = (sum(grown) - sum(counts)) / (large - small)
        self.repeats_for_examples = for_each * small > sum(counts) / 2

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
