"""A sweep as a table, and as what people paste into their configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from batchfinder.reporting.columns import fitted, title_of
from batchfinder.reporting.wording import bytes_or_dash
from batchfinder.units import format_number

if TYPE_CHECKING:
    from batchfinder.studies.sweep_result import Sweep, SweepRow


def sweep_table(sweep: Sweep, width: float = math.inf) -> list[str]:
    """Tabulate the values; one line per value of a row if ``width`` is too small."""
    has_tokens = sweep.max_tokens is not None
    head = [*sweep.over, "max batch", *(["tokens"] if has_tokens else []), "peak", "per sample"]
    head += ["probes", "note"] if sweep.is_measured else ["note"]
    rows = [head]
    for row in sweep.rows:
        tokens = [str(round(row.batch_size * (row.length or 0)))] if has_tokens else []
        cells = [*map(str, row.values.values()), _size(row), *tokens]
        cells += [bytes_or_dash(row.peak_bytes), bytes_or_dash(row.per_sample_bytes)]
        cells += [str(len(row.probes)), _note(row)] if sweep.is_measured else [_note(row)]
        rows.append(cells)
    title = title_of(sweep.device, sweep.budget_bytes, is_measured=sweep.is_measured)
    return [title, *fitted(rows, width, left=(len(head) - 1,))]


def paste_lines(sweep: Sweep) -> list[str]:
    """Return what a sweep says as code and configuration; nothing for a sweep over pairs."""
    lines = []
    if sweep.mixed_percent is None and len(sweep.buckets) > 1:
        lines.append(
            "# For each length alone. A training that mixes lengths needs more memory: keep about "
            "10% free."
        )
    if sweep.max_tokens is not None:
        swept = [row.length or 0 for row in sweep.rows]
        lines.append(
            f"max_tokens = {sweep.max_tokens}  # max_tokens // length examples fit, at any length "
            f"from {format_number(min(swept))} to {format_number(max(swept))}"
        )
    if sweep.buckets:
        buckets = {format_number(length): size for length, size in sweep.buckets.items()}
        lengths, sizes = ", ".join(buckets), ", ".join(map(str, buckets.values()))
        lines += [
            buckets_line(buckets),
            f"lhotse: FixedBucketBatchSizeConstraint(max_seq_len_buckets=[{lengths}], "
            f"batch_sizes=[{sizes}])",
            f"NeMo: bucket_duration_bins=[{lengths}] bucket_batch_size=[{sizes}]",
        ]
    return lines


def buckets_line(buckets: Mapping[str, int]) -> str:
    """Return the batch size for each bucket of lengths as a line of Python."""
    pairs = ", ".join(f"{length}: {size}" for length, size in buckets.items())
    return f"batch_sizes = {{{pairs}}}  # by the longest in the bucket"


def _size(row: SweepRow) -> str:
    if row.note:
        return "-"
    return str(row.batch_size) if row.batch_size else "none fits"


def _note(row: SweepRow) -> str:
    if row.note or not row.confirmed_steps:
        return row.note
    return f"confirmed by {row.confirmed_steps} steps"
