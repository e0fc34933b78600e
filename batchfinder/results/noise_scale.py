"""The gradient noise scale: the batch size beyond which more examples stop helping.

Plain arithmetic on squared gradient norms, by McCandlish et al. 2018, arXiv:1812.06162, appendix A.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from batchfinder.results.record import Plain

# The interval is this many standard errors wide on each side: 95 % of draws, if they are normal.
STANDARD_ERRORS = 2.0


@dataclass(frozen=True)
class NoiseScale(Plain):
    """The simple noise scale ``trace(covariance of the gradient) / |gradient|^2``, in examples.

    Attributes:
        examples: the estimate; infinite if the gradient cannot be told from its noise.
        low: the lower end of the interval of two standard errors over the draws.
        high: its upper end; infinite if the draws do not bound it.
        small_batch_size: examples in each small batch.
        large_batch_size: examples in each large batch, which is several small ones.
        draws: the number of large batches.
    """

    examples: float
    low: float
    high: float
    small_batch_size: int
    large_batch_size: int
    draws: int


def noise_scale_of(
    small: Sequence[float],
    large: Sequence[float],
    small_batch_size: int,
    large_batch_size: int,
    examples: float = math.inf,
) -> NoiseScale:
    """Estimate the noise scale from squared norms of gradients at two batch sizes.

    Args:
        small: for each draw, the mean squared norm at the small batch size. At least two draws.
        large: for each draw, the squared norm at the large batch size.
        small_batch_size: examples in a small batch.
        large_batch_size: examples in a large batch.
        examples: examples in the data set. A batch drawn from few has less noise, down to none.

    Example:
        >>> round(noise_scale_of([9.0, 11.0], [2.0, 2.0], 1, 9).examples, 3)
        9.0
    """
    pairs = [*zip(small, large, strict=True)]
    # The variance of the mean of n of N examples, drawn without replacement, per variance of one.
    of_small, of_large = (
        (1 / n - 1 / examples) / (1 - 1 / examples) for n in (small_batch_size, large_batch_size)
    )

    def inverse(chosen: Sequence[tuple[float, float]]) -> float:
        """Return 1 / noise scale. Unlike the scale, it stays finite if the gradient vanishes."""
        at_small, at_large = (statistics.fmean(norms) for norms in zip(*chosen, strict=True))
        noise = (at_small - at_large) / (of_small - of_large)
        gradient = at_large - noise * of_large
        return gradient / noise if noise > 0 else math.inf

    value = inverse(pairs)
    without = [inverse(pairs[:i] + pairs[i + 1 :]) for i in range(len(pairs))]  # the jackknife
    error = 0.0
    if all(map(math.isfinite, without)):
        error = math.sqrt((len(pairs) - 1) * statistics.pvariance(without))
    ends = [value + STANDARD_ERRORS * error, value - STANDARD_ERRORS * error]
    low, high = (1 / end if end > 0 else math.inf for end in ends)
    examples = 1 / value if value > 0 else math.inf
    return NoiseScale(examples, low, high, small_batch_size, large_batch_size, len(pairs))
