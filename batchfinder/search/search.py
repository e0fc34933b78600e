"""The search: probe after probe until the answer is known.

Pure integers, guided by the memory model, safe without it. What is known is a bracket: ``low``, the
largest size that fits, and ``high``, the smallest that does not.

A size whose success would end the search is confirmed at once instead of being probed first: the
confirmation costs several full steps, and so runs only where the answer is expected.

Where the same size needs more or less memory from run to run, as on a CPU, neighbouring sizes
cannot be told apart: the search then ends with a bracket of 5 %, and near the limit every size is
confirmed at once. Sizes that run only by flushing the allocator's cache in every step are not
neatly apart from those that run without either: against those the bracket is drawn to 1 % only, as
it is where a confirmation fails at what a probe has run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from batchfinder.results.result import Probe, Status
from batchfinder.search.bounds import check_bounds
from batchfinder.search.bracket import Bracket
from batchfinder.search.chooser import Chooser, MakeGuess
from batchfinder.search.pace import REPEATABLE, UNREPEATABLE

RunProbe: TypeAlias = Callable[[int, bool], Probe]
"""``run(batch_size, confirm) -> Probe``: what the search does not want to know more of."""


@dataclass(frozen=True)
class Finding:
    """What a search found.

    Attributes:
        status: how it ended.
        answer: the confirmation at the answer; of a search that was stopped early, the largest
            that ran; None if nothing fits.
        failure: the smallest size that failed; None if none was tried.
    """

    status: Status
    answer: Probe | None
    failure: Probe | None


def search(
    run: RunProbe,
    *,
    budget_bytes: int,
    smallest: int = 1,
    largest: int | None = None,
    multiple_of: int = 1,
    is_repeatable: bool = True,
    guess: MakeGuess | None = None,
) -> Finding:
    """Find the largest batch size that fits.

    Args:
        run: runs one size and says how it ended.
        budget_bytes: what a step may use; guides the model.
        smallest: the smallest size allowed.
        largest: the largest size allowed; None: 16 million.
        multiple_of: every size tried is a multiple of it.
        is_repeatable: whether a size that ran one step will run many, in any process. If not,
            only confirmations count near the limit.
        guess: asked once where the answer may be, when two sizes have run; confirmed next.

    Returns:
        The confirmed answer, and the failure one unit above it unless the answer is the last size
        allowed. Where verdicts do not repeat the answer may be 1/20 of the failure below that, and
        1/100 of it where the allocator is fragmented or a confirmation refuted a probe.

        Nothing fits only where the smallest size failed when confirmed, and when probed unless it
        had run then, since the failure of one process may be chance. No size was probed twice or
        confirmed twice; none lay outside the bounds.

        With ``n`` sizes allowed there were at most ``log2(n) + 4`` probes where readings say
        nothing, and ``log2(n) + 8`` whatever they say; a few more where no maximum was given,
        since sizes then grow from those that ran. Where a confirmation refutes a probe, the search
        starts over below it, with confirmations only, under the same limit.

    Raises:
        UsageError: the bounds leave no size to try.
        Exception: whatever ``run`` raises.

    Example:
        >>> from batchfinder.results.result import Outcome
        >>> def run(batch_size, confirm):
        ...     fits = Outcome.FITS if batch_size <= 37 else Outcome.OOM
        ...     return Probe(batch_size, fits, steps=1, seconds=0.0)
        >>> search(run, budget_bytes=1000).answer.batch_size
        37
    """
    first, last = check_bounds(smallest, largest, multiple_of)
    pace = REPEATABLE if is_repeatable else UNREPEATABLE
    bracket = Bracket(
        first,
        last,
        multiple_of,
        budget_bytes,
        resolution=pace.resolution,
        is_repeatable=is_repeatable,
    )
    chooser = Chooser(bracket, pace, guess=guess, is_open=largest is None)
    while not bracket.is_closed:
        batch_size = chooser.next_size()
        confirm = bracket.would_end_with(batch_size) or chooser.expects_the_answer
        bracket.record(run(batch_size, confirm), confirm)
    return _finding(bracket)


def _finding(known: Bracket) -> Finding:
    confirmation = known.confirmed.get(known.low)
    if confirmation is None:
        return Finding(Status.NOTHING_FITS, None, known.failure)
    return Finding(Status.FOUND if known.failure else Status.CAPPED, confirmation, known.failure)
