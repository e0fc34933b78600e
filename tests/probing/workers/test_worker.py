"""Worker processes that die, hang or go astray, and what the parent makes of it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from processes import eventually, is_gone, supervisor

from batchfinder import Outcome
from batchfinder.errors import StepError, UsageError, UserCodeError, WorkerError
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.setup_source import SetupSource
from batchfinder.probing.workers.supervisor import Supervisor

pytestmark = pytest.mark.usefixtures("warm_workers")

TARGETS = Path(__file__).parents[2] / "targets"
OPTIONS = ProbeOptions(device="cpu", memory_limit=2 * 2**30)


@contextmanager
def prober(
    function: str = "deaths.py:build", timeout: float | None = None, **arguments: Any
) -> Iterator[Supervisor]:
    source = SetupSource(f"{TARGETS}/{function}", arguments)
    ours = supervisor(source, OPTIONS, probe_timeout_seconds=timeout)
    try:
        yield ours
    finally:
        ours.close()


def pid_in(path: Path) -> int:
    """The process id that a target leaves in a file."""
    return int(eventually(lambda: path.exists() and path.read_text().strip()))


@pytest.mark.parametrize(
    ("deed", "outcome", "note"),
    [
        ("leave_children", Outcome.OOM, "the process was killed, most likely by the system"),
        (
            "complain_and_abort",
            Outcome.OOM,
            "terminate called after throwing an instance of 'std::b",
        ),
        (
            "abort",
            Outcome.FAILED,
            "the process was killed by SIGABRT in <lambda> (targets/deaths.py:",
        ),
        ("segfault", Outcome.FAILED, "the process was killed by SIGSEGV"),
        ("real_time_signal", Outcome.FAILED, "the process was killed by signal 40"),
        ("os_exit", Outcome.FAILED, "the process exited with status 0"),
        ("close_everything", Outcome.FAILED, "the process exited with status 1"),
        (
            "write_garbage",
            Outcome.FAILED,
            "the training code wrote 'not JSON at all' to a file descriptor that it had not",
        ),
    ],
)
def test_a_size_at_which_every_worker_dies(deed: str, outcome: Outcome, note: str) -> None:
    with prober(deed=deed, at=3) as ours:
        probe = ours.probe(3)
        assert (probe.outcome, probe.steps, probe.samples) == (outcome, 1, 3)
        assert probe.note.startswith(note)


def test_after_a_death_the_search_goes_on() -> None:
    with prober(deed="kill", at=3) as ours:
        assert [ours.probe(size).fits for size in (2, 3, 1)] == [True, False, True]


def test_a_death_that_does_not_come_again_is_no_verdict(tmp_path: Path) -> None:
    with prober(deed="kill", once=str(tmp_path / "once")) as ours:
        assert ours.probe(3).fits


def test_a_worker_that_is_killed_from_outside_is_replaced(tmp_path: Path) -> None:
    once = tmp_path / "once"
    killer = threading.Thread(target=lambda: os.kill(pid_in(once), signal.SIGKILL))
    with prober(deed="hang", once=str(once)) as ours:
        killer.start()
        probe = ours.probe(3)
        killer.join()
    assert (probe.outcome, probe.note) == (Outcome.FITS, "")


def test_a_confirmation_that_dies_is_repeated_too(tmp_path: Path) -> None:
    with prober(deed="abort", once=str(tmp_path / "once")) as ours:
        probe = ours.probe(3, confirm=True)
    assert (probe.outcome, probe.confirmed, probe.steps) == (Outcome.FITS, True, 6)


def test_a_hang_is_a_failure_of_the_size_and_its_process_is_ended(tmp_path: Path) -> None:
    once = tmp_path / "once"
    with prober(deed="hang", once=str(once), timeout=3) as ours:
        probe = ours.probe(3)
        assert probe.outcome is Outcome.FAILED
        assert probe.note.startswith("hung: stopped after 3.")
        assert probe.note.endswith("in step 1; batchfinder find --probe-timeout allows for more")
        assert is_gone(pid_in(once))


def test_what_well_meaning_code_does_to_its_process_changes_nothing(tmp_path: Path) -> None:
    once = tmp_path / "once"
    deeds = "print read_input fork change_the_process"
    with prober(deed=deeds, once=str(once)) as ours:
        assert ours.probe(3).fits
        assert ours.probe(4).fits
        assert pid_in(once) > 0


def test_the_users_error_comes_with_a_traceback_of_their_code_alone() -> None:
    with prober(deed="raise") as ours, pytest.raises(UserCodeError) as raised:
        ours.probe(3)
    assert str(raised.value) == "ValueError: no such width"
    lines = raised.value.user_traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: no such width"
    assert f'File "{TARGETS}/deaths.py"' in raised.value.user_traceback
    assert "batchfinder/" not in raised.value.user_traceback.replace(str(TARGETS), "")
    assert "concurrent" not in raised.value.user_traceback


def test_sys_exit_in_a_step() -> None:
    with prober(deed="sys_exit") as ours, pytest.raises(UserCodeError) as raised:
        ours.probe(3)
    assert str(raised.value) == (
        "the code called sys.exit('enough'). Try taking that out of the training step"
    )


def test_errors_of_ours_keep_their_kind() -> None:
    with prober("models.py:build_without_gradient") as ours, pytest.raises(StepError):
        ours.probe(3)


@pytest.mark.parametrize(
    ("deed", "error", "message"),
    [
        ("kill", WorkerError, "the target ended its process while it was loading: .*SIGKILL"),
        ("os_exit", WorkerError, "the target ended its process while it was loading"),
        (
            "complain_and_abort",
            WorkerError,
            r"SIGABRT in complain.*; the last it printed was .term",
        ),
        ("raise", UserCodeError, "ValueError: no such width"),
        ("write_garbage", WorkerError, "wrote 'not JSON at all' to a file descriptor"),
    ],
)
def test_a_target_that_does_not_load(deed: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), prober("deaths.py:build_and_do", deed=deed):
        pass


def test_a_target_that_hangs_on_loading(tmp_path: Path) -> None:
    once = tmp_path / "once"
    source = SetupSource(f"{TARGETS}/deaths.py:build_and_do", {"deed": "hang", "once": str(once)})
    with pytest.raises(WorkerError, match="target was still loading after"):
        supervisor(source, OPTIONS, loading_timeout_seconds=4)
    assert is_gone(pid_in(once))


def test_an_unknown_optimizer_is_told_before_any_probe() -> None:
    source = SetupSource(f"{TARGETS}/models.py:build_small", optimizer="adamm")
    with pytest.raises(UsageError, match="there is no optimizer 'adamm'"):
        supervisor(source, OPTIONS)


def test_what_it_tells_of_the_device() -> None:
    with prober("models.py:build_small") as ours:
        assert ours.device == "cpu"
        assert ours.budget_bytes == int(2 * 2**30 * 0.95)
        assert ours.capacity_bytes > ours.budget_bytes
        assert ours.used_by_others_bytes >= 0
        assert {"batchfinder", "python", "torch"} <= set(ours.versions)
        assert ours.warnings == ()
