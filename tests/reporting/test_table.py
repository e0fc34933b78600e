from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reporting.fake_search import BUDGET, OOM_NOTE, fits
from strategies import byte_counts, probes

from batchfinder.reporting.table import ProbeTable
from batchfinder.results.memory_model import Phase
from batchfinder.results.probe import Outcome, Probe
from batchfinder.units import MIB

OOM = Probe(64, Outcome.OOM, steps=1, seconds=0.5)
FAILED = Probe(64, Outcome.FAILED, steps=1, seconds=0.5, note="killed by SIGABRT")

widths = st.none() | st.integers(0, 200)


def outcome(probe: Probe) -> str:
    """Return the text of the row after the columns."""
    return ProbeTable(BUDGET).row(probe).plain.splitlines()[0][35:]


def bar(share: float, *, width: int = 120, has_blocks: bool = True) -> str:
    table = ProbeTable(1000 * MIB, width=width, has_blocks=has_blocks)
    peak = int(share * 1000) * MIB
    row = table.row(fits(1, 1.0, phase_peak_bytes={Phase.FORWARD_BACKWARD: peak}))
    return row.plain[27 : 27 + table.bar_width].rstrip()


@pytest.mark.parametrize(
    ("probe", "text"),
    [
        (fits(64, 1.0), "fits"),
        (fits(64, 1.0, confirmed=True, steps=3), "fits, confirmed by 3 steps"),
        (fits(64, 1.0, confirmed=True, steps=1), "fits, confirmed by 1 step"),
        (fits(64, 1.0, note="the loss was NaN"), "fits: the loss was NaN"),
        (OOM, "OOM"),
        (dataclasses.replace(OOM, confirmed=True), "OOM when confirming"),
        (dataclasses.replace(OOM, note=OOM_NOTE), "OOM"),
        (
            dataclasses.replace(OOM, confirmed=True, note="memory still grew after 10 steps"),
            "OOM when confirming: memory still grew after 10 steps",
        ),
        (FAILED, "failed: killed by SIGABRT"),
        (
            dataclasses.replace(FAILED, confirmed=True),
            "failed when confirming: killed by SIGABRT",
        ),
    ],
)
def test_each_outcome_is_described(probe: Probe, text: str) -> None:
    assert outcome(probe) == text


def test_notes_are_one_line_without_control_codes() -> None:
    probe = dataclasses.replace(FAILED, note="first\n\tsecond \x1b[31mred\r")
    assert outcome(probe) == r"failed: first second \x1b[31mred"


def test_only_a_size_that_fits_has_readings() -> None:
    probe = dataclasses.replace(fits(64, 1.0), outcome=Outcome.OOM)
    row = ProbeTable(BUDGET, width=120).row(probe)
    assert row.plain.split() == ["64", "OOM"]


@pytest.mark.parametrize(
    ("share", "blocks"),
    [
        (0, "▏"),
        (0.001, "▏"),
        (0.025, "▌"),
        (0.05, "█"),
        (0.5, "█" * 10),
        (0.98, "█" * 19 + "▌"),
        (0.999, "█" * 19 + "▉"),
        (1, "█" * 20),
        (1.5, "█" * 20),
    ],
)
def test_the_bar_grows_by_eighths_and_is_full_at_the_budget(share: float, blocks: str) -> None:
    assert bar(share) == blocks


@pytest.mark.parametrize(("share", "hashes"), [(0, 1), (0.5, 10), (0.999, 19), (1, 20)])
def test_without_blocks_the_bar_is_made_of_hashes(share: float, hashes: int) -> None:
    assert bar(share, has_blocks=False) == "#" * hashes


@pytest.mark.parametrize(
    ("width", "header"),
    [
        (120, "  batch size  peak memory" + " " * 22 + "    step"),
        (80, "  batch size  peak memory" + " " * 19 + "    step"),
        (71, "  batch size  peak memory" + " " * 10 + "    step"),
        (70, "  batch size  peak memory    step"),
        (41, "  batch size  peak memory    step"),
        (40, "  batch size  peak memory"),
        (33, "  batch size  peak memory"),
        (32, "  batch size"),
        (20, "  batch size"),
        (0, "  batch size"),
        (None, "  batch size  peak memory    step"),
    ],
)
def test_narrow_terminals_drop_columns_one_by_one(width: int | None, header: str) -> None:
    assert ProbeTable(BUDGET, width=width).header().plain == header


def test_a_note_of_two_lines_is_wrapped_beside_the_columns() -> None:
    probe = dataclasses.replace(FAILED, note="the worker was killed by SIGABRT")
    assert ProbeTable(BUDGET, width=71).row(probe).plain.splitlines() == [
        "          64" + " " * 33 + "failed: the worker was",
        " " * 45 + "killed by SIGABRT",
    ]


def test_a_longer_note_is_wrapped_below_the_row() -> None:
    probe = dataclasses.replace(FAILED, note="the worker was killed by SIGABRT " * 3)
    assert ProbeTable(BUDGET, width=71).row(probe).plain.splitlines() == [
        "          64" + " " * 33 + "failed",
        "              the worker was killed by SIGABRT the worker was killed by",
        "              SIGABRT the worker was killed by SIGABRT",
    ]


@given(probes(), byte_counts, st.integers(20, 200), st.booleans(), st.booleans())
def test_no_line_is_wider_than_the_terminal(
    probe: Probe, budget: int, width: int, has_blocks: bool, verbose: bool
) -> None:
    table = ProbeTable(budget, width, has_blocks, verbose)
    # Step times from a minute on are wider than their column, which is no harm.
    probe = dataclasses.replace(probe, step_seconds=1.0)
    assert max(len(line) for line in table.row(probe).plain.splitlines()) <= width


@given(probes(), byte_counts, widths, st.booleans())
def test_every_row_begins_with_the_size_and_has_the_outcome(
    probe: Probe, budget: int, width: int | None, verbose: bool
) -> None:
    lines = ProbeTable(budget, width, verbose=verbose).row(probe).plain.splitlines()
    assert lines[0].split()[0] == str(probe.batch_size)
    assert {"fits": "fits", "oom": "OOM", "failed": "failed"}[probe.outcome.value] in lines[0]


@given(probes(), byte_counts)
def test_without_blocks_a_row_of_plain_notes_is_ascii(probe: Probe, budget: int) -> None:
    table = ProbeTable(budget, width=120, has_blocks=False, verbose=True)
    assert table.row(dataclasses.replace(probe, note="plain")).plain.isascii()


def test_the_peak_is_in_the_bytes_that_count_against_the_budget() -> None:
    phases = {Phase.FORWARD_BACKWARD: 3, Phase.OPTIMIZER_STEP: 5}
    probe = fits(1, 1.0, phase_peak_bytes=phases, peak_reserved_bytes=9, peak_allocated_bytes=2)
    assert probe.peak_bytes == 5
    assert dataclasses.replace(probe, phase_peak_bytes={}).peak_bytes == 9
    assert dataclasses.replace(probe, phase_peak_bytes={}, peak_reserved_bytes=None).peak_bytes == 2
