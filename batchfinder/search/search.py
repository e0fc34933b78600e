"""The search: probe after probe until the answer is known.

Two small sizes, and one at three quarters of what they predict, show where memory runs out. From
then on a belief says where the answer is (:mod:`~batchfinder.search.belief`). A plan says what to
try next, and whether to confirm it at once (:mod:`~batchfinder.search.plan`). The search keeps a
bracket: ``low``, the largest size that is proved, and ``high``, the smallest that failed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from batchfinder.results.probe import Probe
from batchfinder.results.result import Status
from batchfinder.search.belief import believe, end_from_zero, lines_of
from batchfinder.search.bounds import ALL_SIZES, Bounds
from batchfinder.search.bracket import Bracket
from batchfinder.search.deadline import Deadline
from batchfinder.search.guessing import Guessing
from batchfinder.search.head_start import Guess, MakeGuess
from batchfinder.search.plan import (
    BLIND_GROWTH,
    MEASURED_GROWTH,
    SECOND_GROWTH,
    SURE_GROWTH,
    Move,
    Prices,
    candidates,
    move_to,
    plan,
)

RunProbe: TypeAlias = Callable[[int, bool], Probe]
"""``run(batch_size, confirm) -> Probe``: all that the search knows about running a size."""

# Until a size above CLOSE times the predicted answer has run, a reading at APPROACH times pays for
# itself. Small sizes are trusted to the share NOISE of the budget, because allocators round.
CLOSE, APPROACH, NOISE = 0.5, 0.75, 1 / 1000

# Steps of a confirmation, on a device whose verdicts repeat and on others (probing/steadiness.py).
REPEATABLE_STEPS, UNREPEATABLE_STEPS = 3, 6

# The probes that a search may use beyond those that bisection needs, and, without a maximum, growth
# by BLIND_GROWTH up to a failure. Once they are used up, it only bisects and grows.
SPARE_PROBES = 8

OVERSHOOT = 1.05  # times the predicted answer: a size that should fail


@dataclass(frozen=True)
class Finding:
    """The outcome of a search.

    Attributes:
        status: how the search ended.
        answer: the confirmation at the answer. If the search was stopped early, the largest size
            that ran. None if nothing fits.
        failure: the smallest size that failed; None if none did.
    """

    status: Status
    answer: Probe | None
    failure: Probe | None


def search(
    run: RunProbe,
    *,
    budget_bytes: int | Callable[[], int],
    bounds: Bounds = ALL_SIZES,
    is_repeatable: bool = True,
    guess: MakeGuess | None = None,
    replays: bool = False,
    prices: Prices | None = None,
    confirmed: Sequence[Probe] = (),
    deadline: Deadline | None = None,
) -> Finding:
    """Find the largest batch size that fits.

    Args:
        run: runs one size and returns its probe.
        budget_bytes: memory that a step may use; a function if probes may lower it. It guides the
            belief.
        bounds: the sizes that may be tried.
        is_repeatable: True if a size that ran one step will run many, in any process. If not, the
            differences between readings decide how wide the final bracket is.
        guess: guesses the answer when two sizes have run. The guess is confirmed next.
        replays: True to confirm these two sizes, so that the guess can use their recordings.
        prices: the costs of moves. Default: a confirmation costs 3 steps, or 6 if not repeatable.
        confirmed: confirmations that ran before.
        deadline: ends the search in time, with the largest size confirmed by then; None if there
            is none.

    Returns:
        The confirmed answer, and the failure of the next size, unless the answer is the last size
        allowed. The failure may be farther above: 1/100 of its size if the allocator is fragmented
        or a confirmation refuted a probe, 1/40 if steps or the lengths of batches differ, up to
        1/20 if readings differ from run to run.

        Nothing fits only if the smallest size failed in a confirmation, and in a probe unless that
        one ran, because the failure of one process may be chance. No size is probed twice or
        confirmed twice, and none is outside the bounds.

        If two sizes fail for another reason than memory, or one just above the answer, the next
        power of two is tried, as code may take only some sizes. If it runs, only powers of two are
        tried from then on, and the failure is at one of them.

        With ``n`` sizes allowed there are at most ``log2(n) + 8`` probes, and six more without a
        maximum. If a confirmation refutes a probe, the search starts over below it, with
        confirmations only, under the same limit.

    Raises:
        Exception: whatever ``run`` raises.

    Example:
        >>> from batchfinder.results.result import Outcome
        >>> def run(batch_size, confirm):
        ...     fits = Outcome.FITS if batch_size <= 37 else Outcome.OOM
        ...     return Probe(batch_size, fits, steps=1, seconds=0.0)
        >>> search(run, budget_bytes=1000).answer.batch_size
        37
    """
    prices = prices or Prices(REPEATABLE_STEPS if is_repeatable else UNREPEATABLE_STEPS)
    budget = budget_bytes if callable(budget_bytes) else lambda: budget_bytes
    known = Bracket(
        bounds,
        round(budget() * (1 - prices.room)),
        is_repeatable=is_repeatable,
        coarseness=prices.resolution,
        probes_prove=prices.probes_prove,
    )
    guessing = Guessing(guess, prices, replays=replays)
    for probe in confirmed:
        known.record(probe, True)
    while (power := _power_of_two(known)) or not known.is_closed:
        move = power or guessing.move(known, _opening(known, prices))
        move = move or _planned(known, prices, guessing.estimate)
        if deadline is not None:
            move = deadline.move(known, move)
        if move is None:
            answer = known.confirmed.get(known.low_confirmed)
            return Finding(Status.TIME_LIMIT, answer, known.failure)
        probe = run(*move)
        known.budget_bytes = round(budget() * (1 - prices.room))
        known.record(probe, move.confirm or probe.confirmed)  # a launch always confirms
    confirmation = known.confirmed.get(known.low)
    if confirmation is None:
        return Finding(Status.NOTHING_FITS, None, known.failure)
    return Finding(Status.FOUND if known.failure else Status.CAPPED, confirmation, known.failure)


def _power_of_two(known: Bracket) -> Move | None:
    """Return a confirmation above failures for another reason than memory, which may be holes."""
    size = known.power_of_two
    return Move(size, True) if size and size < lines_of(known)[0].end else None


def _opening(known: Bracket, prices: Prices) -> Move | None:
    """Return the next move if there is nothing to weigh, else None."""
    bounds = known.bounds
    if not known.ran or known.high == bounds.first:
        return Move(bounds.first, known.high == bounds.first or bounds.first == bounds.last)
    if known.is_tight:
        return Move(known.low, True)
    if known.failure and known.failure.most_examples is not None:
        return Move(bounds.before(known.high), True)  # all the examples that there are
    if len(known.readings) == 1 and known.failure is None:
        # Some memory is not filled by examples, so twice this size likely fits, and is still cheap.
        growth = 2 * end_from_zero(known) / known.ran
        least = BLIND_GROWTH if _may_leap(known, prices) else 2
        return move_to(known, known.ran * min(max(growth, least), SECOND_GROWTH))
    spare = _spare_probes(known)
    if spare == 0 and known.failure is None:
        # What is left of the search would cost far more than one size that should fail.
        end = lines_of(known)[0].end
        return move_to(known, OVERSHOOT * max(end, known.ran)) if math.isfinite(end) else None
    if spare < 0 and known.failure is None and bounds.is_open:
        return move_to(known, known.ran * BLIND_GROWTH)
    return move_to(known, (known.low + known.high) / 2) if spare < 0 else None


def _planned(known: Bracket, prices: Prices, estimate: Guess | None) -> Move:
    """Return the next move, by belief and plan."""
    ran, (end, error) = known.ran, lines_of(known)[0]
    growth = BLIND_GROWTH if math.isinf(end) else MEASURED_GROWTH
    sure_growth = BLIND_GROWTH if _may_leap(known, prices) else SURE_GROWTH
    if known.failure is None and math.isinf(end) and ran > (estimate.size if estimate else 0):
        return move_to(known, growth * ran)  # nothing tells where memory ends
    if known.failure is None and estimate is None:
        if ran < CLOSE * min(end, known.high):
            cautious = lines_of(known, max(NOISE, known.spread) * known.budget_bytes)[0].end
            sure = max(sure_growth * ran, end - 2 * error)
            size = min(APPROACH * end, cautious, sure, growth * ran)
            if size <= known.bounds.last:
                return move_to(known, size)
        else:
            growth = sure_growth  # the line may end too late, but hardly ever by more
    belief = believe(known, estimate)
    after, reach = known.bounds.after, known.bounds.at_most(growth * ran)
    sizes = candidates(belief, known, min(known.high, max(after(after(known.low)), reach)))
    if len(sizes) > 2:
        return plan(belief, known, sizes, prices)
    return move_to(known, (known.low + known.high) / 2)


def _may_leap(known: Bracket, prices: Prices) -> bool:
    """Return True if sizes may grow by BLIND_GROWTH, whatever the readings of smaller ones say.

    A launch that runs out of memory ends before one that fits, so it costs no more. Where readings
    differ from run to run, those of small sizes hardly show where memory ends, and smaller growth
    takes launch after launch (tests/search/test_costs.py).
    """
    return prices.launch > 0 and not known.is_repeatable


def _spare_probes(known: Bracket) -> int:
    """Return how many probes may be wasted before bisection has to start; below 0 if none may.

    Without a maximum, BLIND_GROWTH has to find an upper bound first.
    """
    bounds = known.bounds

    def halvings(low: int, high: int, width: int) -> int:
        return math.ceil(math.log2(max(1, (high - low) // width)))

    def growths(low: int) -> int:
        return math.ceil(math.log(bounds.last / low, BLIND_GROWTH)) if bounds.is_open else 0

    end = bounds.after(bounds.last)
    allowed = halvings(bounds.first, end, bounds.multiple_of) + growths(bounds.first) + SPARE_PROBES
    if known.failure is None and bounds.is_open:
        low, high = end // BLIND_GROWTH, end
        left = growths(known.ran)
    else:
        low, high, left = known.low, known.high, 0
    left += halvings(low, high, known.resolution_at(low))  # the answer may be just above low
    return allowed - known.probes - left - 2  # the next one, and the confirmation
