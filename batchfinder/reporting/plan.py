"""A global batch size in words: the split, the learning rate, and lines to paste."""

from __future__ import annotations

from batchfinder.results.accumulation import AccumulationPlan, Split


def plan_lines(plan: AccumulationPlan, *, verbose: bool = False) -> list[str]:
    """Return the plan, and what it means for the learning rate if the size is another one.

    Args:
        plan: how to reach a global batch size.
        verbose: add that the rate stays otherwise, and lines to paste into the training.
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


def snippets(split: Split) -> list[str]:
    """Return one line to paste for each way to train."""
    size, steps = split.batch_size, split.gradient_accumulation_steps
    loader = f"DataLoader(..., batch_size={size})"
    return [
        f"  PyTorch: {loader}; (loss / {steps}).backward(); "
        f"if (i + 1) % {steps} == 0: optimizer.step(); optimizer.zero_grad()",
        f"  Accelerate: {loader}; Accelerator(gradient_accumulation_steps={steps}); "
        "with accelerator.accumulate(model): ...",
        f"  Lightning: {loader}; Trainer(accumulate_grad_batches={steps})",
        f"  Transformers: TrainingArguments(per_device_train_batch_size={size}, "
        f"gradient_accumulation_steps={steps})",
    ]
