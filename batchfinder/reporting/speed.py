"""Throughput in words: which sizes train as fast as any."""

from __future__ import annotations

from batchfinder.results.throughput import AS_FAST, Throughput
from batchfinder.units import format_rate


def speed_verdict(throughput: Throughput, batch_size: int) -> str:
    """Return the part of the headline about speed. It names a size only if the steps show it.

    Example: "256 trains as fast".
    """
    if len(throughput.rates) == 1:
        rate = throughput.rates[0].samples_per_second
        return f"{format_rate(rate)} samples/s"
    if not throughput.is_clear:
        return "steps vary too much to compare speeds"
    size = "no smaller size" if throughput.knee >= batch_size else throughput.knee
    return f"{size} trains as fast"


def speed_details(throughput: Throughput) -> list[str]:
    """Return the rates at all sizes timed, and whether steps differ too much to compare them."""
    rates = ", ".join(
        f"{format_rate(rate.samples_per_second)} at {rate.batch_size}" for rate in throughput.rates
    )
    spread = max(rate.spread for rate in throughput.rates)
    lines = [f"Samples per second: {rates} (steps vary by {spread:.1%})."]
    if len(throughput.rates) > 1 and not throughput.is_clear:
        lines.append(
            "Steps vary or drift too much to tell which sizes are within "
            f"{AS_FAST:.0%} of the best rate. Try again while nothing else runs on this machine."
        )
    return lines
