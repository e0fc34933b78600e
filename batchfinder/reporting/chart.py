"""Memory against batch size as text, for a terminal."""

from __future__ import annotations

from batchfinder.results.result import BatchSizeResult
from batchfinder.units import format_bytes

_ROWS = 12  # of the picture: half a usual terminal
_LABEL = 10  # columns, as for "1023.9 MiB"
_LEAST_WIDTH, _MOST_WIDTH = 20, 80  # columns


def memory_lines(result: BatchSizeResult, width: int, *, has_blocks: bool = True) -> list[str]:
    """Draw every probe, the memory model's line and the budget; nothing if no size fits.

    Without ``has_blocks``, the picture is in ASCII only.
    """
    fitting = {probe.batch_size: probe.peak_bytes for probe in result.probes if probe.fits}
    peaks = {size: peak for size, peak in fitting.items() if peak is not None}
    if not peaks:
        return []
    dot, cross, line, rule = "●x·─" if has_blocks else "ox.-"
    columns = min(max(width - _LABEL - 2, _LEAST_WIDTH), _MOST_WIDTH)
    failure = result.next_failure
    most_size = max([*peaks, failure.batch_size if failure else 0])
    most = max(result.budget_bytes, *peaks.values())
    grid = [[" "] * columns for _ in range(_ROWS + 1)]

    def put(size: float, memory: float, mark: str) -> None:
        if 0 <= memory <= most:
            across = round(size / most_size * (columns - 1))
            grid[round((1 - memory / most) * _ROWS)][across] = mark

    for column in range(columns):
        size = column / (columns - 1) * most_size
        if result.memory_model is not None:
            put(size, result.memory_model.peak_bytes(round(size)), line)
        put(size, result.budget_bytes, rule)
    for size, peak in peaks.items():
        put(size, peak, dot)
    # Failures stand above the rest, as their memory is not known.
    failed = [" "] * columns
    for probe in result.probes:
        if not probe.fits and probe.batch_size <= most_size:
            failed[round(probe.batch_size / most_size * (columns - 1))] = cross
    labels = {0: format_bytes(most), _ROWS // 2: format_bytes(most / 2), _ROWS: "0"}
    edge = "│" if has_blocks else "|"
    rows = [
        f"{labels.get(index, ''):>{_LABEL}} {edge}{''.join(row).rstrip()}"
        for index, row in enumerate(grid)
    ]
    ends = f"{'0':<{columns - len(str(most_size))}}{most_size}"
    legend = f"{dot} fits  {cross} fails  {line} memory model  {rule} budget"
    top = f"{'':>{_LABEL}} {edge}{''.join(failed).rstrip()}"
    return ["", top, *rows, " " * (_LABEL + 2) + ends, " " * (_LABEL + 2) + legend]
