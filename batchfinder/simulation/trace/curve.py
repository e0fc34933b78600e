"""Bytes that grow with the batch size, at most with its square."""

from __future__ import annotations

import math
from typing import NamedTuple


class Curve(NamedTuple):
    """``fixed + per_sample * b + per_pair * b * b`` bytes at batch size ``b``; mostly a line.

    Attributes:
        fixed_bytes: the bytes that do not depend on the batch size.
        per_sample_bytes: the bytes for each example. Below 0 if not every pair counts: there are
            ``b * b - b`` pairs of different examples.
        per_pair_bytes: the bytes for each pair of examples, as in contrastive learning.

    Example:
        >>> similarities = Curve(100, 8, 2)
        >>> similarities.bytes_at(10), similarities.bytes_at(11), similarities.growth_at(10)
        (380, 430, 50)
        >>> similarities.largest_within(429), Curve(100, 8).largest_within(132)
        (10, 4.0)
    """

    fixed_bytes: float
    per_sample_bytes: float = 0
    per_pair_bytes: float = 0

    def bytes_at(self, batch_size: int) -> float:
        """Return the bytes at a batch size."""
        fixed, per_sample, per_pair = self
        return fixed + (per_sample + per_pair * batch_size) * batch_size

    def per_sample_at(self, batch_size: int) -> float:
        """Return the bytes for each example at a batch size: its share of what is not fixed."""
        return self.per_sample_bytes + self.per_pair_bytes * batch_size

    def growth_at(self, batch_size: int) -> float:
        """Return the bytes that one more example than the batch size adds."""
        return self.per_sample_bytes + self.per_pair_bytes * (2 * batch_size + 1)

    @property
    def shrinks(self) -> bool:
        """True if one more example needs fewer bytes somewhere."""
        return self.per_pair_bytes < 0 or self.per_sample_bytes < -self.per_pair_bytes

    def largest_within(self, capacity_bytes: int) -> float:
        """Return an upper bound of the batch sizes that fit, if the curve does not shrink."""
        fixed, per_sample, per_pair = self
        left = capacity_bytes - fixed
        if left < 0:
            return 0
        if per_pair <= 0:
            return left / per_sample if per_sample > 0 else math.inf
        root = math.sqrt(per_sample * per_sample + 4 * per_pair * left)
        if per_sample > 0:  # the form of the solution without a subtraction is more exact
            solution = 2 * left / (root + per_sample)
        else:
            solution = (root - per_sample) / (2 * per_pair)
        size = int(solution)  # rounding may have made it too small
        return size + 1 if self.bytes_at(size + 1) <= capacity_bytes else size
