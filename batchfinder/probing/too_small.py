"""The decision whether a step needs more than one example, as BatchNorm may, or groups of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from batchfinder.errors import BatchTooSmallError
from batchfinder.results.accumulation import divisors

NEEDS_MORE_THAN_ONE = "Expected more than 1 value per channel when training"
"""PyTorch's error, in ``torch.nn.functional.batch_norm``, for a single value per channel."""


def needs_more_than_one_sample(error: BaseException, handled: BaseException | None = None) -> bool:
    """Return True if a normalization layer needs more than one example.

    The error that the user was handling when the step ran does not count.
    """
    from batchfinder.probing.devices.oom import chain  # late: it imports torch

    return any(
        isinstance(link, (ValueError, RuntimeError)) and NEEDS_MORE_THAN_ONE in str(link)
        for link in chain(error, handled)
    )


def too_small(batch_size: int) -> BatchTooSmallError:
    """Return the error for a step that needs more than ``batch_size`` examples."""
    examples = "example" if batch_size == 1 else "examples"
    return BatchTooSmallError(
        f"a layer of the model needs more than {batch_size} {examples} to train on. "
        f"Try batch sizes of {batch_size + 1} or more."
    )


@dataclass(frozen=True)
class SizesThatRun:
    """The batch sizes that the code of a step takes.

    Attributes:
        least: the smallest.
        failed: the sizes that failed.
        problem: the error that they failed with.
        multiple_of: all sizes are multiples of it.

    Example:
        >>> SizesThatRun(8, (1,), "IndexError").note
        'a batch of 1 fails (IndexError), one of 8 does not: only sizes from 8 on were tried'
    """

    least: int
    failed: tuple[int, ...]
    problem: str
    multiple_of: int = 1

    def __str__(self) -> str:
        if self.multiple_of > 1:
            return f"multiples of {self.multiple_of}"
        return f"sizes from {self.least} on"

    @property
    def note(self) -> str:
        """What to tell about a search for them."""
        return f"{self._why}: only {self} were tried"

    def error(self) -> BatchTooSmallError:
        """Return the error for a size that is none of them."""
        return BatchTooSmallError(f"{self._why}. Try {self}", self.least, self.multiple_of)

    @property
    def _why(self) -> str:
        failed = " and ".join(map(str, self.failed))
        fail = f"batches of {failed} fail" if len(self.failed) > 1 else f"a batch of {failed} fails"
        return f"{fail} ({self.problem}), one of {self.least} does not"


def sizes_that_run(
    size: int, problem: str, sample_size: int | None, runs: Callable[[int], bool]
) -> SizesThatRun | None:
    """Return the sizes that run where the first one raised; None if the size is not the reason.

    The code may squeeze a batch of 1. Or it takes examples in groups, as mixing images in pairs
    does. Whatever its error is, only other sizes can tell. The sample's own size should run.

    Args:
        size: the size that raised.
        problem: what it raised.
        sample_size: the batch size of the user's sample; None if there is no sample.
        runs: tells whether a batch of another size runs without an error of the code.
    """

    @cache
    def takes(other: int) -> bool:
        return other != size and runs(other)

    largest = max(2, sample_size or 2)
    if not takes(2) and not takes(largest):
        return None
    groups = (2, *divisors(largest, multiple_of=1, up_to=largest)[1:])
    least = next(group for group in groups if takes(group))
    uneven = 2 * least + 1  # of pairs, 3 examples may run: the third is broadcast to the others
    is_grouped = not takes(uneven)
    if size > 1 and not is_grouped:
        return None
    failed = sorted({size, uneven}) if is_grouped else [size]
    problem = problem.partition(" (raised while ")[0]
    return SizesThatRun(least, tuple(failed), problem, least if is_grouped else 1)
