"""The result of a search that launched a script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from batchfinder.launching.host_memory import ADVICE, HOST
from batchfinder.launching.size_check import SOME_SIZES
from batchfinder.results.memory_model import fit
from batchfinder.results.probe import FORESEEN_NOTE, Outcome, Probe
from batchfinder.results.result import BatchSizeResult, Status
from batchfinder.search.bracket import holes


def overruled(launched: Sequence[Probe], probes: Iterable[Probe]) -> list[Probe]:
    """Return launches with the verdicts of a search, which refuses requests that do not last.

    Last come the sizes that a replay alone refused.

    Example:
        >>> from batchfinder.results.probe import Outcome
        >>> fits = Probe(8, Outcome.FITS, steps=3, seconds=9.0)
        >>> overruled([fits], [Probe(8, Outcome.OOM, 1, 9.0, note="does not last")])[0].note
        'does not last'
    """
    refused = {probe.batch_size: probe for probe in probes if not probe.fits}
    rows = []
    for each in launched:
        judgement = refused.pop(each.batch_size, None)
        if judgement and each.fits:
            each = replace(each, outcome=judgement.outcome, note=judgement.note)
        rows.append(each)
    return [*rows, *(probe for probe in refused.values() if probe.note == FORESEEN_NOTE)]


def concluded(
    result: BatchSizeResult, launched: Sequence[Probe], *, has_all_data: bool
) -> BatchSizeResult:
    """Return a search's result with each launch once: it may have asked for one twice.

    Args:
        result: the result of the search.
        launched: the launches, with the search's verdicts.
        has_all_data: True if larger sizes have no more examples than the data.
    """
    probes = {probe.batch_size: probe for probe in launched}
    fits = [probe for probe in probes.values() if probe.fits]
    size = result.batch_size
    if result.status is Status.TIME_LIMIT:  # every launch confirms, asked or not
        size = max([size, *(probe.batch_size for probe in fits)])
    failure, warnings = result.next_failure, list(result.warnings)
    if failure is not None and failure.reason.startswith(HOST) and size:
        warnings.append(f"at batch size {failure.batch_size} {ADVICE}")
    is_refused = failure is not None and failure.outcome is Outcome.FAILED
    if (is_refused or holes(launched)) and not has_all_data and size:
        warnings.append(SOME_SIZES)
    return replace(
        result,
        batch_size=size,
        warnings=tuple(warnings),
        seconds=max(result.seconds, sum(probe.seconds for probe in launched)),
        probes=tuple(launched),
        memory_model=fit((probe.batch_size, probe.phase_peak_bytes) for probe in fits),
        confirmed_steps=probes[size].steps if size in probes else 0,
        cost_full_size_steps=round(sum(p.samples for p in launched) / max(1, size), 2),
    )
