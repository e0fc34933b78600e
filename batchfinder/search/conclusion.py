"""Turn the probes of a search into its result. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from batchfinder.results.memory_model import MemoryModel, fit
from batchfinder.results.probe import Probe
from batchfinder.results.result import BatchSizeResult, NextFailure, Status
from batchfinder.search.bracket import holes
from batchfinder.search.prober import Prober
from batchfinder.search.search import Finding

# Readings of the less trusted kind count only at sizes that are larger or smaller than all of the
# trusted kind by this factor. A line through a few close sizes may have any slope.
APART = 2


def conclude(
    prober: Prober,
    probes: Sequence[Probe],
    finding: Finding,
    seconds: float,
    warnings: Sequence[str] = (),
    memory_model: MemoryModel | None = None,
) -> BatchSizeResult:
    """Return the result of a search.

    Args:
        prober: the prober that ran the probes.
        probes: all probes, in the order in which they ran.
        finding: how the search ended.
        seconds: the duration of the search.
        warnings: the warnings for the user.
        memory_model: used instead of the lines through the probes; None to fit those.
    """
    answer, failure = finding.answer, finding.failure
    samples = sum(probe.samples or probe.batch_size * probe.steps for probe in probes)
    return BatchSizeResult(
        batch_size=answer.batch_size if answer else 0,
        status=finding.status,
        device=prober.device,
        budget_bytes=prober.budget_bytes,
        probes=tuple(probes),
        memory_model=memory_model or memory_model_of(probes, prober.is_repeatable),
        next_failure=_next_failure(failure) if failure else None,
        confirmed_steps=answer.steps if answer and answer.confirmed else 0,
        cost_full_size_steps=round(samples / answer.batch_size, 2) if answer else 0.0,
        seconds=seconds,
        versions=prober.versions,
        warnings=tuple(warnings),
    )


def stopped_early(probes: Sequence[Probe], status: Status) -> Finding:
    """Return what the probes support, if a search did not end by itself.

    Args:
        probes: all probes, in the order in which they ran.
        status: why the search ended. After a time limit only confirmed sizes count.
    """
    # The last verdict on a size counts: a confirmation overrules a probe, whichever of them failed.
    verdicts = {probe.batch_size: probe for probe in probes}
    passed_over = {probe.batch_size for probe in holes(probes)}
    failed = [size for size, p in verdicts.items() if not p.fits and size not in passed_over]
    failure = min(failed, default=None)
    # Other sizes above a failed one were never tried after it.
    ran = [
        size
        for size, probe in verdicts.items()
        if probe.fits
        and (failure is None or size < failure)
        and (probe.confirmed or status is not Status.TIME_LIMIT)
    ]
    answer = max(ran, default=None)
    return Finding(
        status,
        None if answer is None else verdicts[answer],
        None if failure is None else verdicts[failure],
    )


def _next_failure(probe: Probe) -> NextFailure:
    return NextFailure(probe.batch_size, probe.outcome, probe.note or "out of memory")


def memory_model_of(probes: Sequence[Probe], is_repeatable: bool) -> MemoryModel | None:
    """Fit the lines through the probes; return None if there are too few.

    Confirmations start from scratch and may read differently, so probes are preferred. If readings
    do not repeat, every probe starts from scratch, so confirmations are preferred. The other kind
    extends the range of sizes.
    """
    fits = [p for p in probes if p.fits]
    trusted = [p for p in fits if p.confirmed != is_repeatable]
    sizes = [p.batch_size for p in trusted] or [0]
    beyond = [
        p
        for p in fits
        if p.confirmed == is_repeatable
        and not min(sizes) < APART * p.batch_size < APART**2 * max(sizes)
    ]
    return fit((p.batch_size, p.phase_peak_bytes) for p in (*trusted, *beyond))
