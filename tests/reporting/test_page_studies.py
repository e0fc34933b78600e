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
