"""Tables of plain text, and the title of a device above them."""

from __future__ import annotations

from collections.abc import Sequence

from batchfinder.units import format_bytes


def title_of(device: str, budget_bytes: int, *, is_measured: bool) -> str:
    """Return the line above a table: the device and its budget."""
    return f"{device}, {budget_of(budget_bytes, is_measured=is_measured)}"


def budget_of(budget_bytes: int, *, is_measured: bool) -> str:
    """Return a study's budget. Unlike the measured peaks, the estimated ones exceed it."""
    beside = "" if is_measured else " beside the CUDA context, which the peaks include"
    return f"budget {format_bytes(budget_bytes)}{beside}"


def fitted(rows: Sequence[Sequence[str]], width: float, left: Sequence[int] = (0,)) -> list[str]:
    """Return a table whose first row is its header, or one paragraph a row if it is too wide."""
    lines = aligned(rows, left)
    if max(map(len, lines)) <= width:
        return lines
    header, *rest = rows
    paragraphs = [aligned(list(zip(header, row, strict=True)), left=(0, 1)) for row in rest]
    return [line for paragraph in paragraphs for line in ("", *paragraph)][1:]


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Pad the cells to columns: the ``left`` ones flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
