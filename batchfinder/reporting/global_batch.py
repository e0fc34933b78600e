"""A global batch size in words: the split, the learning rate, and lines to paste."""

from __future__ import annotations

import math

from batchfinder.results.accumulation import AccumulationPlan, Split
from batchfinder.results.noise_scale import NoiseScale


def plan_lines(plan: AccumulationPlan, *, verbose: bool = False) -> list[str]:
    """Return the plan, and what it means for the learning rate if the size is another one.

    With ``verbose``, add that the rate stays otherwise, and lines to paste into the training.
    """
    best = plan.best
    if best is None:
        return [str(plan)]
    lines = [str(plan)]
    if verbose or best.global_batch_size != plan.requested:
        lines.append(learning_rate_line(plan.requested, best))
    return lines + (snippets(best) if verbose else [])


def learning_rate_line(requested: int, split: Split) -> str:
    """Say what to do with the learning rate.

    The rules are for another global batch size than the one that the rate was chosen for. Linear:
    Goyal et al. 2017, arXiv:1706.02677. Square root: Krizhevsky 2014, arXiv:1404.5997, and for
    Adam, Malladi et al. 2022, arXiv:2205.10782.
    """
    factor = split.global_batch_size / requested
    if factor == 1:
        return "Keep the learning rate: the global batch size stays the same."
    return (
        f"For {split.global_batch_size} in place of {requested}, multiply the learning rate by "
        f"{factor:.4g} with SGD (linear rule, arXiv:1706.02677), or by {factor**0.5:.4g} with Adam "
        "(square root rule, arXiv:2205.10782)."
    )


def noise_line(noise: NoiseScale) -> str:
    """Say beyond how many examples a step larger batches stop helping, and how sure that is.

    The measure is McCandlish et al. 2018's simple noise scale, arXiv:1812.06162.
    """
    drawn = (
        f"at the weights the target returns, by {noise.draws} draws of {noise.small_batch_size} and"
        f" {noise.large_batch_size} examples"
    )
    limits = "It grows during training (arXiv:1812.06162)."
    if math.isinf(noise.examples):
        least = f"{noise.low:,.0f}" if math.isfinite(noise.low) else f"{noise.large_batch_size:,}"
        return f"Noise scale: above {least} examples per optimizer step, {drawn}. {limits}"
    high = f"to {noise.high:,.0f}" if math.isfinite(noise.high) else "or more"
    return (
        f"Noise scale: more than about {noise.examples:,.0f} examples per optimizer step stop "
        f"helping ({noise.low:,.0f} {high}), {drawn}. {limits}"
    )


def snippets(split: Split) -> list[str]:
    """Return lines to paste for each way to train."""
    size, steps = split.batch_size, split.gradient_accumulation_steps
    loader = f"    DataLoader(..., batch_size={size})"
    update = f"    if (i + 1) % {steps} == 0: optimizer.step(); optimizer.zero_grad()"
    return [
        "  PyTorch:",
        loader,
        *([f"    (loss / {steps}).backward()", update] if steps > 1 else []),
        "  Accelerate:",
        loader,
        f"    Accelerator(gradient_accumulation_steps={steps})",
        "    with accelerator.accumulate(model): ...",
        "  Lightning:",
        loader,
        f"    Trainer(accumulate_grad_batches={steps})",
        "  Transformers:",
        f"    TrainingArguments(per_device_train_batch_size={size}, "
        f"gradient_accumulation_steps={steps})",
    ]
