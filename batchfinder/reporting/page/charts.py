"""The pictures of the page, each from the JSON data of a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from batchfinder.reporting.page.svg import Chart, bars
from batchfinder.reporting.wording import size_or_none_fits
from batchfinder.results.result import BatchSizeResult
from batchfinder.results.throughput import Throughput
from batchfinder.units import count, format_bytes, format_rate, format_seconds

Data = Mapping[str, Any]

OUTCOMES = {"fits": "fits", "oom": "out of memory", "failed": "failed"}


def memory_chart(result: BatchSizeResult) -> str:
    """Draw memory against batch size: every probe, the lines, the budget, and the failure."""
    budget, failure = result.budget_bytes, result.next_failure
    peaks = [probe.peak_bytes or 0 for probe in result.probes if probe.fits]
    # Failures far above the answer would press everything else against the axis.
    near = 1.35 * max(result.batch_size, failure.batch_size if failure else 0, 1)
    probes = [probe for probe in result.probes if probe.batch_size <= near]
    most = 1.06 * max((probe.batch_size for probe in probes), default=1)
    chart = Chart(
        f"Peak memory against batch size; the answer is {result.batch_size}",
        x_most=most,
        y_most=max(budget, *peaks, 1),
        x_label="batch size",
        y_label="peak memory",
        y_is_bytes=True,
    )
    chart.line([(0, budget), (most, budget)], "budget")
    chart.note((0, budget * 1.02), f"budget {format_bytes(budget)}")
    for phase, line in result.memory_model.phases.items() if result.memory_model else ():
        fixed, slope = line.fixed_bytes, line.per_sample_bytes
        end = max(0.0, min(most, (chart.y_end - fixed) / slope) if slope > 0 else most)
        chart.line([(0, fixed), (end, fixed + slope * end)], f"fit {phase.value}")
    for probe in probes:
        size, read, step = probe.batch_size, probe.peak_bytes, probe.step_seconds
        if not probe.fits:
            outcome = probe.outcome.value
            chart.dot((size, budget), outcome, f"{size}: {OUTCOMES[outcome]}", shape="cross")
            continue
        if read is None:
            continue
        tip = f"{size}: {format_bytes(read)}" + (f", {format_seconds(step)} a step" if step else "")
        if probe.confirmed:
            tip += f", confirmed by {count(probe.steps, 'step')}"
            chart.dot((size, read), "confirmed", tip, shape="ring")
        chart.dot((size, read), "fits", tip)
    return chart.svg()


def speed_chart(throughput: Throughput) -> str:
    """Draw examples per second against batch size, and the knee if steps vary little."""
    points = [(rate.batch_size, rate.samples_per_second) for rate in throughput.rates]
    chart = Chart(
        "Examples per second against batch size",
        x_most=1.06 * points[-1][0],
        y_most=max(speed for _, speed in points),
        x_label="batch size",
        y_label="examples per second",
    )
    chart.line(points, "rate")
    for size, speed in points:
        tip = f"{size}: {format_rate(speed)} examples per second"
        if size == throughput.knee and throughput.is_clear:
            chart.dot((size, speed), "confirmed", tip, shape="ring")
        chart.dot((size, speed), "fits", tip)
    return chart.svg()


def timeline_chart(explanation: Data, budget_bytes: int) -> str:
    """Draw the memory over one step, stacked by what it is for."""
    moments = explanation["timeline"]
    kinds = kinds_of(explanation)
    most = max([budget_bytes, *(moment["allocated_bytes"] for moment in moments)])
    chart = Chart(
        "Memory over one training step, stacked by what it is for",
        x_most=len(moments) or 1,
        y_most=most,
        x_label="one training step, by its allocations",
        y_label="memory",
        y_is_bytes=True,
        has_x_ticks=False,
    )
    stacks = [
        list(accumulate(moment["bytes_by_kind"].get(kind, 0) for kind in kinds))
        for moment in moments
    ]
    for index in reversed(range(len(kinds))):
        tops = [(x + side, stack[index]) for x, stack in enumerate(stacks) for side in (0, 1)]
        chart.area([(0, 0), *tops, (len(stacks), 0)], f"kind{index}")
    begin = 0
    for position, moment in enumerate([*moments, None]):
        if position == len(moments) or (moment and moment["stage"] != moments[begin]["stage"]):
            chart.line([(position, 0), (position, chart.y_end)], "grid")
            if position - begin > 3:  # room for a word
                name = moments[begin]["stage"]
                chart.note(((begin + position) / 2, chart.y_end), name, anchor="middle")
            begin = position
    chart.line([(0, budget_bytes), (len(moments), budget_bytes)], "budget")
    return chart.svg()


def kinds_of(explanation: Data) -> list[str]:
    """Return the kinds of memory that a step uses, as they are stacked from below."""
    return [
        kind
        for kind in explanation["terms"]
        if any(moment["bytes_by_kind"].get(kind) for moment in explanation["timeline"])
    ]


def gpu_chart(estimates: Sequence[Data]) -> str:
    """Draw the largest batch size on each GPU, with its plausible range."""
    rows = [
        (
            name_of(one),
            one["batch_size"],
            size_or_none_fits(one["batch_size"]),
        )
        for one in estimates
    ]
    return bars("Largest batch size by GPU", rows, ranges=[one["interval"] for one in estimates])


def name_of(estimate: Data) -> str:
    """Return the name of a GPU, with the number of ranks if there are several."""
    name, ranks = estimate["gpu"]["name"], estimate["world_size"]
    return f"{name}, {ranks} ranks" if ranks > 1 else str(name)


def module_chart(estimate: Data) -> str:
    """Draw the modules whose activations use most memory per example."""
    modules = estimate["explanation"]["activation_bytes_per_sample"].items()
    rows = [(name, size, format_bytes(size)) for name, size in modules if size]
    return bars("Activation memory per example by module", rows)
