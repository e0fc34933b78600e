"""Match the requests of a step to those of a smaller batch. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product

from batchfinder.probing.devices.allocator.recorded_step import ROUNDING_BYTES

# Two requests match if the larger has grown at most by the ratio of the batch sizes, plus
# ROUNDING_BYTES. After a mismatch, up to MOST_SKIPPED requests are skipped in each step, until
# ALIKE requests in a row match again.
MOST_SKIPPED = 40
ALIKE = 6
SKIPS = sorted(product(range(MOST_SKIPPED), range(MOST_SKIPPED)), key=sum)
LAST_SKIPS = [(skip, MOST_SKIPPED - 1) for skip in range(MOST_SKIPPED)]

# A growth is as usual within this share: tensors of all pairs may leave out those of an example
# with itself.
UNUSUAL = 0.05


def paired(small: Sequence[int], large: Sequence[int], ratio: float) -> list[int | None]:
    """Return the matching request of a small step for each one of a large step; None: no match.

    They are matched from the start, or from the end if more match there, and those left the other
    way. For the same global batch, a large step has fewer micro-batches than a small one: the first
    ones make the gradients, and requests of the optimizer follow the last ones.

    Tensors of all pairs of examples, as in a contrastive loss, grow with the square of the batch.
    So requests match by the square of the ratio if more then grow as usual: not at all, with the
    batch, or with its square. Almost any two match so if the ratio is large.

    Example:
        >>> paired([10_000, 8], [20_000, 50_000, 8], ratio=2)
        [10000, None, 8]
        >>> paired([10_000, 10_000, 70_000], [20_000, 70_000], ratio=2)
        [10000, 70000]
    """
    pairs = _paired_from_both_ends(small, large, ratio)
    if None not in pairs:
        return pairs
    squared = _paired_from_both_ends(small, large, ratio**2)

    def usual(each: Sequence[int | None]) -> int:
        grown = [(a, b) for a, b in zip(each, large, strict=True) if a is not None]
        return sum(any(abs(b - a * ratio**k) <= b * UNUSUAL for k in range(3)) for a, b in grown)

    return squared if usual(squared) > usual(pairs) else pairs


def grows_faster(small: int, large: int, ratio: float) -> bool:
    """Return True if a request has grown by more than the ratio of the batch sizes."""
    return large > ratio * small + ROUNDING_BYTES


def _grows_to(small: int, large: int, ratio: float) -> bool:
    return small - ROUNDING_BYTES <= large and not grows_faster(small, large, ratio)


def _paired_from_both_ends(
    small: Sequence[int], large: Sequence[int], ratio: float
) -> list[int | None]:
    pairs = _paired_from_start(small, large, ratio)
    if None not in pairs:
        return pairs
    others = _paired_from_start(small[::-1], large[::-1], ratio)[::-1]
    if others.count(None) < pairs.count(None):
        pairs, others = others, pairs
    return [other if pair is None else pair for pair, other in zip(pairs, others, strict=True)]


def _paired_from_start(
    small: Sequence[int], large: Sequence[int], ratio: float
) -> list[int | None]:
    def alike(i: int, j: int) -> bool:
        return i < len(small) and j < len(large) and _grows_to(small[i], large[j], ratio)

    @cache  # the same places are reached by other skips, from each request without a match
    def go_on(i: int, j: int) -> bool:
        length = min(ALIKE, len(small) - i, len(large) - j)
        return length > 0 and all(alike(i + k, j + k) for k in range(length))

    pairs: list[int | None] = []
    i, skips = 0, SKIPS
    while (j := len(pairs)) < len(large):
        if not alike(i, j) and i < len(small):
            skipped = next((skip for skip in skips if go_on(i + skip[0], j + skip[1])), (0, 0))
            # All skips were just tried without a match: for the next request, the last are new.
            skips = LAST_SKIPS if skipped == (0, 0) else SKIPS
            i += skipped[0]
            if skipped[1]:
                pairs += [None] * skipped[1]
                continue
        pairs.append(small[i] if alike(i, j) else None)
        if pairs[-1] is not None:
            i, skips = i + 1, SKIPS
    return pairs
