"""A comparison as a table: one row per strategy, and the memory equation of two of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchfinder.reporting.columns import aligned, fitted, title_of
from batchfinder.reporting.wording import bytes_or_dash
from batchfinder.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from batchfinder.results.accumulation import Split
    from batchfinder.studies.comparison import Comparison, StrategyRow


def comparison_table(comparison: Comparison, width: float = math.inf) -> list[str]:
    """Tabulate the strategies; several lines per strategy if ``width`` is too small.

    The strategy with the largest batch and the fastest one are marked. The reasons why strategies
    are impossible are below the table, because a row has no room for a sentence.
    """
    has_plan = comparison.global_batch_size is not None
    head = ["strategy", "max batch", "", "peak", "model states", "per sample"]
    head += ["samples/s", "per 1,000"] if comparison.is_measured else []
    if has_plan:
        head.append(f"for {comparison.global_batch_size}")
        head += ["one step"] if comparison.is_measured else []
    head.append("note")
    rows = [head]
    base = comparison.rows[0]
    for row in comparison.rows:
        memory = (row.peak_bytes, row.model_state_bytes, row.per_sample_bytes)
        cells = [row.strategy.name, _size(row), _gain(row, base), *map(bytes_or_dash, memory)]
        if comparison.is_measured:
            rate, seconds = row.samples_per_second, row.seconds_per_1000_samples
            cells += [
                format_rate(rate) if rate else "-",
                format_seconds(seconds) if seconds else "-",
            ]
        if has_plan:
            cells.append(split_text(row.split) if row.split else "-")
            took = row.split_seconds
            cells += [format_seconds(took) if took else "-"] if comparison.is_measured else []
        rows.append([*cells, _note(row, comparison)])
    measured = comparison.is_measured
    title = title_of(comparison.device, comparison.budget_bytes, is_measured=measured)
    title += f"; {base.strategy.name}: {comparison.base}" if comparison.base else ""
    table = fitted(rows, width, left=(0, len(head) - 1))
    return [title, *table, *_blocks(comparison), *_remarks(comparison)]


def equation_lines(first: StrategyRow, second: StrategyRow) -> list[str]:
    """Fill in the memory equation for two strategies, each at its largest batch size."""
    rows = [["memory at", _at(first), _at(second), "difference"]]
    for name in first.terms:
        mine, other = first.terms[name], second.terms[name]
        if mine or other:
            rows.append([name, format_bytes(mine), format_bytes(other), _signed(other - mine)])
    totals = sum(first.terms.values()), sum(second.terms.values())
    rows.append(["= peak", *map(format_bytes, totals), _signed(totals[1] - totals[0])])
    mine_each, other_each = first.per_sample_bytes, second.per_sample_bytes
    if mine_each is not None and other_each is not None:
        cells = format_bytes(mine_each), format_bytes(other_each), _signed(other_each - mine_each)
        rows.append(["per sample", *cells])
    return aligned([["", first.strategy.name, second.strategy.name, ""], *rows])


def _at(row: StrategyRow) -> str:
    size = row.batch_size or (row.result and row.result.probes[0].batch_size)
    return f"batch size {size}"


def _signed(size: float) -> str:
    return f"+{format_bytes(size)}" if size > 0 else format_bytes(size)


def _size(row: StrategyRow) -> str:
    if row.result is None:
        return "-"
    ranks = f" x {row.world_size}" if row.world_size > 1 else ""
    return f"{row.batch_size}{ranks}" if row.batch_size else "none fits"


def _gain(row: StrategyRow, base: StrategyRow) -> str:
    if not row.batch_size or not base.batch_size or row is base:
        return ""
    return f"x{row.batch_size / base.batch_size:.2f}"


def split_text(split: Split) -> str:
    """Return micro-batch x accumulation steps x ranks, such as ``"512 x 8"``."""
    ranks = f" x {split.world_size}" if split.world_size > 1 else ""
    return f"{split.batch_size} x {split.gradient_accumulation_steps}{ranks}"


def _note(row: StrategyRow, comparison: Comparison) -> str:
    marks = [
        f"<- {mark}"
        for mark, marked in (("largest", comparison.largest), ("fastest", comparison.fastest))
        if row is marked
    ]
    if row.result is None:
        # A strategy of several ranks is not measured here. The row's note says how to run it.
        is_left_out = comparison.is_measured and row.strategy.parallel
        marks.append("not measured" if is_left_out else "impossible")
    split, wanted = row.split, comparison.global_batch_size
    if split is not None and split.global_batch_size != wanted:
        marks.append(f"makes {split.global_batch_size}, not {wanted}")
    return ", ".join(marks)


def _blocks(comparison: Comparison) -> list[str]:
    """Say once what each kind of checkpointing recomputes."""
    told = {row.strategy.checkpointing: row.blocks for row in comparison.rows if row.blocks}
    return [f"{how}: {blocks}" for how, blocks in told.items()]


def _remarks(comparison: Comparison) -> list[str]:
    """Say each remark once, after the strategies that it is on."""
    named: dict[str, list[str]] = {}
    for row in comparison.rows:
        named.setdefault(row.note, []).append(row.strategy.name)
    return [f"{', '.join(names)}: {note}" for note, names in named.items() if note]


def marked_rows(comparison: Comparison) -> Sequence[StrategyRow]:
    """Return the two rows to explain: the one that changes nothing, and the largest other one."""
    first, *others = comparison.rows
    possible = tuple(row for row in others if row.terms)
    largest = dataclasses.replace(comparison, rows=possible).largest
    return [first, largest or possible[0]] if possible and first.terms else []
