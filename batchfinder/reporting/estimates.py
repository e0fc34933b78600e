"""Estimates as tables: one row per GPU, and what its memory is used for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from batchfinder.reporting.columns import aligned, fitted
from batchfinder.reporting.wording import place_in_step
from batchfinder.units import format_bytes

if TYPE_CHECKING:
    from batchfinder.simulation.estimate import ClusterEstimate, Estimate
    from batchfinder.simulation.explanation import Explanation
    from batchfinder.simulation.gpus import Gpu

_BARS = " ▁▂▃▄▅▆▇█"
_TIMELINE_ROWS = ("forward", "backward", "optimizer step")


def estimate_table(estimates: Sequence[Estimate], width: float = math.inf) -> list[str]:
    """Tabulate the estimates, one row per GPU; several lines if ``width`` is too small."""
    rows = [("GPU", "memory", "max batch", "plausible", "peak", "model states", "per sample")]
    for estimate in estimates:
        states = estimate.explanation.model_state_bytes
        model = estimate.result.memory_model
        size, interval, peak = _answer(estimate)
        memory = format_bytes(estimate.gpu.total_bytes)
        per_sample = format_bytes(model.per_sample_bytes) if model else "-"
        if model and not model.is_linear:
            per_sample = f"~{per_sample}"
        name = estimate.gpu.name
        rows.append((name, memory, size, interval, peak, format_bytes(states), per_sample))
    return fitted(rows, width)


def length_table(runs: Mapping[int | None, Sequence[Estimate]]) -> list[str]:
    """Tabulate the largest batch sizes: one row per length of the texts, one column per GPU."""
    gpus = [estimate.gpu for estimate in next(iter(runs.values()))]
    rows = [
        ("tokens", *(gpu.name for gpu in gpus)),
        ("", *(format_bytes(gpu.total_bytes) for gpu in gpus)),
    ]
    for length, estimates in runs.items():
        sizes = [str(estimate.batch_size or "out of memory") for estimate in estimates]
        rows.append((str(length), *sizes))
    return aligned(rows, left=())


def cluster_table(jobs: Sequence[ClusterEstimate], width: float = math.inf) -> list[str]:
    """Tabulate the estimates, one row per job; several lines if ``width`` is too small."""
    rows = [("GPU", "ranks", "strategy", "max batch", "plausible", "global batch", "peak per rank")]
    for job in jobs:
        size, interval, peak = _answer(job.estimate)
        ranks, strategy = str(job.cluster.world_size), job.cluster.strategy
        total = str(job.global_batch_size) if job.global_batch_size else "-"
        rows.append((job.estimate.gpu.name, ranks, strategy, size, interval, total, peak))
    return fitted(rows, width)


def _answer(estimate: Estimate) -> tuple[str, str, str]:
    """Return the batch size, its plausible interval and the peak: of the smallest if none fits."""
    interval = f"{estimate.low} .. {estimate.high}"
    return str(estimate.batch_size or "none fits"), interval, format_bytes(estimate.peak_bytes)


def explanation_lines(explanation: Explanation) -> list[str]:
    """List the terms of the peak, where it is, the largest modules, and the timeline."""
    terms = [(name, size) for name, size in explanation.terms.items() if size]
    total = sum(size for _, size in terms)
    rows = [(name, format_bytes(size), f"{size / total:5.1%}") for name, size in terms]
    peak = explanation.peak_stage.value, explanation.peak_module, explanation.peak_line
    place = place_in_step(*peak)
    lines = [f"Peak at batch size {explanation.batch_size}, in the {place}:"]
    lines += ["  " + line for line in aligned([*rows, ("total", format_bytes(total), "")])]
    if explanation.top_modules:
        lines.append("Activations per sample:")
        modules = [(name, format_bytes(size)) for name, size in explanation.top_modules if size]
        lines += ["  " + line for line in aligned(modules)]
    return [*lines, "One step:", *_timeline(explanation)]


def overhead_line(gpu: Gpu) -> str:
    """Say what is assumed to be in use outside PyTorch's allocator, and why."""
    source = gpu.overhead_source or (
        "assumed, as no measurement on this card is known. Try --overhead or --calibrate"
    )
    return f"Outside PyTorch's allocator: {format_bytes(gpu.overhead_bytes)} ({source})"


def gpu_table(gpus: Sequence[Gpu]) -> list[str]:
    """Tabulate the known GPUs: memory, compute capability, overhead, source of the figures."""
    rows = [("GPU", "memory", "capability", "overhead", "source of the memory")]
    rows += [
        (
            gpu.name,
            format_bytes(gpu.total_bytes),
            ".".join(map(str, gpu.compute_capability)),
            format_bytes(gpu.overhead_bytes),
            gpu.source or "unsourced",
        )
        for gpu in gpus
    ]
    return aligned(rows, left=(0, 4))


def _timeline(explanation: Explanation) -> list[str]:
    highest = max((moment.allocated_bytes for moment in explanation.timeline), default=1)
    lines = []
    for name in _TIMELINE_ROWS:
        bars = "".join(
            _BARS[round(moment.allocated_bytes / highest * (len(_BARS) - 1))]
            for moment in explanation.timeline
            if moment.stage.value == name
        )
        lines.append(f"  {name:<15} {bars}".rstrip())
    return lines
