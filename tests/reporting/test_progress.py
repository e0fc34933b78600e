from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress

import pytest
from fakes import FakeProber
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reporting.fake_search import BUDGET, OOM_NOTE, PROBES, RESULT, Screen, fits, result
from strategies import accumulation_plans, results

from batchfinder.errors import TimeLimitError
from batchfinder.reporting.progress import TerminalReporter
from batchfinder.results.accumulation import AccumulationPlan
from batchfinder.results.probe import Outcome, Probe
from batchfinder.results.result import BatchSizeResult
from batchfinder.units import GIB

ESCAPE = "\x1b"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


def golden(text: str) -> list[str]:
    return lines(textwrap.dedent(text).strip("\n"))


def test_120_columns() -> None:
    screen = Screen(120).play().answer(plan=RESULT.accumulation_plan(4096))
    assert lines(screen.stderr) == [
        "cuda:0 NVIDIA H200   139.8 GiB, 1.0 GiB used by others, budget 132.2 GiB (5% headroom)",
        "",
        "  batch size  peak memory                          step",
        "           1      3.0 GiB  ▍                      41 ms  fits",
        "          16      4.9 GiB  ▋                      44 ms  fits",
        "        1041    131.8 GiB  ███████████████████▉  1.02 s  fits",
        "        1043                                             OOM",
        "        1042    131.9 GiB  ███████████████████▉  1.02 s  fits, confirmed by 3 steps",
        "",
    ]
    assert lines(screen.stdout) == golden("""
        Max batch size 1042     2.9 GiB fixed + 126.8 MiB per sample     5 probes, 8.42 s
        Batch size 1043 runs out of memory.
        Global batch 4096 = 1024 per device x 4 accumulation steps
    """)


def test_80_columns() -> None:
    screen = Screen(80).play().answer()
    assert lines(screen.stderr) == [
        "cuda:0 NVIDIA H200",
        "139.8 GiB, 1.0 GiB used by others, budget 132.2 GiB (5% headroom)",
        "",
        "  batch size  peak memory                       step",
        "           1      3.0 GiB  ▍                   41 ms  fits",
        "          16      4.9 GiB  ▋                   44 ms  fits",
        "        1041    131.8 GiB  ████████████████▉  1.02 s  fits",
        "        1043                                          OOM",
        "        1042    131.9 GiB  ████████████████▉  1.02 s  fits, confirmed by 3 steps",
        "",
    ]
    assert lines(screen.stdout) == golden("""
        Max batch size 1042   2.9 GiB fixed + 126.8 MiB per sample   5 probes, 8.42 s
        Batch size 1043 runs out of memory.
    """)


def test_40_columns() -> None:
    screen = Screen(40).play().answer()
    assert lines(screen.stderr) == [
        "cuda:0 NVIDIA H200",
        "139.8 GiB, 1.0 GiB used by others,",
        "budget 132.2 GiB (5% headroom)",
        "",
        "  batch size  peak memory",
        "           1      3.0 GiB  fits",
        "          16      4.9 GiB  fits",
        "        1041    131.8 GiB  fits",
        "        1043               OOM",
        "        1042    131.9 GiB  fits",
        "    confirmed by 3 steps",
        "",
    ]
    assert lines(screen.stdout) == golden("""
        Max batch size 1042
        2.9 GiB fixed + 126.8 MiB per sample
        5 probes, 8.42 s
        Batch size 1043 runs out of memory.
    """)


def test_20_columns() -> None:
    screen = Screen(20).play().answer()
    assert lines(screen.stderr)[4:] == [
        "headroom)",
        "",
        "  batch size",
        "           1  fits",
        "          16  fits",
        "        1041  fits",
        "        1043  OOM",
        "        1042  fits",
        "    confirmed by 3",
        "    steps",
        "",
    ]
    assert lines(screen.stdout) == golden("""
        Max batch size 1042
        2.9 GiB fixed +
        126.8 MiB per sample
        5 probes, 8.42 s
        Batch size 1043 runs
        out of memory.
    """)


PLAIN = [
    "cuda:0 NVIDIA H200   139.8 GiB, 1.0 GiB used by others, budget 132.2 GiB (5% headroom)",
    "  batch size  peak memory    step",
    "           1      3.0 GiB   41 ms  fits",
    "          16      4.9 GiB   44 ms  fits",
    "        1041    131.8 GiB  1.02 s  fits",
    "        1043                       OOM",
    "        1042    131.9 GiB  1.02 s  fits, confirmed by 3 steps",
]


def test_a_pipe_gets_plain_lines() -> None:
    screen = Screen().play().answer()
    assert screen.stderr.splitlines() == PLAIN
    assert screen.stdout.splitlines() == golden("""
        Max batch size 1042     2.9 GiB fixed + 126.8 MiB per sample     5 probes, 8.42 s
        Batch size 1043 runs out of memory.
    """)


def test_a_pipe_gets_no_live_line_and_no_wrapping() -> None:
    screen = Screen()
    note = "the loss is [bold]NaN[/bold] " * 20
    with screen.reporter as reporter:
        reporter.start(FakeProber(BUDGET, device="cpu"), 0.05)
        reporter.probing(1)
        reporter.probe(fits(1, 0.5, note=note))
    assert screen.stderr.splitlines() == [
        "cpu   budget 132.2 GiB (5% headroom)",
        "  batch size  peak memory    step",
        f"           1      3.0 GiB  500 ms  fits: {note.strip()}",
    ]


def test_no_color_is_respected() -> None:
    coloured = Screen(80, colour=True).play().answer()
    plain = Screen(80, colour=True, environment={"NO_COLOR": "1"}).play().answer()
    colours = re.compile(r"\x1b\[[\d;]*3[0-7]m")
    assert colours.search(coloured.stderr)
    assert not colours.search(plain.stderr + plain.stdout)


def test_without_block_characters_bars_are_made_of_hashes() -> None:
    screen = Screen(80, encoding="ascii").play().answer()
    assert lines(screen.stderr)[4:6] == [
        "           1      3.0 GiB  #                   41 ms  fits",
        "          16      4.9 GiB  #                   44 ms  fits",
    ]
    assert "################   1.02 s  fits" in screen.stderr


def test_characters_outside_the_encoding_are_escaped() -> None:
    screen = Screen(120, encoding="ascii")
    screen.play(Probe(1, Outcome.FAILED, steps=1, seconds=1.0, note="naïve ✗"))
    screen.answer(result(warnings=("größer",)))
    assert r"failed: na\xefve \u2717" in screen.stderr
    assert r"Warning: gr\xf6\xdfer" in screen.stderr


def test_quiet_prints_the_headline_and_the_plan() -> None:
    screen = Screen(80, quiet=True)
    with screen.reporter as reporter:
        reporter.start(FakeProber(BUDGET, device="cpu"), 0.05)
        reporter.probing(1)
        reporter.probe(PROBES[0])
    plan = RESULT.accumulation_plan(4096)
    screen.answer(result(warnings=("pass loss_fn",)), plan)
    assert screen.stderr == ""
    assert lines(screen.stdout) == golden(f"""
        Max batch size 1042   2.9 GiB fixed + 126.8 MiB per sample   5 probes, 8.42 s
        {plan}
    """)


def test_verbose_shows_the_phases_and_the_allocators_message() -> None:
    screen = Screen(120, verbose=True).play()
    assert lines(screen.stderr)[3:5] == [
        "           1      3.0 GiB  ▍                      41 ms  fits",
        "              forward/backward 3.0 GiB, optimizer step 3.0 GiB, 2 steps in 82 ms",
    ]
    assert OOM_NOTE in re.sub(r"\s+", " ", screen.stderr)


def test_warnings_go_to_stderr_before_the_answer() -> None:
    screen = Screen(80).answer(result(warnings=("the loss is [red]: pass\nloss_fn",)))
    assert lines(screen.stderr) == ["Warning: the loss is [red]: pass loss_fn", ""]
    assert "Warning" not in screen.stdout


@pytest.mark.parametrize(
    ("capacity", "others", "headroom", "facts"),
    [
        (None, None, 0.05, "budget 132.2 GiB (5% headroom)"),
        (140 * GIB, 0, 0.0, "140.0 GiB, budget 132.2 GiB (0% headroom)"),
        (140 * GIB, None, 0.075, "140.0 GiB, budget 132.2 GiB (7.5% headroom)"),
    ],
)
def test_the_header_leaves_out_unknown_values(
    capacity: int | None, others: int | None, headroom: float, facts: str
) -> None:
    screen = Screen()
    prober = FakeProber(BUDGET, device="cpu", capacity_bytes=capacity, used_by_others_bytes=others)
    screen.reporter.start(prober, headroom)
    assert screen.stderr.splitlines()[0] == f"cpu   {facts}"


def test_the_header_says_that_more_is_free_where_lengths_differ() -> None:
    screen = Screen()
    screen.reporter.start(FakeProber(BUDGET, device="cuda:0"), 0.05, room=0.05)
    kept = "(5% headroom, 5% more as lengths differ)"
    assert " ".join(screen.stderr.split()).startswith(f"cuda:0 budget 132.2 GiB {kept}")


@pytest.mark.parametrize(
    ("device", "is_limited", "says_so"),
    [("cpu", False, True), ("cpu", True, False), ("cuda:0", False, False)],
)
def test_a_search_on_a_cpu_without_a_limit_says_how_to_set_one(
    device: str, is_limited: bool, says_so: bool
) -> None:
    screen = Screen()
    screen.reporter.start(FakeProber(BUDGET, device=device), 0.05, is_limited=is_limited)
    assert ("Try --memory-limit" in screen.stderr) is says_so


def test_the_live_line_shows_the_size_until_the_probe_ends() -> None:
    screen = Screen(80)
    with screen.reporter as reporter:
        reporter.start(FakeProber(BUDGET, device="cpu"), 0.05)
        reporter.probing(1041)
        assert "trying 1041 …" in screen.stderr
        reporter.probing(1042, confirm=True)
        assert "confirming 1042 …" in screen.stderr
        reporter.probe(PROBES[-1])
    erased = screen.stderr.split("confirming 1042 …")[-1]
    assert SHOW_CURSOR in erased
    assert "\x1b[1A\x1b[2K" in erased


def test_the_live_line_is_ascii_for_ascii_terminals() -> None:
    screen = Screen(80, encoding="ascii")
    with screen.reporter as reporter:
        reporter.probing(1041)
    assert "trying 1041 ..." in screen.stderr


def test_an_exception_leaves_the_cursor_visible() -> None:
    screen = Screen(80)
    with pytest.raises(ZeroDivisionError), screen.reporter as reporter:  # noqa: PT012 - both needed
        reporter.probing(1041)
        raise ZeroDivisionError
    assert screen.stderr.rindex(SHOW_CURSOR) > screen.stderr.rindex(HIDE_CURSOR)


def test_an_error_is_shown_at_its_batch_size() -> None:
    screen = Screen()
    with pytest.raises(ZeroDivisionError), screen.reporter as reporter:  # noqa: PT012 - both needed
        reporter.start(FakeProber(BUDGET, device="cpu"), 0.05)
        reporter.probing(1041)
        raise ZeroDivisionError
    assert screen.stderr.splitlines()[-1].split() == ["1041", "error"]


def test_the_end_of_the_time_is_no_error_of_a_size() -> None:
    screen = Screen()
    with pytest.raises(TimeLimitError), screen.reporter as reporter:  # noqa: PT012 - both needed
        reporter.start(FakeProber(BUDGET, device="cpu"), 0.05)
        reporter.probing(1041)
        raise TimeLimitError(60)
    assert "1041" not in screen.stderr


def test_finish_may_be_called_twice() -> None:
    screen = Screen(80).play()
    before = screen.stderr
    screen.reporter.finish()
    assert screen.stderr == before


def test_by_default_progress_is_on_stderr_and_the_answer_on_stdout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reporter = TerminalReporter()
    reporter.start(FakeProber(BUDGET, device="cpu"), 0.05)
    reporter.answer(RESULT)
    captured = capsys.readouterr()
    assert captured.out.startswith("Max batch size 1042 ")
    assert captured.err.startswith("cpu ")


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    results(),
    st.none() | accumulation_plans(),
    st.sampled_from([None, 1, 20, 40, 80, 120]),
    st.sampled_from(["utf-8", "ascii", "cp437"]),
    st.booleans(),
)
def test_anything_can_be_shown_anywhere(
    result: BatchSizeResult,
    plan: AccumulationPlan | None,
    width: int | None,
    encoding: str,
    verbose: bool,
) -> None:
    screen = Screen(width, encoding=encoding, verbose=verbose).play(*result.probes)
    screen.answer(result, plan)
    assert ESCAPE not in screen.stderr + screen.stdout
    assert screen.stdout.strip()


CHILD = f"""
import time
from types import SimpleNamespace
from batchfinder.reporting.progress import TerminalReporter

prober = SimpleNamespace(
    device="cpu", capacity_bytes=None, used_by_others_bytes=None, budget_bytes={BUDGET}
)
with TerminalReporter() as reporter:
    reporter.start(prober, 0.05)
    reporter.probing(1041)
    time.sleep(60)
"""


def read_until(terminal: int, text: str, deadline_seconds: float = 20.0) -> str:
    """Return the output of a program in a terminal, up to a text or to its end."""
    shown = ""
    end = time.monotonic() + deadline_seconds
    # Linux reports the end of the far side as an error.
    with suppress(OSError):
        while text not in shown and time.monotonic() < end:
            shown += os.read(terminal, 1024).decode()
    return shown


def test_ctrl_c_restores_a_real_terminal() -> None:
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
    )
    os.close(theirs)
    try:
        assert "trying 1041" in read_until(ours, "trying 1041")
        child.send_signal(signal.SIGINT)
        rest = read_until(ours, "KeyboardInterrupt\r\n")
        assert SHOW_CURSOR in rest
        assert HIDE_CURSOR not in rest
        assert child.wait(timeout=10) == -signal.SIGINT
    finally:
        child.kill()
        child.wait()
        os.close(ours)


def test_a_dumb_terminal_gets_no_live_line() -> None:
    screen = Screen(80, environment={"TERM": "dumb"})
    with screen.reporter as reporter:
        reporter.probing(1041)
    assert screen.stderr == ""
