"""Split a global batch into micro-batches, accumulation steps and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from batchfinder.errors import UsageError
from batchfinder.units import count, positive


@dataclass(frozen=True)
class Split:
    """One way to make an optimizer step out of micro-batches.

    Attributes:
        batch_size: examples per device per forward/backward pass (the micro-batch size).
        gradient_accumulation_steps: micro-batches per optimizer step.
        world_size: data-parallel ranks.
    """

    batch_size: int
    gradient_accumulation_steps: int
    world_size: int

    @property
    def global_batch_size(self) -> int:
        """Examples per optimizer step over all ranks."""
        return self.batch_size * self.gradient_accumulation_steps * self.world_size

    def __str__(self) -> str:
        ranks = f" x {self.world_size} ranks" if self.world_size > 1 else ""
        steps = count(self.gradient_accumulation_steps, "accumulation step")
        return f"{self.global_batch_size} = {self.batch_size} per device x {steps}{ranks}"


@dataclass(frozen=True)
class AccumulationPlan:
    """Ways to reach a global batch size.

    ``below`` and ``above`` are set if there is no exact split, or if the exact one needs more than
    twice as many steps as the largest batch size allows.

    Attributes:
        requested: the requested global batch size.
        exact: the exact split with the fewest steps; None if there is none.
        below: the nearest smaller split with the fewest possible steps; None if not needed.
        above: the nearest larger split with the fewest possible steps; None if not needed.
        fastest: the exact split that trains fastest; None if no rates are known.
        min_batch_size: the smallest micro-batch allowed.
        multiple_of: each micro-batch is a multiple of it.
    """

    requested: int
    exact: Split | None
    below: Split | None
    above: Split | None
    fastest: Split | None = None
    min_batch_size: int = 1
    multiple_of: int = 1

    @property
    def accumulates(self) -> bool:
        """True if any split needs more than one micro-batch per optimizer step."""
        splits = (self.exact, self.below, self.above)
        return any(split.gradient_accumulation_steps > 1 for split in splits if split)

    def __str__(self) -> str:
        nearest = ", or ".join(str(split) for split in (self.below, self.above) if split)
        if self.exact is None:
            rules = [f"multiples of {self.multiple_of}"] if self.multiple_of > 1 else []
            rules += [f"at least {self.min_batch_size}"] if self.min_batch_size > 1 else []
            into = f" into {' and '.join(rules)} per device" if rules else ""
            problem = f"Global batch {self.requested} has no exact split{into}"
            return f"{problem}; nearest with few steps: {nearest}"
        text = f"Global batch {self.exact}"
        text = f"{text} (far fewer steps: {nearest})" if nearest else text
        if self.fastest is None or self.fastest == self.exact:
            return text
        return f"{text}; fastest: {self.fastest}"

    @property
    def nearest(self) -> Split | None:
        """The nearer one of ``below`` and ``above``; None if neither is needed."""
        splits = [split for split in (self.below, self.above) if split]
        return min(splits, key=lambda s: abs(s.global_batch_size - self.requested), default=None)

    @property
    def best(self) -> Split | None:
        """The split to use: the fastest, else the exact one, else the nearest."""
        return self.fastest or self.exact or self.nearest


def plan_from(data: Mapping[str, Any]) -> AccumulationPlan:
    """Return the plan of a JSON object."""
    splits = {key: Split(**value) for key, value in data.items() if isinstance(value, Mapping)}
    return AccumulationPlan(**{**data, **splits})


def plan_accumulation(
    global_batch_size: int,
    max_batch_size: int,
    world_size: int = 1,
    rate_at: Callable[[int], float | None] = lambda _: None,
    *,
    min_batch_size: int = 1,
    multiple_of: int = 1,
) -> AccumulationPlan:
    """Split a global batch into micro-batches of at most ``max_batch_size``.

    Raises:
        UsageError: a number is not positive, or no micro-batch is allowed.

    Example:
        >>> print(plan_accumulation(4096, max_batch_size=1041))
        Global batch 4096 = 1024 per device x 4 accumulation steps
        >>> print(plan_accumulation(100, max_batch_size=64, world_size=8).below)
        96 = 12 per device x 1 accumulation step x 8 ranks
    """
    for name, value in (
        ("the global batch size", global_batch_size),
        ("the batch size found", max_batch_size),
        ("the world size", world_size),
        ("the minimum batch size", min_batch_size),
        ("multiple_of", multiple_of),
    ):
        positive(name, value)
    least = -(-min_batch_size // multiple_of) * multiple_of
    most = max_batch_size // multiple_of * multiple_of
    if most < least:
        raise UsageError(
            f"no micro-batch of at most {max_batch_size} is a multiple of {multiple_of} and at "
            f"least {min_batch_size}. Try smaller numbers"
        )
    plan = partial(
        AccumulationPlan,
        global_batch_size,
        min_batch_size=min_batch_size,
        multiple_of=multiple_of,
    )
    per_rank = global_batch_size // world_size
    steps = max(1, -(-per_rank // most))
    exact = fastest = None
    if per_rank * world_size == global_batch_size:
        sizes = divisors(per_rank, multiple_of, up_to=most)
        rates = {n: rate_at(n) or 0.0 for n in sizes if n >= least}
        if rates:
            largest, quick = max(rates), max(rates, key=lambda n: (rates[n], n))
            exact = Split(largest, per_rank // largest, world_size)
            fastest = Split(quick, per_rank // quick, world_size) if rates[quick] else None
            if exact.gradient_accumulation_steps <= 2 * steps:
                return plan(exact, None, None, fastest)

    def at_least(steps: int) -> Split:
        size = -(-global_batch_size // (steps * world_size * multiple_of)) * multiple_of
        return Split(max(size, least), steps, world_size)

    lower = global_batch_size // (steps * world_size * multiple_of) * multiple_of
    below = Split(lower, steps, world_size) if lower >= least else None
    if below is None and steps > 1:
        below = Split(most, steps - 1, world_size)
    above = at_least(steps if lower < most else steps + 1)
    return plan(exact, below, above, fastest)


@lru_cache
def divisors(number: int, multiple_of: int, up_to: int) -> tuple[int, ...]:
    """Return the divisors up to a limit that are multiples of another number, the smallest first.

    Example:
        >>> divisors(96, multiple_of=8, up_to=50)
        (8, 16, 24, 32, 48)
    """
    smaller = range(1, min(math.isqrt(number), up_to) + 1)
    small = [size for size in smaller if number % size == 0]
    both = {*small, *(number // size for size in small)}
    return tuple(sorted(size for size in both if size <= up_to and size % multiple_of == 0))
