"""Tables of plain text, and the title of a device above them."""

from __future__ import annotations

from collections.abc import Sequence

from batchfinder.units import format_bytes


def title_of(device: str, budget_bytes: int, *, is_measured: bool) -> str:
    """Return the line above a table: the device and its budget."""
    return f"{device}, {budget_of(budget_bytes, is_measured=is_measured)}"


def budget_of(budget_bytes: int, *, is_measured: bool) -> str:
    """Return a study's budget as text. Estimated peaks exceed it by the CUDA context."""
    beside = "" if is_measured else " beside the CUDA context, which the peaks include"
    return f"budget {format_bytes(budget_bytes)}{beside}"


def fitted(rows: Sequence[Sequence[str]], width: float, left: Sequence[int] = (0,)) -> list[str]:
    """Return a table whose first row is its header.

    If it is too wide and its rows begin with a name, the columns of text stand on a line above the
    others. If that is too wide as well, each row is a paragraph.
    """
    lines = aligned(rows, left)
    if max(map(len, lines)) > width and 0 in left:
        names = ["  ".join(filter(None, (row[column] for column in left))) for row in rows]
        cells = [[cell for i, cell in enumerate(row) if i not in left] for row in rows]
        pairs = zip(names, aligned(cells, left=()), strict=True)
        lines = [line for name, values in pairs for line in (name, f"  {values}")]
    if max(map(len, lines)) <= width:
        return lines
    header, *rest = rows
    filled = [[pair for pair in zip(header, row, strict=True) if pair[1]] for row in rest]
    return [line for pairs in filled for line in ("", *aligned(pairs, left=(0, 1)))][1:]


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
