"""How the cases of ``gpu_acceptance.py`` ended: the verdict, the memory model's miss, the table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from parts.case import markdown_table, ran_out, survived

from batchfinder.results.memory_model import fit
from batchfinder.results.probe import Probe
from batchfinder.units import format_bytes

# This many times the answer must not train.
TOO_LARGE = 1.12


def prediction(probes: Sequence[Probe], answer: int) -> dict[str, Any]:
    """The peak that the smaller probes predict at the answer, and the one measured there."""
    peaks = {
        probe.batch_size: probe.phase_peak_bytes
        for probe in probes
        if probe.fits and probe.phase_peak_bytes
    }
    model = fit([(size, peak) for size, peak in peaks.items() if size < answer])
    if model is None or answer not in peaks:
        return {"predicted_bytes": None, "measured_bytes": None}
    return {
        "predicted_bytes": round(model.peak_bytes(answer)),
        "measured_bytes": max(peaks[answer].values()),
    }


def verdict(row: dict[str, Any], deadline: float) -> str:
    """In words: "passed", or which half of the proof failed or is missing."""
    if not survived(row["survival"]):
        is_cut = "error" in row["survival"] and time.monotonic() >= deadline
        return "cut short: not all steps ran" if is_cut else "failed: the answer did not survive"
    if not ran_out(row["above"]):
        is_cut = "error" in row["above"] and time.monotonic() >= deadline
        return f"cut short: {TOO_LARGE} times it was not tried" if is_cut else "failed: not tight"
    return "passed"


def describe(row: dict[str, Any]) -> str:
    """One line for the terminal."""
    name = f"{row['family']} {row['precision']} {row['limit']}"
    if "batch_size" not in row:
        return f"{name}: {row['verdict']}"
    return (
        f"{name}: {row['batch_size']} from {row['probes']}, "
        f"{row['full_size_steps']} full-size steps, {row['seconds']} s: {row['verdict']}"
    )


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The table for the README: all cases that were run."""
    header = ["model", "precision", "limit", "batch size", "probes", "full-size steps", "time"]
    header += ["trained on", f"{TOO_LARGE} times it", "predicted peak"]
    lines: list[list[object]] = []
    for row in rows:
        if "batch_size" not in row:
            continue
        survival, above = row.get("survival", {}), row.get("above", {})
        lines.append(
            [
                row["family"],
                row["precision"],
                row["limit"].replace("GiB", " GiB"),
                row["batch_size"],
                len(row["probes"]),
                f"{row['full_size_steps']:.1f}",
                f"{row['seconds']:.0f} s",
                f"{survival['steps']} steps" if survived(survival) else f"**{outcome(survival)}**",
                "out of memory" if ran_out(above) else f"**{outcome(above)}**",
                compare(row["predicted_bytes"], row["measured_bytes"]),
            ]
        )
    not_run = sum(row["verdict"].startswith("not run") for row in rows)
    note = f"\n\n{not_run} further cases were not run in the time given." if not_run else ""
    return markdown_table(header, lines) + note


def outcome(report: dict[str, Any]) -> str:
    """What the judge said, if it came to say anything."""
    return str(report.get("outcome", "no verdict" if report else "not tried"))


def compare(predicted: int | None, measured: int | None) -> str:
    """How far a prediction was off."""
    if not predicted or not measured:
        return "-"
    return f"{predicted / measured - 1:+.1%} of {format_bytes(measured)}"
