"""Throughput in words: which sizes train as fast as any."""

from __future__ import annotations

from batchfinder.results.throughput import AS_FAST, Throughput


def speed_verdict(throughput: Throughput, batch_size: int) -> str:
    """Return the part of the headline about speed.

    Example: "256 trains as fast".
    """
    if len(throughput.rates) == 1:
        rate = throughput.rates[0].samples_per_second
        return f"{format_rate(rate)} samples/s"
    if throughput.knee >= batch_size:
        return "no smaller size trains as fast"
    return f"{throughput.knee} trains as fast{'' if throughput.is_clear else ', by and large'}"


def speed_details(throughput: Throughput) -> list[str]:
    """Return the rates at all sizes timed, and whether steps differ too much to compare them."""
    rates = ", ".join(
        f"{format_rate(rate.samples_per_second)} at {rate.batch_size}" for rate in throughput.rates
    )
    spread = max(rate.spread for rate in throughput.rates)
    lines = [f"Samples per second: {rates} (steps vary by {spread:.1%})."]
    if len(throughput.rates) > 1 and not throughput.is_clear:
        lines.append(
            f"Steps vary too much to tell which sizes are within {AS_FAST:.0%} of the best rate. "
            "Try again while nothing else runs on this machine."
        )
    return lines


def loader_remarks(loader_rate: float, throughput: Throughput) -> list[str]:
    """Say that the data loader is the limit, if it yields fewer examples than the steps train on.

    Args:
        loader_rate: examples per second that the loader yields by itself.
        throughput: the speed of the steps.
    """
    best = max(throughput.rates, key=lambda rate: rate.samples_per_second)
    if loader_rate >= best.samples_per_second:
        return []
    return [
        f"the data loader is the limit: it yields {format_rate(loader_rate)} samples/s by itself, "
        f"and steps at {best.batch_size} train on {format_rate(best.samples_per_second)}. Try more "
        "num_workers, or cheaper transforms"
    ]


def format_rate(samples_per_second: float) -> str:
    """Return a rate with three digits.

    Example:
        >>> format_rate(3102.4), format_rate(31.024), format_rate(0.31)
        ('3,102', '31', '0.31')
    """
    if samples_per_second >= 10:
        return f"{samples_per_second:,.0f}"
    return f"{samples_per_second:.2g}"
