"""Memory against batch size as text."""

from __future__ import annotations

from reporting.fake_search import RESULT, Screen, result

from batchfinder.reporting.chart import memory_lines
from batchfinder.results.result import Status


def test_the_chart_shows_probes_line_budget_and_failure() -> None:
    lines = memory_lines(RESULT, 50, has_blocks=False)

    assert lines[1:-2] == [
        "           |                                     x",
        " 132.2 GiB |-------------------------------------o",
        "           |                                 ...",
        "           |                              ...",
        "           |                          ....",
        "           |                       ...",
        "           |                    ...",
        "  66.1 GiB |                 ...",
        "           |              ...",
        "           |           ...",
        "           |        ...",
        "           |    ....",
        "           | ...",
        "         0 |oo",
    ]


def test_nothing_is_drawn_where_nothing_fits() -> None:
    assert memory_lines(result(status=Status.NOTHING_FITS, probes=RESULT.probes[3:4]), 50) == []


def test_the_answer_is_followed_by_the_chart_if_asked_for() -> None:
    screen = Screen()
    screen.reporter.answer(RESULT, chart=True)

    assert screen.stdout.startswith("Max batch size 1042")
    assert "memory model" in screen.stdout.splitlines()[-1]
