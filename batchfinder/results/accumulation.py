"""Split a global batch into micro-batches, accumulation steps and ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from batchfinder.errors import UsageError


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
        steps = self.gradient_accumulation_steps
        return (
            f"{self.global_batch_size} = {self.batch_size} per device"
            f" x {steps} accumulation step{'s' if steps > 1 else ''}{ranks}"
        )


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
    """

    requested: int
    exact: Split | None
    below: Split | None
    above: Split | None
    fastest: Split | None = None

    @property
    def accumulates(self) -> bool:
        """True if any split needs more than one micro-batch per optimizer step."""
        splits = (self.exact, self.below, self.above)
        return any(split.gradient_accumulation_steps > 1 for split in splits if split)

    def __str__(self) -> str:
        nearest = ", or ".join(str(split) for split in (self.below, self.above) if split)
        if self.exact is None:
            return f"Global batch {self.requested} has no exact split; nearest: {nearest}"
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


def plan_accumulation(
    global_batch_size: int,
    max_batch_size: int,
    world_size: int = 1,
    rate_at: Callable[[int], float | None] = lambda _: None,
) -> AccumulationPlan:
    """Split a global batch into micro-batches of at most ``max_batch_size``.

    Args:
        global_batch_size: examples per optimizer step over all ranks.
        max_batch_size: the largest micro-batch that fits.
        world_size: data-parallel ranks.
        rate_at: samples per second at a micro-batch size; None where it is unknown.

    Returns:
        The exact split with the fewest accumulation steps, or the nearest ones.

    Raises:
        UsageError: a number is not positive.

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
    ):
        if value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")

    per_rank = global_batch_size // world_size
    fewest_steps = max(1, -(-per_rank // max_batch_size))
    exact = fastest = None
    if per_rank * world_size == global_batch_size:
        # Loop over batch sizes: there are far fewer of them than numbers of steps.
        largest = min(max_batch_size, per_rank)
        batch_size = next(n for n in range(largest, 0, -1) if per_rank % n == 0)
        steps = per_rank // batch_size
        exact = Split(batch_size, steps, world_size)
        rates = {n: rate_at(n) or 0.0 for n in range(1, largest + 1) if per_rank % n == 0}
        quick = max(rates, key=lambda n: (rates[n], n))
        fastest = Split(quick, per_rank // quick, world_size) if rates[quick] else None
        if steps <= 2 * fewest_steps:
            return AccumulationPlan(global_batch_size, exact, None, None, fastest)

    unit = fewest_steps * world_size
    lower = global_batch_size // unit
    below = Split(lower, fewest_steps, world_size) if lower else None
    if lower < max_batch_size:
        above = Split(lower + 1, fewest_steps, world_size)
    else:
        per_step = (fewest_steps + 1) * world_size
        above = Split(-(-global_batch_size // per_step), fewest_steps + 1, world_size)
    return AccumulationPlan(global_batch_size, exact, below, above, fastest)
