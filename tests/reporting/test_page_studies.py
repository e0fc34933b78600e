"""Sweeps and comparisons on the page."""

from __future__ import annotations

import re
from typing import Any

from reporting.test_page import Outline

from batchfinder.reporting.page.page import page_of

MEASURED = {"device": "cuda:0", "budget_bytes": 1000, "is_measured": True}


def test_a_sweep_is_drawn_as_a_map_with_the_sizes_that_run_out() -> None:
    row = {"peak_bytes": 900, "note": "", "probes": [], "confirmed_steps": 3}
    rows = [
        {**row, "seq_len": 128, "batch_size": 8, "per_sample_bytes": 100},
        {**row, "seq_len": 512, "batch_size": 2, "per_sample_bytes": 400},
    ]
    sweep = {"over": ["seq_len"], **MEASURED, "rows": rows}

    page = page_of([sweep])

    assert Outline(page).classes["cell oom-cell"] == 1 + 3  # 16; 4, 8 and 16
    cells = re.findall(r'text-anchor="middle">([0-9]+%|OOM)<', page)
    assert cells == ["20%", "30%", "50%", "90%", "OOM", "50%", "90%", "OOM", "OOM", "OOM"]


def test_a_size_that_only_the_largest_allowed_one_kept_out_is_not_out_of_memory() -> None:
    row = {"peak_bytes": 400, "note": "", "probes": [], "confirmed_steps": 3}
    rows = [{**row, "seq_len": 128, "batch_size": 2, "per_sample_bytes": 100}]
    sweep = {"over": ["seq_len"], **MEASURED, "rows": rows}

    page = page_of([sweep])

    assert re.findall(r'text-anchor="middle">([0-9]+%|OOM)<', page) == ["30%", "40%", "60%"]


def test_what_was_not_tried_is_not_shown_as_too_large() -> None:
    row: dict[str, Any] = {
        "peak_bytes": None,
        "per_sample_bytes": None,
        "probes": [],
        "confirmed_steps": 0,
    }
    rows = [{**row, "depth": 1, "batch_size": 0, "note": "ValueError: no"}]
    rows += [{**row, "depth": 2, "batch_size": 0, "note": ""}]

    page = page_of([{"over": ["depth"], **MEASURED, "rows": rows}])

    assert re.findall(r">(-|none fits)</text>", page) == ["-", "none fits"]


def test_strategies_show_how_they_reach_the_global_batch_and_reasons_below_the_table() -> None:
    row: dict[str, Any] = {
        "strategy": "as it is", "levers": {"checkpointing": None}, "blocks": "", "note": "",
        "batch_size": 8, "peak_bytes": 900, "per_sample_bytes": 100, "result": {"probes": []},
        "samples_per_second": 10.0, "global_step_seconds": 6.4,
        "split": {"batch_size": 8, "gradient_accumulation_steps": 4, "world_size": 2},
    }  # fmt: skip
    more = {"strategy": "checkpointing", "levers": {"checkpointing": "checkpointing"}}
    rows = [
        row,
        {**row, **more, "blocks": "4 x Block", "batch_size": 9},
        {
            **row,
            **more,
            "strategy": "selective",
            "levers": {"checkpointing": "selective"},
            "blocks": "4 x Block",
        },
        {**row, "strategy": "ddp", "note": "it needs 2 processes", "result": None, "split": None},
    ]
    marks = {"largest": "checkpointing", "fastest": "as it is", "global_batch_size": 64}

    page = page_of([{**MEASURED, **marks, "rows": rows}])

    assert re.findall(r'<td data-name="(for 64|one step|note)">([^<]*)</td>', page)[:6] == [
        ("for 64", "8 x 4 x 2"), ("one step", "6.40 s"), ("note", "fastest"),
        ("for 64", "8 x 4 x 2"), ("one step", "6.40 s"), ("note", "largest"),
    ]  # fmt: skip
    assert "largest: checkpointing · fastest: as it is</p>" in page
    assert "<p>checkpointing, selective: 4 x Block</p>" in page
    assert "<p>ddp: it needs 2 processes</p>" in page
