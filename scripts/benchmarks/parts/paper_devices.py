"""What a search costs on devices that exist on paper only: an exact one, and simulated GPUs.

The caching allocator of a simulated GPU fragments as the real one does, and near the limit it runs
some sizes only by flushing its cache in every step, which is refused. There doubling and bisection,
as people write it by hand, is counted as well.
"""

from __future__ import annotations

import sys
from statistics import median
from typing import Any

from parts.case import RESULTS, ROOT, markdown_table, save, survived
from parts.peers import STEPS, bisected

from batchfinder.probing.options import ProbeOptions
from batchfinder.results.memory_model import Phase
from batchfinder.results.probe import Outcome, Probe
from batchfinder.search.plan import THRASHING_PROBE
from batchfinder.search.search import search
from batchfinder.simulation.gpus import find_gpu
from batchfinder.simulation.prober import SimulatedProber, phase_peaks
from batchfinder.simulation.tracing.step_trace import StepTraces
from batchfinder.training.loading import load_setup
from batchfinder.units import GIB

RESULT_FILE = RESULTS / "search_simulated_gpu.json"
GPU = "h200"
LIMITS_GIB = (8, 24, 80, None)
PRECISIONS = ("fp32", "bf16")
FAMILIES: dict[str, dict[str, object]] = {
    "mlp": {"width": 512, "depth": 16},
    "resnet": {"width": 64, "blocks": 3},
    "vit": {"width": 768, "depth": 12, "image_size": 224, "patch_size": 16},
    "gpt": {"width": 768, "depth": 12, "vocabulary": 50257},
    "lstm": {"vocabulary": 30000, "width": 512},
    "unet": {"width": 32, "levels": 4},
}


def simulate() -> bool:
    """Count the probes on all devices; whether the exact one took as few as it should."""
    is_good = simulate_exact_devices()
    simulate_gpus()
    return is_good


class ExactDevice:
    """A device on paper, whose peaks lie on a line without any noise.

    Args:
        maximum: the largest batch size that fits.
    """

    budget_bytes = 24 * GIB
    fixed_bytes = 2 * GIB

    def __init__(self, maximum: int) -> None:
        self.per_sample_bytes = (self.budget_bytes - self.fixed_bytes) / (maximum + 0.5)
        self.sizes: list[int] = []

    def run(self, batch_size: int, confirm: bool) -> Probe:
        """What the search calls."""
        self.sizes.append(batch_size)
        peak = round(self.fixed_bytes + self.per_sample_bytes * batch_size)
        return Probe(
            batch_size,
            Outcome.FITS if peak <= self.budget_bytes else Outcome.OOM,
            steps=3 if confirm else 1,
            seconds=0.0,
            phase_peak_bytes={Phase.FORWARD_BACKWARD: peak, Phase.OPTIMIZER_STEP: self.fixed_bytes},
            confirmed=confirm,
        )


class PaperGpu:
    """A simulated GPU whose probes end as those of a real one, thrashing included.

    Args:
        prober: the simulated GPU.
    """

    def __init__(self, prober: SimulatedProber) -> None:
        self.prober = prober
        self.probes: list[Probe] = []

    def run(self, batch_size: int, confirm: bool) -> Probe:
        """What the search calls."""
        replay = self.prober.replay(batch_size)
        retries = replay.retries if replay.fits else 0
        steps = ProbeOptions.confirm_steps if confirm else THRASHING_PROBE if retries else 1
        probe = Probe(
            batch_size,
            Outcome.FITS if replay.trains else Outcome.OOM,
            steps=steps if replay.fits else 1,
            seconds=0.0,
            peak_allocated_bytes=replay.peak_allocated_bytes,
            peak_reserved_bytes=replay.peak_reserved_bytes,
            phase_peak_bytes=phase_peaks(replay),
            allocation_retries=retries,
            confirmed=confirm,
        )
        self.probes.append(probe)
        return probe


def simulate_exact_devices() -> bool:
    """Count the probes on an exact device, for maxima far apart."""
    rows = []
    for maximum in (10, 1_000, 1_000_000):
        device = ExactDevice(maximum)
        finding = search(device.run, budget_bytes=device.budget_bytes)
        answer = finding.answer.batch_size if finding.answer else 0
        rows.append((maximum, answer, len(device.sizes), ", ".join(map(str, device.sizes))))
    print(markdown_table(("maximum", "answer", "probes", "sizes"), rows))
    return all(answer == maximum and probes <= 6 for maximum, answer, probes, _ in rows)


def simulate_gpus() -> None:
    """Count the probes on simulated GPUs, for models of the sizes that people train."""
    gpu = find_gpu(GPU)
    rows: list[dict[str, Any]] = []
    for family, arguments in FAMILIES.items():
        target = str(ROOT / "scripts" / "examples" / f"train_{family}.py:build_model")
        setup, _ = load_setup(target, arguments)
        for precision in PRECISIONS:
            options = ProbeOptions(precision=precision)
            traces = StepTraces(setup, options, gpu.compute_capability)
            for limit in LIMITS_GIB:
                limited = ProbeOptions(precision=precision, memory_limit=limit and limit * GIB)
                device = PaperGpu(SimulatedProber(traces, gpu, limited))
                row = {"family": family, "precision": precision, "limit_gib": limit}
                rows.append(row | cost_of_search(device))
                print(rows[-1], file=sys.stderr, flush=True)
                save(RESULT_FILE, {"gpu": gpu.name, "searches": rows})
    print(costs_table(rows))
    steps = sorted(row["full_size_steps"] for row in rows if row["full_size_steps"])
    print(
        f"all {len(rows)}: median {median(steps):.1f}, p90 {steps[int(0.9 * len(steps))]:.1f}, "
        f"worst {steps[-1]:.1f} full-size steps"
    )


def cost_of_search(device: PaperGpu) -> dict[str, Any]:
    """The answer, and what it took."""
    finding = search(device.run, budget_bytes=device.prober.budget_bytes)
    answer = finding.answer.batch_size if finding.answer else 0
    samples = sum(probe.batch_size * probe.steps for probe in device.probes)
    return {
        "batch_size": answer,
        "next_failure": finding.failure and finding.failure.batch_size,
        "thrashes": finding.failure is not None and finding.failure.is_thrashing,
        "probes": len(device.probes),
        "full_size_steps": round(samples / answer, 2) if answer else None,
        "sizes": [probe.batch_size for probe in device.probes],
        "by_hand": cost_by_hand(device.prober, answer),
    }


def cost_by_hand(prober: SimulatedProber, answer: int) -> dict[str, Any]:
    """The answer of doubling and bisection, and what it took in full-size steps of ours."""
    samples = 0

    def fits(batch_size: int) -> bool:
        nonlocal samples
        runs = prober.replay(batch_size).fits
        samples += batch_size * (STEPS if runs else 1)
        return runs

    found = bisected(fits)
    return {
        "batch_size": found,
        "full_size_steps": round(samples / answer, 2) if answer else None,
    }


def costs_table(rows: list[dict[str, Any]]) -> str:
    """What the searches cost, a line per family and one for all."""
    header = ["model", "searches"]
    if "survival" in rows[0]:
        header.append("survive")
    header += ["probes, median (worst)", "full-size steps, median (worst)"]
    if "by_hand" in rows[0]:
        header.append("by doubling and bisection")
    parts = {family: [row for row in rows if row["family"] == family] for family in FAMILIES}
    lines = [(name, *costs(part)) for name, part in {**parts, "all": rows}.items()]
    return markdown_table(header, lines)


def costs(rows: list[dict[str, Any]]) -> list[object]:
    """How many searches, how many answers survived, then medians and worst of what they took."""
    shown: list[object] = [len(rows)]
    if "survival" in rows[0]:
        shown.append(sum(survived(row["survival"]) for row in rows))
    probes = [row["probes"] for row in rows]
    shown.append(f"{median(probes):g} ({max(probes)})")
    for part in (rows, [row["by_hand"] for row in rows if "by_hand" in row]):
        steps = [row["full_size_steps"] for row in part if row["full_size_steps"]]
        shown += [f"{median(steps):.1f} ({max(steps):.1f})"] if steps else []
    return shown
