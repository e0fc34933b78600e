"""Run one search with any prober, from its first probe to its result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from batchfinder.errors import BatchTooSmallError, TimeLimitError, WorkerError
from batchfinder.results.probe import Outcome, Probe
from batchfinder.results.remembered import Remembered
from batchfinder.results.result import BatchSizeResult, Status
from batchfinder.results.throughput import Throughput
from batchfinder.search.bounds import ALL_SIZES, Bounds
from batchfinder.search.bracket import holes
from batchfinder.search.conclusion import conclude, memory_model_of
from batchfinder.search.deadline import Deadline
from batchfinder.search.head_start import HeadStart
from batchfinder.search.plan import Prices
from batchfinder.search.prober import Prober
from batchfinder.search.remarks import notes_about, warnings_about, warnings_of_holes
from batchfinder.search.search import Finding, RunProbe, search
from batchfinder.search.timed_sizes import measure_throughput

OnProbe = Callable[[Probe], None]
OnProbing = Callable[[int, bool], None]


def run_search(
    prober: Prober,
    bounds: Bounds = ALL_SIZES,
    *,
    on_probing: OnProbing | None = None,
    on_probe: OnProbe | None = None,
    head_start: HeadStart | None = None,
    prices: Prices | None = None,
    deadline: Deadline | None = None,
    remembered: Remembered | None = None,
    measures_throughput: bool = False,
) -> BatchSizeResult:
    """Search with any prober and return the result.

    Args:
        prober: tries the sizes.
        bounds: the sizes that may be tried.
        on_probing: called with the size, and whether it is a confirmation, as each probe begins.
        on_probe: called with each probe as it ends.
        head_start: the estimate to start from; None to start without one.
        prices: the costs of moves; None for those of a search without launches.
        deadline: ends the search in time; None without a limit.
        remembered: an earlier answer, confirmed first. If the confirmation proves it, it is the
            answer again. None if there is none.
        measures_throughput: True to also time steps at smaller sizes once the answer is known.

    Returns:
        The result.

    Raises:
        TimeLimitError: no size was confirmed in time.
        WorkerError: not even the smallest size runs, for another reason than memory.
        Exception: whatever the prober raises.
    """
    started = time.monotonic()
    head_start = head_start or HeadStart()
    spent_before = sum(prober.seconds_by_part.values())
    probes: list[Probe] = []

    def run(batch_size: int, confirm: bool) -> Probe:
        if on_probing:
            on_probing(batch_size, confirm)
        began = time.monotonic()
        probe = head_start.foreseen(batch_size) if confirm else None
        probe = probe or head_start.judged(prober.probe(batch_size, confirm=confirm))
        if deadline is not None:
            deadline.note(probe, time.monotonic() - began)
        probes.append(probe)
        if on_probe:
            on_probe(probe)
        return probe

    finding, seen = _confirmed_again(remembered, run, prober, replays=head_start.replays)
    tried = len(probes)
    proved = remembered if finding else None
    notes = [remembered.note_of_failure(probes[0])] if remembered and not proved else []

    def search_within(bounds: Bounds) -> Finding:
        return search(
            run,
            budget_bytes=lambda: prober.budget_bytes,
            bounds=bounds,
            is_repeatable=prober.is_repeatable,
            guess=head_start.of(prober, bounds),
            replays=head_start.replays,
            prices=prices,
            confirmed=seen,
            deadline=deadline,
        )

    try:
        finding = finding or search_within(bounds)
    except BatchTooSmallError as error:
        larger = bounds.without_first(error.least, error.multiple_of)
        if len(probes) > tried or larger is None:
            raise
        bounds = larger
    if finding is None:  # not above, where later errors would be chained to that one
        finding = search_within(bounds)
    _check(finding, deadline)
    passed_over = holes(proved.probes if proved else probes)
    bounds = (passed_over and bounds.powers_of_two()) or bounds
    expanded = head_start.expand if prober.may_expand else None
    of_the_finding = warnings_about(finding, probes, prober, bounds, expanded=expanded)
    warnings = [
        *head_start.notes,
        *prober.warnings,
        *of_the_finding,
        *warnings_of_holes(passed_over),
    ]
    throughput, timing_seconds = None, 0.0
    if measures_throughput and finding.status in (Status.FOUND, Status.CAPPED):
        began = time.monotonic()
        throughput = _timed(finding, prober, on_probing, probes, bounds, deadline)
        timing_seconds = time.monotonic() - began
    seconds = time.monotonic() - started
    model = memory_model_of(proved.probes, prober.is_repeatable) if proved else None
    result = conclude(prober, probes, finding, seconds, warnings, model)
    return replace(
        result,
        notes=(*notes, *notes_about(finding, prober, bounds)),
        estimated_batch_size=head_start.batch_size,
        seconds_by_part=_seconds_by_part(
            prober, probes, result.seconds + spent_before, head_start.seconds, timing_seconds
        ),
        remembered_from=proved.saved if proved else None,
        throughput=throughput,
    )


def probing(name: str, tell: Callable[[str], None]) -> OnProbing:
    """Return a function that tells of each probe of a search as it begins.

    Example:
        >>> probing("bf16", print)(64, True)
        bf16: confirming 64 ...
    """
    return lambda size, confirm: tell(f"{name}: {'confirming' if confirm else 'trying'} {size} ...")


def _check(finding: Finding, deadline: Deadline | None) -> None:
    """Raise an error if a search ended without saying anything about memory."""
    if finding.answer is not None:
        return
    if deadline is not None and finding.status is Status.TIME_LIMIT:
        raise TimeLimitError(deadline.seconds)
    failure = finding.failure
    if failure is not None and failure.outcome is Outcome.FAILED:
        advice = "run one training step by yourself to see more"
        if failure.most_examples is not None:
            advice = f"try sizes up to {failure.most_examples}"
        raise WorkerError(
            f"not even a batch of {failure.batch_size} runs: {failure.note}; {advice}"
        )


def _confirmed_again(
    remembered: Remembered | None, run: RunProbe, prober: Prober, *, replays: bool
) -> tuple[Finding | None, list[Probe]]:
    """Confirm an earlier answer. Return the finding if that proves it, else what a search knows."""
    if remembered is None:
        return None, []
    probe = run(remembered.batch_size, True)
    if remembered.is_proved_by(probe, is_repeatable=prober.is_repeatable):
        return Finding(remembered.status, probe, remembered.failure), []
    if replays and not probe.fits:
        return None, []  # small sizes have to be recorded before any fails
    # No probe has run, so a failure in a later step refutes none.
    return None, [probe if probe.fits else replace(probe, steps=min(1, probe.steps))]


def _timed(
    finding: Finding,
    prober: Prober,
    on_probing: OnProbing | None,
    probes: list[Probe],
    bounds: Bounds,
    deadline: Deadline | None,
) -> Throughput | None:
    """Time training at sizes up to the answer; return None if there is no answer.

    These runs prove nothing, so they are no probes of the result.
    """
    if finding.answer is None:
        return None

    def time_steps(size: int) -> Probe:
        if on_probing:
            on_probing(size, False)
        return prober.probe(size, confirm=True)

    answer = finding.answer.batch_size
    if deadline is None:
        return measure_throughput(time_steps, probes, answer, bounds)
    return measure_throughput(time_steps, probes, answer, bounds, deadline.seconds_left)


def _seconds_by_part(
    prober: Prober,
    probes: list[Probe],
    seconds: float,
    estimate_seconds: float,
    timing_seconds: float,
) -> dict[str, float]:
    """Return where the time went, including what the prober spent before the search."""
    steps = sum(probe.seconds for probe in probes)
    parts = {"steps": steps, "estimate": estimate_seconds, **prober.seconds_by_part}
    parts |= {"timing": timing_seconds} if timing_seconds else {}
    parts["rest"] = max(0.0, seconds - sum(parts.values()))
    return {name: round(part, 3) for name, part in parts.items()}
