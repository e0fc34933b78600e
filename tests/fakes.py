"""Probers without a device, for tests of the search, the API and the command line."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

from batchfinder.memory_model import Phase
from batchfinder.result import Outcome, Probe


@dataclass
class FakeProber:
    """A device on paper: ``peak(b) = fixed + per_sample * b``, against a budget.

    Every answer depends only on the size, on whether it is a confirmation, and on ``seed``.

    Attributes:
        budget_bytes: what a step may use.
        bytes_per_sample: what each example adds to the peak of the forward/backward pass.
        fixed_bytes: what that pass needs whatever the batch size is.
        optimizer_bytes: the peak of the optimizer step.
        curve: the peak of the forward/backward pass at a size, in place of the line.
        fragmentation: share of the budget that is lost without showing in any reading.
        reserved_extra: what the allocator holds beyond its tensors, as a share of these.
        thrashing: share of the budget next to its end where steps flush the allocator's cache,
        thrashing_odds: and how likely each size there does.
        noise: standard deviation of the peaks, as a share of them.
        confirm_extra: what a confirmation needs beyond a probe, as a share of the peak.
        faults: sizes that end otherwise than by their memory: an outcome, or an exception to raise.
        chance_failures: sizes whose probe runs out of memory though their confirmation does not.
        confirm_steps: steps of a confirmation that fits.
        device, capacity_bytes, used_by_others_bytes, is_repeatable, versions, warnings: see
            ``Prober``.
        is_closed: whether ``close`` was called.
        sizes: the sizes run so far, in order.
        confirmed: those of them that were confirmations.
    """

    budget_bytes: int = 1000
    bytes_per_sample: float = 10
    fixed_bytes: float = 100
    optimizer_bytes: float = 0
    curve: Callable[[int], float] | None = None
    fragmentation: float = 0
    reserved_extra: float = 0
    thrashing: float = 0
    thrashing_odds: float = 1
    noise: float = 0
    confirm_extra: float = 0
    faults: Mapping[int, Outcome | BaseException] = field(default_factory=dict)
    chance_failures: Set[int] = frozenset()
    confirm_steps: int = 3
    seed: int = 0
    device: str = "fake:0 Paper"
    capacity_bytes: int | None = None
    used_by_others_bytes: int | None = None
    is_repeatable: bool = True
    versions: Mapping[str, str] = field(default_factory=lambda: {"batchfinder": "0"})
    warnings: tuple[str, ...] = ()
    is_closed: bool = False
    sizes: list[int] = field(default_factory=list)
    confirmed: list[int] = field(default_factory=list)

    def peaks(self, batch_size: int, confirm: bool) -> dict[Phase, int]:
        """The peak of each phase, in bytes."""
        line = self.fixed_bytes + self.bytes_per_sample * batch_size
        peak = self.curve(batch_size) if self.curve else line
        noise = random.Random(f"{self.seed} {batch_size} {confirm}").gauss(0, self.noise)
        factor = (1 + noise) * (1 + self.confirm_extra * confirm)
        return {
            Phase.FORWARD_BACKWARD: round(peak * factor),
            Phase.OPTIMIZER_STEP: round(self.optimizer_bytes * factor),
        }

    def fits(self, batch_size: int, confirm: bool = False) -> bool:
        """Whether a size has the memory it needs."""
        needed = max(self.peaks(batch_size, confirm).values())
        return needed <= self.budget_bytes * (1 - self.fragmentation)

    def thrashes(self, batch_size: int) -> bool:
        """Whether a size that has the memory it needs runs only by flushing the cache."""
        peak = max(self.peaks(batch_size, confirm=False).values(), default=0)
        chance = random.Random(f"thrashing {self.seed} {batch_size}")
        is_near = peak > self.budget_bytes * (1 - self.fragmentation - self.thrashing)
        return self.thrashing > 0 and is_near and chance.random() < self.thrashing_odds

    def probe(self, batch_size: int, *, confirm: bool = False) -> Probe:
        """Say how a size ends."""
        self.sizes.append(batch_size)
        if confirm:
            self.confirmed.append(batch_size)
        outcome = Outcome.FITS if self.fits(batch_size, confirm) else Outcome.OOM
        if batch_size in self.chance_failures and not confirm:
            outcome = Outcome.OOM
        fault = self.faults.get(batch_size, outcome)
        if isinstance(fault, BaseException):
            raise fault
        does_fit = fault is Outcome.FITS
        does_thrash = does_fit and self.thrashes(batch_size)
        steps = self._steps(batch_size, confirm, does_fit)
        peaks = self.peaks(batch_size, confirm) if does_fit else {}
        highest = max(peaks.values(), default=None)
        reserved = highest and min(round(highest * (1 + self.reserved_extra)), self.budget_bytes)
        return Probe(
            batch_size,
            Outcome.OOM if does_thrash else fault,
            steps=steps,
            samples=batch_size * steps,
            seconds=0.25 * steps,
            step_seconds=0.25 if does_fit else None,
            peak_allocated_bytes=highest,
            peak_reserved_bytes=reserved,
            phase_peak_bytes=peaks,
            allocation_retries=int(does_thrash),
            confirmed=confirm,
            note="" if does_fit else f"{fault.value} on paper",
        )

    def close(self) -> None:
        """Remember that it was called."""
        self.is_closed = True

    def _steps(self, batch_size: int, confirm: bool, does_fit: bool) -> int:
        if confirm and does_fit:
            return self.confirm_steps
        # What fits for a single step fails only once the memory has grown over several.
        has_grown = confirm and batch_size not in self.faults and self.fits(batch_size)
        return self.confirm_steps if has_grown else 1


@dataclass
class AdversarialProber(FakeProber):
    """Ends each probe by chance, with readings by chance, or none at all.

    Attributes:
        fit_share: share of the sizes that fit, from 0 to 1.
        has_readings: whether fits come with peaks.
    """

    fit_share: float = 0.5
    has_readings: bool = True

    def peaks(self, batch_size: int, confirm: bool) -> dict[Phase, int]:
        """Anything up to twice the budget, for some of the phases."""
        if not self.has_readings:
            return {}
        chance = random.Random(f"peaks {self.seed} {batch_size} {confirm}")
        return {
            phase: chance.randint(0, 2 * self.budget_bytes)
            for phase in Phase
            if chance.random() < 0.8
        }

    def fits(self, batch_size: int, confirm: bool = False) -> bool:
        """Whatever the dice say."""
        chance = random.Random(f"fits {self.seed} {batch_size} {confirm}")
        return chance.random() < self.fit_share
