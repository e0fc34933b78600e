"""The sections of a comparison and of a sweep, from their JSON objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchfinder.reporting.comparison import split_text
from batchfinder.reporting.page.svg import bars, heat_map
from batchfinder.reporting.wording import bytes_or_dash, size_or_none_fits
from batchfinder.results.accumulation import Split
from batchfinder.units import format_bytes, format_rate, format_seconds

# More columns leave no room for their numbers.
MOST_COLUMNS = 8

# Above its answer, a value runs out of memory if its line is above this share. A line below it was
# cut off by --max-batch-size.
FULL = 0.9

Data = Mapping[str, Any]

# Columns without any value are left out of the page's table.
COLUMNS = ("max batch", "peak", "model states", "per sample", "samples/s")


def names_of(data: Data) -> list[str]:
    """Return the columns that name a row: the swept arguments, or the strategy."""
    return list(data.get("over", ["strategy"]))


def rows_of(data: Data) -> list[tuple[str, ...]]:
    """Return the rows of a comparison or a sweep, with a header.

    Raises:
        KeyError: it is neither.
    """
    names = names_of(data)
    plan = f"for {data.get('global_batch_size')}", "one step"
    rows: list[tuple[str, ...]] = [(*names, *COLUMNS, *plan, "note")]
    for row in data["rows"]:
        rate, split, step = map(row.get, ("samples_per_second", "split", "global_step_seconds"))
        rows.append(
            (
                *(str(row[name]) for name in names),
                _size_of(row),
                bytes_or_dash(row["peak_bytes"]),
                bytes_or_dash(row.get("model_state_bytes")),
                bytes_or_dash(row["per_sample_bytes"]),
                format_rate(rate) if rate else "-",
                split_text(Split(**split)) if split else "-",
                format_seconds(step) if step else "-",
                _note_of(row, data),
            )
        )
    return rows


def remarks_of(data: Data) -> list[str]:
    """Return the blocks that are checkpointed, and the remarks on strategies; none on a sweep."""
    told: dict[str, list[str]] = {}
    for row in data["rows"] if "strategy" in data["rows"][0] else ():
        how = row["levers"]["checkpointing"]
        if row["blocks"] and how not in told.setdefault(row["blocks"], []):
            told[row["blocks"]].append(how)
        if row["note"]:
            told.setdefault(row["note"], []).append(row["strategy"])
    return [f"{', '.join(names)}: {text}" for text, names in told.items()]


def term_rows(data: Data) -> list[tuple[str, ...]]:
    """Return what uses the memory at the peak of each estimated strategy, with a header.

    Empty for a study that has only measured rows.
    """
    rows = [row for row in data["rows"] if row.get("terms")]
    if not rows:
        return []
    terms = [name for name in rows[0]["terms"] if any(row["terms"][name] for row in rows)]
    return [("strategy", *terms)] + [
        (row["strategy"], *(format_bytes(row["terms"][name]) for name in terms)) for row in rows
    ]


def size_chart(data: Data) -> str:
    """Draw the batch size of each row of a comparison or a sweep."""
    sizes = [row["batch_size"] for row in data["rows"]]
    rows = [(_name_of(row, data), float(row["batch_size"]), _size_of(row)) for row in data["rows"]]
    best = max(sizes, default=0)
    return bars(
        "Largest batch size", rows, lambda index: "bar best" if sizes[index] == best else "bar"
    )


def memory_map(data: Data) -> str:
    """Draw how full the memory is for each swept value and batch sizes in powers of two.

    Values without a line of memory are left out.
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
        rows.append(
            (_name_of(row, data), [None if n > answer and one > FULL else one for n, one in shares])
        )
    return heat_map("Share of the memory by batch size", [f"{size:,}" for size in sizes], rows)


def _note_of(row: Data, data: Data) -> str:
    """Return the last cell of a row. A strategy's reason, a sentence, is below the table."""
    if "strategy" not in row:
        return str(row["note"])
    marks = [mark for mark in ("largest", "fastest") if data[mark] == row["strategy"]]
    split, wanted = row.get("split"), data.get("global_batch_size")
    if split and Split(**split).global_batch_size != wanted:
        marks.append(f"makes {Split(**split).global_batch_size}")
    return ", ".join(marks)


def _size_of(row: Data) -> str:
    if row["note"] and not row.get("result"):  # impossible, or an error: no size was tried
        return "-"
    return size_or_none_fits(row["batch_size"])


def _name_of(row: Data, data: Data) -> str:
    return ", ".join(str(row[name]) for name in names_of(data))
