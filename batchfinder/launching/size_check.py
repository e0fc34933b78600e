"""Check that the steps of a script really had the batch size that it was given."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence

from batchfinder.search.remarks import WITHOUT_HOLES, may_leave_holes
from batchfinder.units import count

# Where no dimension is the batch size, as where examples are packed into one row, or go through the
# model in chunks, all inputs of a step together grow at least this share as fast as the batch size.
GROWS = 0.7


def lengths_warning(room: float, environment: Iterable[str]) -> str:
    """Return the warning that batches differ in length.

    Args:
        room: the share of the memory kept free for them; 0 on the CPU.
        environment: the names of variables that the script gets beside this process's.
    """
    kept = f", so a further {room:.0%} of the memory stays free for other orders of them"
    holes = f". New lengths leave holes in the heap. {WITHOUT_HOLES}"
    return (
        f"the batches of the script differ in length{kept if room else ''}. A batch longer than "
        "those of the steps that ran may still run out. Try a sampler that yields the longest "
        f"first{holes if not room and may_leave_holes(environment) else ''}"
    )


class Honored(enum.Enum):
    """The ways in which a script may use the batch size that it was given."""

    YES = "yes"
    IGNORED = "ignored"
    """Its inputs are the same at every size."""
    CAPPED = "capped"
    """Its inputs stop growing, because of the data set or a limit of the script."""
    DIVIDED = "divided"
    """Each rank gets its share of the batch size."""
    UNKNOWN = "unknown"


SOME_SIZES = (
    "if the script takes only some batch sizes, try --multiple-of N, or --global-batch-size N for "
    "those that divide N"
)


class SizesSeen:
    """Compare the inputs of launches at several batch sizes.

    Attributes:
        examples: examples in a step of the latest launch: the first dimension of its largest input.
            If that launch was capped, it may be fewer, as there may be several rows for each.

    Example:
        >>> seen = SizesSeen()
        >>> seen.note(4, [[4, 10]]), seen.note(64, [[50, 10]]), seen.examples
        (<Honored.YES: 'yes'>, <Honored.CAPPED: 'capped'>, 50)
    """

    def __init__(self) -> None:
        self._inputs: dict[int, frozenset[tuple[int, ...]]] = {}
        self._elements: dict[int, int] = {}
        self._firsts: dict[int, int] = {}
        self.examples = 0

    def note(
        self,
        batch_size: int,
        shapes: Iterable[Sequence[int]],
        ranks: int = 1,
        elements: int | None = None,
    ) -> Honored:
        """Compare the inputs at a batch size with those seen before.

        ``elements`` counts those of all inputs of a step. Default: those of the shapes.
        """
        inputs = frozenset(tuple(shape) for shape in shapes if shape)
        if not inputs:
            return Honored.UNKNOWN
        before = {size: seen for size, seen in self._inputs.items() if size != batch_size}
        self._inputs[batch_size] = inputs
        elements = self._elements[batch_size] = elements or sum(map(math.prod, inputs)) or 1
        largest = max(inputs, key=lambda shape: (math.prod(shape), shape))
        first = self.examples = self._firsts[batch_size] = largest[0]
        if first == batch_size or self._is_rounded(batch_size):
            return Honored.YES
        # If the first dimension was the size in another launch, no other dimension counts.
        firsts = {size for size, seen in before.items() if size in {shape[0] for shape in seen}}
        if firsts and 1 < first < batch_size:
            return Honored.CAPPED if min(firsts) < batch_size else Honored.UNKNOWN
        if self._is_rounded(batch_size, ranks):
            return Honored.DIVIDED
        same = {size for size in before if self._is_same(size, batch_size)}
        if not same and ranks > 1 and first * ranks == batch_size:
            return Honored.DIVIDED
        return self._by_growth(batch_size, before, same)

    def _is_same(self, size: int, other: int) -> bool:
        has_same = self._elements[size] == self._elements[other]
        return has_same and self._inputs[size] == self._inputs[other]

    def _by_growth(self, batch_size: int, before: Iterable[int], same: set[int]) -> Honored:
        """Return how a script whose examples cannot be counted used the size.

        ``before`` are the sizes of other launches, and ``same`` those with the same inputs.
        """
        first, elements = self._firsts[batch_size], self._elements[batch_size]
        dimensions = {length for shape in self._inputs[batch_size] for length in shape}
        # A data set has more than one example. The size may count tokens, and be less than a text.
        is_capped = first > 1
        smaller = max((size for size in before if size < batch_size), default=0)
        if same:
            # Most inputs have a dimension of one, so it says nothing.
            shows_a_size = bool(same & ({first} | dimensions - {1}))
            is_capped &= min(same) < batch_size and (shows_a_size or same != {*before})
        elif batch_size in dimensions:
            return Honored.YES
        elif not smaller:
            return Honored.UNKNOWN
        elif elements / self._elements[smaller] >= GROWS * batch_size / smaller:
            return Honored.YES
        if not is_capped:
            return Honored.IGNORED
        # There may be several rows for each example.
        like_the_least = min(before) * elements // self._elements[min(before)]
        self.examples = min(first, max(1, like_the_least), batch_size - 1)
        return Honored.CAPPED

    def _is_rounded(self, batch_size: int, ranks: int = 1) -> bool:
        """Return True if the examples of all ranks are the size, rounded down to a multiple.

        A script that pairs its examples drops one of an odd size. Another launch has to agree.
        """
        examples = {size: first * ranks for size, first in self._firsts.items()}
        mine = examples.pop(batch_size)
        return mine < batch_size and any(
            mine % unit == 0 and {first - size // unit * unit for size, first in others} == {0}
            for unit in range(batch_size - mine + 1, mine // 2 + 1)
            if (others := [(size, first) for size, first in examples.items() if size >= unit])
        )

    def again(self, batch_size: int, ranks: int = 1) -> Honored:
        """Compare the inputs at a batch size that was noted with those of all other launches."""
        inputs = self._inputs.get(batch_size, ())
        return self.note(batch_size, inputs, ranks, self._elements.get(batch_size))


def remark_on(
    seen: Honored, batch_size: int, examples: int, ranks: int, multiple_of: int = 1
) -> str:
    """Return the remark for the user on a launch whose steps had these examples, or "".

    Every size of the search is a multiple of ``multiple_of``.
    """
    if seen is Honored.IGNORED:
        return (
            f"the script ignores the batch size: its steps had {count(examples, 'example')} at "
            "every size. Try another place for {batch_size}"
            + (", or --min-batch-size 4096 if it counts tokens" if examples == 1 else "")
        )
    if seen is Honored.DIVIDED:
        advice = f". Try --multiple-of {ranks}" if multiple_of % ranks else ""
        return (
            f"the script divides the batch size by its {ranks} ranks: each had "
            f"{count(examples, 'example')} at {batch_size}{advice}"
        )
    if seen is Honored.UNKNOWN and batch_size > 1:
        return (
            f"the hook could not see how many examples a step had at batch size {batch_size}; "
            "check that the script uses {batch_size}"
        )
    if seen is Honored.CAPPED:
        return (
            f"at batch size {batch_size} a step has at most {count(examples, 'example')}: the data "
            "set, or a limit of the script, has no more"
        )
    return ""


def lengths_in(shapes: Iterable[Sequence[int]]) -> set[tuple[int, ...]]:
    """Return the shapes without their first dimension, which is the number of examples.

    Example:
        >>> lengths_in([(8, 512), (8, 512, 3)]) == {(512,), (512, 3)}
        True
    """
    return {tuple(shape[1:]) for shape in shapes}
