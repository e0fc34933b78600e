"""Advice in words: why nothing fits, and what to try."""

from __future__ import annotations

from batchfinder.reporting.wording import allocator_request_bytes, one_line
from batchfinder.results.probe import Probe, without_place
from batchfinder.results.result import BatchSizeResult
from batchfinder.units import format_bytes

# Reasons that add nothing to "runs out of memory".
PLAIN_REASONS = ("", "out of memory")


def levers(smallest: int) -> str:
    """Return what to try if not even the smallest size allowed fits."""
    fewer = "a --min-batch-size below this with gradient accumulation, " if smallest > 1 else ""
    return (
        "Try bf16, an optimizer with less state (both by your script's options, or by `find "
        "--precision bf16 --optimizer sgd`), activation checkpointing in the model, smaller "
        f"inputs, {fewer}or a larger --memory-limit if the device has more. `batchfinder compare "
        "TARGET`, with a target as for `find`, shows what each would save."
    )


def why_nothing_fits(result: BatchSizeResult) -> list[str]:
    """Return what was missing for the smallest size, and what to try."""
    failure = result.next_failure
    advice = levers(failure.batch_size if failure else 1)
    if failure is None:
        return [advice]
    reason, is_in_validation = without_place(one_line(failure.reason))
    if is_in_validation:
        size = result.eval_batch_size
        batches = f", with batches of {size}," if size else ""
        smaller = "a smaller one (`find --mode eval` finds the largest)"
        on_host = "smaller batches for it, or to keep its outputs on the CPU (of a transformers."
        on_host += "Trainer: eval_accumulation_steps=1, or preprocess_logits_for_metrics)"
        smaller = smaller if size else on_host
        return [f"Its validation{batches} runs out of memory. Try {smaller}."]
    probe = next((p for p in result.probes if p.batch_size == failure.batch_size), None)
    story = what_ran_out(probe, reason, result.budget_bytes) if probe else ""
    if story:
        return [f"It {story}.", advice]
    return [advice] if reason in PLAIN_REASONS else [f"Why: {reason}", advice]


def what_ran_out(probe: Probe, reason: str, budget_bytes: int) -> str:
    """Return what a probe held when it ran out of memory, and what it lacked; "" if unknown."""
    request = allocator_request_bytes(reason)
    # Reserved bytes would be too many: the allocator returns its free blocks before it gives up.
    held = probe.tensor_bytes
    if request is None or not held:
        return ""
    story = f"held {format_bytes(held)} and requested {format_bytes(request)} more"
    missing = held + request - budget_bytes
    if missing <= 0:
        return story
    return f"needs at least {format_bytes(missing)} more than the budget. It {story}"
