"""The sections of a comparison and of a sweep, from their JSON objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchfinder.reporting.page.svg import bars, heat_map
from batchfinder.reporting.wording import bytes_or_dash

# More columns leave no room for their numbers.
MOST_COLUMNS = 8

# Above its answer, a value runs out of memory if its line is above this share. A line below it was
# cut off by --max-batch-size.
FULL = 0.9

Data = Mapping[str, Any]

MEMORY = ("peak", "model_state", "per_sample")
COMPARED = ("strategy", "max batch", "peak", "model states", "per sample", "samples/s", "note")


def comparison_rows(data: Data) -> list[tuple[str, ...]]:
    """Return the rows of a comparison, with a header.

    Raises:
        KeyError: it is none.
    """
    rows: list[tuple[str, ...]] = [COMPARED]
    for row in data["rows"]:
        rate = row["samples_per_second"]
        marks = [mark for mark in ("largest", "fastest") if data[mark] == row["strategy"]]
        rows.append(
            (
                row["strategy"],
                _size(row),
                *(bytes_or_dash(row[f"{name}_bytes"]) for name in MEMORY),
                f"{rate:.3g}" if rate else "-",
                ", ".join([*marks, *filter(None, [row["note"]])]),
            )
        )
    return rows


def sweep_rows(data: Data) -> list[tuple[str, ...]]:
    """Return the rows of a sweep, with a header.

    Raises:
        KeyError: it is none.
    """
    rows: list[tuple[str, ...]] = [(*data["over"], "max batch", "peak", "per sample", "note")]
    for row in data["rows"]:
        values = [str(row[name]) for name in data["over"]]
        memory = [bytes_or_dash(row[f"{name}_bytes"]) for name in ("peak", "per_sample")]
        rows.append((*values, _size(row), *memory, row["note"]))
    return rows


def size_chart(rows: Sequence[Sequence[str]], sizes: Sequence[int], names: int = 1) -> str:
    """Draw the batch size of each row.

    Args:
        rows: of a table, with its header.
        sizes: of each row; 0 where nothing fits.
        names: the columns at the left that name a row.
    """
    named = [", ".join(row[:names]) for row in rows[1:]]
    bars_of = [
        (name, float(size), f"{size:,}" if size else "nothing fits")
        for name, size in zip(named, sizes, strict=True)
    ]
    best = max(sizes, default=0)
    return bars(
        "Largest batch size", bars_of, lambda index: "bar best" if sizes[index] == best else "bar"
    )


def memory_map(data: Data) -> str:
    """Draw how full the memory is for each swept value and batch sizes in powers of two.

    Args:
        data: of a sweep. Values without a line of memory are left out.
    """
    lines = [row for row in data["rows"] if row["peak_bytes"] and row["per_sample_bytes"]]
    largest = max((row["batch_size"] for row in lines), default=0)
    sizes = [2**power for power in range(largest.bit_length() + 1)]
    # Every other one where there are many.
    sizes = sizes[:: 1 + len(sizes) // MOST_COLUMNS]
    # The peaks of estimates include what lies beside the budget.
    most = max([data["budget_bytes"], *(row["peak_bytes"] for row in lines)])
    rows = []
    for row in lines:
        answer, peak, slope = (row[key] for key in ("batch_size", "peak_bytes", "per_sample_bytes"))
        shares = [(size, max(0, peak + (size - answer) * slope) / most) for size in sizes]
        name = ", ".join(str(row[swept]) for swept in data["over"])
        rows.append((name, [None if n > answer and one > FULL else one for n, one in shares]))
    return heat_map("Share of the memory by batch size", [f"{size:,}" for size in sizes], rows)


def _size(row: Data) -> str:
    return f"{row['batch_size']:,}" if row["batch_size"] else "-"
