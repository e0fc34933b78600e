"""The answer in words: what was found, what limits it, and what to do about it."""

from __future__ import annotations

from batchfinder.reporting.advice import PLAIN_REASONS, why_nothing_fits
from batchfinder.reporting.global_batch import plan_lines
from batchfinder.reporting.wording import allocator_request_bytes, fragmentation, one_line
from batchfinder.results.accumulation import AccumulationPlan
from batchfinder.results.memory_model import MemoryModel
from batchfinder.results.probe import THRASHING_NOTE, Outcome, without_place
from batchfinder.results.result import BatchSizeResult, Status
from batchfinder.results.throughput import AS_FAST, Throughput
from batchfinder.units import count, format_bytes, format_rate, format_seconds

_KINDS = {"train": "", "eval": "validation ", "inference": "inference "}

# With more ranks, only the lowest and the highest peak are shown.
_RANKS_SHOWN = 8


def headline(result: BatchSizeResult) -> list[str]:
    """Return the first line of the answer in parts, for one line or several.

    Example: "Max batch size 1042", "2.9 GiB fixed + 126.8 MiB per sample", "6 probes, 8.4 s".
    """
    parts = [_verdict(result)]
    if result.throughput is not None:
        parts.append(_speed(result.throughput, result.batch_size))
    if result.batch_size and result.memory_model is not None:
        parts.append(_formula(result.memory_model))
    return [*parts, f"{count(len(result.probes), 'probe')}, {format_seconds(result.seconds)}"]


def details(
    result: BatchSizeResult, plan: AccumulationPlan | None = None, *, verbose: bool = False
) -> list[str]:
    """Return the reasons that follow the first line, one paragraph each.

    With ``verbose``, they include the allocator's messages and the cost of the search.
    """
    lines = []
    if result.status is Status.CAPPED:
        lines.append("It is the largest size allowed; nothing larger was tried.")
    if result.status is Status.NOTHING_FITS:
        lines += why_nothing_fits(result)
    else:
        lines += _next_failure(result, verbose)
    lines += _circumstances(result)
    if result.throughput is not None:
        lines += _speeds(result.throughput)
    lines += _ranks(result)
    if result.estimated_batch_size and result.batch_size:
        lines.append(_guess(result.estimated_batch_size, result.batch_size))
    if plan is not None:
        lines += plan_lines(plan, verbose=verbose)
    return lines + (_more(result) if verbose else [])


def _more(result: BatchSizeResult) -> list[str]:
    """Return what only ``-v`` shows."""
    lines = []
    model = result.memory_model
    # Without -v, the headline's "roughly" says it.
    if result.batch_size and model is not None and not model.is_linear:
        lines.append(
            f"Note: memory does not grow linearly here (readings are up to "
            f"{model.worst_residual:.0%} off the line). Search again for another limit."
        )
    lines += [f"Note: {one_line(note)}." for note in result.notes]
    if result.batch_size:
        cost = f"{result.cost_full_size_steps:.1f}"
        lines.append(f"The search cost as much as {cost} steps at the size found.")
    if result.seconds_by_part:
        parts = sorted(result.seconds_by_part.items(), key=lambda part: -part[1])
        told = [f"{name} {format_seconds(time)}" for name, time in parts if time or name == "rest"]
        lines.append(f"Time: {', '.join(told)}")
    return lines


def _circumstances(result: BatchSizeResult) -> list[str]:
    lines = []
    if result.remembered_from:
        lines.append(
            f"Found on {result.remembered_from} with about as much memory, and confirmed again "
            "now. Try --no-cache to search again."
        )
    if result.mode == "eval" and result.batch_size:
        lines.append(
            "It holds after small training steps; steps of a real size may leave less room. "
            f"Prove it for your training with find --eval-batch-size {result.batch_size}."
        )
    if result.eval_batch_size and result.batch_size:
        lines.append(
            f"In every confirmation, validations with batches of {result.eval_batch_size} ran too."
        )
    return lines


def _guess(estimated: int, found: int) -> str:
    off = estimated / found - 1
    verdict = f"{abs(off):.1%} {'above' if off > 0 else 'below'} the answer" if off else "exact"
    return f"The estimate, {estimated}, was {verdict}."


def _verdict(result: BatchSizeResult) -> str:
    if result.status in (Status.FOUND, Status.CAPPED):
        return f"Max {_KINDS[result.mode]}batch size {result.batch_size}"
    if result.status is Status.NOTHING_FITS:
        failure = result.next_failure
        smallest = "the smallest" if failure is None else failure.what
        return f"Nothing fits: {smallest} needs more than {format_bytes(result.budget_bytes)}"
    if result.status is Status.TIME_LIMIT:
        size = f"Largest confirmed batch size {result.batch_size}"
        return f"{size} (not final: the time limit ended the search)"
    stopped = "Stopped." if result.status is Status.INTERRUPTED else "Stopped by an error."
    if not result.batch_size:
        return f"{stopped} No batch size ran"
    steps = result.confirmed_steps
    proof = f"confirmed by {count(steps, 'step')}" if steps else "not confirmed"
    return f"{stopped} Largest size that ran: {result.batch_size} ({proof})"


def _formula(model: MemoryModel) -> str:
    roughly = "" if model.is_linear else "roughly "
    if not model.per_sample_bytes:
        return f"{roughly}{format_bytes(model.fixed_bytes)} at any batch size"
    # Noisy or nonlinear readings can give a line that starts below zero.
    fixed = f"{format_bytes(model.fixed_bytes)} fixed + " if model.fixed_bytes > 0 else ""
    return f"{roughly}{fixed}{format_bytes(model.per_sample_bytes)} per sample"


def _next_failure(result: BatchSizeResult, verbose: bool) -> list[str]:
    failure = result.next_failure
    if failure is None:
        return []
    reason = one_line(failure.reason)
    if failure.outcome is Outcome.FAILED:
        return [f"Batch size {failure.batch_size} failed for a reason other than memory: {reason}"]
    if THRASHING_NOTE in reason:
        return [f"Batch size {failure.batch_size} {reason}, which is slow."]
    reason, is_in_validation = without_place(reason)
    where = " in its validation" if is_in_validation else ""
    is_plain = reason in PLAIN_REASONS
    if not verbose:
        is_plain |= allocator_request_bytes(reason) is not None
    pieces = fragmentation(reason, result.budget_bytes)
    why = (f": {pieces}." if pieces else ".") if is_plain else f": {reason}"
    return [f"Batch size {failure.batch_size} runs out of memory{where}{why}"]


def _ranks(result: BatchSizeResult) -> list[str]:
    """Say which rank limits the batch size, if several train together."""
    if result.world_size == 1 or result.limiting_rank is None:
        return []
    line = f"{result.world_size} ranks."
    if result.next_failure is not None:
        # It need not have the highest peak: where several run out, chance decides which is first.
        line = f"Rank {result.limiting_rank} of {result.world_size} failed first at "
        line += f"{result.next_failure.what}."
    peaks = [peak for peak in result.rank_peak_bytes if peak is not None]
    if len(peaks) > _RANKS_SHOWN:
        line += f" Peak memory: {format_bytes(min(peaks))} to {format_bytes(max(peaks))}."
    elif peaks:
        line += f" Peak memory by rank: {', '.join(map(format_bytes, peaks))}."
    if result.is_divided:
        line += f" They share this batch size: each has {result.batch_size // result.world_size}."
    elif result.batch_size:
        line += f" Each rank has this batch size: {result.batch_size * result.world_size} in all."
    return [line]


def _speed(throughput: Throughput, batch_size: int) -> str:
    """Return the part of the headline about speed. It names a size only if the steps show it.

    Example: "256 trains as fast".
    """
    if len(throughput.rates) == 1:
        rate = throughput.rates[0].samples_per_second
        return f"{format_rate(rate)} samples/s"
    if not throughput.is_clear:
        return "steps vary too much to name a smaller size that is as fast"
    size = "no smaller size" if throughput.knee >= batch_size else throughput.knee
    return f"{size} trains as fast"


def _speeds(throughput: Throughput) -> list[str]:
    """Return the rates at all sizes timed, and whether steps differ too much to compare them."""
    rates = ", ".join(
        f"{format_rate(rate.samples_per_second)} at {rate.batch_size}" for rate in throughput.rates
    )
    spread = max(rate.spread for rate in throughput.rates)
    lines = [f"Samples per second: {rates} (steps vary by {spread:.1%})."]
    if len(throughput.rates) > 1 and not throughput.is_clear:
        lines.append(
            f"The smallest size within {AS_FAST:.0%} of the best rate is between "
            f"{throughput.knee_from} and {throughput.knee_to}: steps vary too much to tell more. "
            "Try again while nothing else runs on this machine."
        )
    return lines
