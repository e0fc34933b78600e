"""``batchfinder run`` on training scripts that know nothing of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from processes import PATIENCE_SECONDS, descendants, eventually, is_gone

from batchfinder.cli.app import cli

SCRIPT = Path(__file__).parents[1] / "launching" / "script.py"
ON_THE_CPU = ("--device", "cpu", "--memory-limit", "1GiB", "--max-batch-size", "16")
PYTHON = (sys.executable, str(SCRIPT))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, empty, and one for temporary files beside it."""
    temporary, own = tmp_path / "temporary", tmp_path / "own"
    temporary.mkdir()
    own.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.chdir(own)
    return own


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["run", *arguments])


def run_script(*arguments: str, options: tuple[str, ...] = ()) -> Result:
    return run(*ON_THE_CPU, *options, "--", *PYTHON, "--batch-size", "{batch_size}", *arguments)


def answer_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_a_plain_loop_is_answered_with_a_command_and_leaves_nothing(folder: Path) -> None:
    result = run_script(options=("--min-batch-size", "16"))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0].startswith("Max batch size 16")
    assert result.stdout.splitlines()[-1] == f"Run: {sys.executable} {SCRIPT} --batch-size 16"
    assert [*folder.iterdir()] == []
    assert [*(folder.parent / "temporary").glob("batchfinder*")] == []


def test_a_missing_script_is_named_once() -> None:
    result = run(*ON_THE_CPU, "--", sys.executable, "missing.py", "{batch_size}")
    assert result.exit_code != 0
    assert result.output.count("missing.py") == 1, result.output


def test_json_is_that_of_find_with_launches_and_command() -> None:
    answer = answer_of(run_script(options=("--json", "--min-batch-size", "16")))
    assert (answer["batch_size"], answer["launches"], answer["status"]) == (16, 1, "capped")
    assert answer["command"].endswith("--batch-size 16")
    assert answer["confirmed_steps"] >= 6
    assert answer["probes"][0]["steps"] == answer["confirmed_steps"]


def test_the_validation_after_an_epoch_is_seen_and_nothing_is_saved(folder: Path) -> None:
    options = ("--json", "--min-batch-size", "4", "--max-batch-size", "5")
    answer = answer_of(run_script("--manner", "validates", options=options))
    assert answer["batch_size"] == 4
    assert answer["next_failure"]["reason"].startswith("in the validation: ")
    assert "validation" in answer["probes"][0]["phase_peak_bytes"]
    assert [*folder.iterdir()] == []


def test_the_steps_after_a_save_are_seen_and_the_saved_file_stays_as_it_was(folder: Path) -> None:
    (folder / "model.pt").write_text("of an earlier training")
    os.utime(folder / "model.pt", (0, 0))
    options = ("--json", "--min-batch-size", "4", "--max-batch-size", "5")
    answer = answer_of(run_script("--manner", "trains_on", options=options))
    assert answer["batch_size"] == 4
    assert not answer["next_failure"]["reason"].startswith("in the validation: ")
    assert answer["warnings"] == []
    assert "validation" in answer["probes"][0]["phase_peak_bytes"]
    assert [each.name for each in folder.iterdir()] == ["model.pt"]
    assert (folder / "model.pt").read_text() == "of an earlier training"
    assert (folder / "model.pt").stat().st_mtime == 0


def test_a_validation_that_was_not_seen_is_named() -> None:
    options = ("--min-batch-size", "16")
    result = run_script("--manner", "validates_later", options=options)
    assert "Warning: the script seems to have a validation, but none was seen" in result.output


@pytest.mark.parametrize(("manner", "outcome"), [("swallows", "oom"), ("dies", "failed")])
def test_what_a_script_hides_is_seen(manner: str, outcome: str) -> None:
    options = ("--json", "--min-batch-size", "4", "--max-batch-size", "5")
    answer = answer_of(run_script("--manner", manner, options=options))
    assert (answer["batch_size"], answer["status"]) == (4, "found")
    assert answer["next_failure"]["batch_size"] == 5
    assert answer["next_failure"]["outcome"] == outcome
    some = [warning for warning in answer["warnings"] if "--multiple-of" in warning]
    assert len(some) == (outcome == "failed")


@pytest.mark.parametrize("manner", ["caps", "drops"])
def test_a_data_set_that_is_too_small_ends_the_search_at_its_size(manner: str) -> None:
    options = ("--json", "--min-batch-size", "3")
    answer = answer_of(run_script("--manner", manner, options=options))
    assert (answer["batch_size"], answer["launches"]) == (4, 2 + (manner == "drops"))
    assert answer["next_failure"]["reason"] == "a step never has more than 4 examples"
    assert "has no more" in answer["warnings"][0]


@pytest.mark.parametrize("manner", ["caps", "drops"])
def test_a_size_above_the_data_set_does_not_pass_a_check(manner: str) -> None:
    command = ("--", *PYTHON, "--batch-size", "{batch_size}", "--manner", manner)
    on_the_cpu = ("--device", "cpu", "--memory-limit", "1GiB")
    result = CliRunner().invoke(cli, ["check", *on_the_cpu, "--batch-size", "10", *command])
    assert result.exit_code == 3, result.output
    assert "a step never has more than 4 examples. Try --batch-size 4," in result.stdout


@pytest.mark.slow
def test_the_result_says_if_the_hosts_memory_decides() -> None:
    answer = answer_of(run_script("--manner", "fills_shared_memory", options=("--json",)))
    assert (answer["batch_size"], answer["next_failure"]["outcome"]) == (4, "oom")
    assert "/dev/shm" in answer["next_failure"]["reason"]
    assert "the host's memory decides, not the device's" in answer["warnings"][-1]


def test_a_validation_counts_where_the_optimizer_is_not_of_pytorch() -> None:
    options = ("--json", "--min-batch-size", "16", "--max-batch-size", "16")
    answer = answer_of(run_script("--manner", "descends", options=options))
    assert "validation" in answer["probes"][0]["phase_peak_bytes"]
    assert answer["warnings"] == []


def test_updates_by_hand_count_as_steps() -> None:
    options = ("--json", "--min-batch-size", "16")
    assert answer_of(run_script("--manner", "by_hand", options=options))["batch_size"] == 16


def test_examples_in_an_object_are_seen() -> None:
    options = ("--json", "--min-batch-size", "16", "--max-batch-size", "17")
    answer = answer_of(run_script("--manner", "pads", options=options))
    assert (answer["batch_size"], answer["warnings"]) == (17, [])


def test_forward_passes_count_in_mode_eval() -> None:
    options = ("--json", "--mode", "eval", "--min-batch-size", "16")
    answer = answer_of(run_script("--manner", "evaluates", options=options))
    assert (answer["batch_size"], answer["warnings"]) == (16, [])
    assert answer["confirmed_steps"] >= 6


def test_an_answer_is_confirmed_by_one_launch_next_time() -> None:
    options = ("--json", "--min-batch-size", "15")
    first, second = (
        answer_of(run_script("--manner", "swallows", "--limit", "20", options=each))
        for each in (options, (*options, "--chart"))
    )
    assert [probe["batch_size"] for probe in first["probes"]] == [15, 16]
    assert [probe["batch_size"] for probe in second["probes"]] == [16]
    assert second["remembered_from"]


def test_an_answer_that_no_longer_runs_is_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--json", "--min-batch-size", "15")
    monkeypatch.setenv("SCRIPT_LIMIT", "20")
    assert answer_of(run_script("--manner", "swallows", options=options))["batch_size"] == 16
    monkeypatch.setenv("SCRIPT_LIMIT", "15")
    again = answer_of(run_script("--manner", "swallows", options=options))
    assert (again["batch_size"], again["remembered_from"]) == (15, None)


@pytest.mark.slow
def test_a_python_without_the_hook_is_named_at_once() -> None:
    waiting = "import time; time.sleep(600)"
    # An installed wheel lets the hook in with -I too.
    python = (sys.executable, "-I", "-S")
    result = run("--device", "cpu", "--", *python, "-c", waiting, "{batch_size}")
    assert result.exit_code == 1
    assert "no Python of the command loaded the hook" in result.stderr


def test_batch_norm_starts_from_two() -> None:
    options = ("--json", "--max-batch-size", "2")
    answer = answer_of(run_script("--manner", "norm", options=options))
    assert [probe["batch_size"] for probe in answer["probes"]] == [2]


def test_a_script_that_fails_with_one_example_starts_from_several() -> None:
    options = ("--json", "--max-batch-size", "8")
    answer = answer_of(run_script("--manner", "ranks", options=options))
    assert [probe["batch_size"] for probe in answer["probes"]] == [8]
    warning = next(each for each in answer["warnings"] if each.startswith("a batch of 1 fails"))
    assert "k out of range" in warning
    assert warning.endswith(", one of 8 does not: only sizes from 8 on were tried")


@pytest.mark.slow
def test_a_script_that_fails_with_several_examples_too_is_broken() -> None:
    result = run_script("--manner", "ranks", "--limit", "8", options=("--max-batch-size", "8"))
    assert result.exit_code == 1
    assert "failed at batch size 1, not for lack of memory" in result.stderr


def test_a_script_may_accumulate_by_itself() -> None:
    options = ("--json", "--global-batch-size", "6", "--min-batch-size", "6")
    answer = answer_of(run_script(options=options))
    assert answer["command"].endswith("--batch-size 6")
    assert "so the script has to reach 6 by itself" in answer["warnings"][0]


@pytest.mark.slow
def test_accumulation_keeps_the_product() -> None:
    options = ("--json", "--global-batch-size", "6", "--min-batch-size", "4")
    answer = answer_of(run_script("--accumulation", "{accumulation}", options=options))
    assert {probe["batch_size"] for probe in answer["probes"]} <= {3, 6}
    assert answer["command"].endswith("--batch-size 6 --accumulation 1")


@pytest.mark.slow
def test_a_size_may_stand_in_the_environment_or_in_a_file(folder: Path) -> None:
    options = (*ON_THE_CPU, "--min-batch-size", "16", "--json")
    answer = answer_of(run(*options, "--env", "BATCH={batch_size}", "--", *PYTHON))
    assert answer["command"].startswith("BATCH=16 ")
    (folder / "size.txt").write_text("{batch_size}")
    command = ("--file", "size.txt", "--", *PYTHON, "--config", "size.txt")
    assert answer_of(run(*options, *command))["batch_size"] == 16


@pytest.mark.slow
def test_a_script_that_ends_early_is_named() -> None:
    options = ("--json", "--min-batch-size", "16")
    answer = answer_of(run_script("--steps", "2", options=options))
    assert "ended by itself in step 2" in answer["warnings"][0]
    assert "end.txt" in answer["warnings"][1]


def test_a_script_that_ignores_the_size_is_refused() -> None:
    result = run_script("--manner", "ignores")
    assert result.exit_code == 1
    assert "the script ignores the batch size: its steps had 3 examples" in result.stderr


def test_a_script_that_fails_at_once_shows_its_last_lines() -> None:
    result = run_script("--manner", "raises")
    assert result.exit_code == 1
    assert "in main\n" in result.stderr
    assert "See the manual\n" in result.stderr
    assert "ValueError: there is no data set in this folder. Try the command" in result.stderr


def test_a_file_of_an_earlier_launch_that_is_in_the_way_is_no_bound_of_the_size() -> None:
    result = run_script("--manner", "keeps")
    assert result.exit_code == 1
    assert "failed at batch size 1, not for lack of memory: exit status 1: Fi" in result.stderr
    assert "config.yaml'. Try {scratch} for its output folder" in result.stderr


def test_files_are_named_after_a_failed_search_and_a_check_too(folder: Path) -> None:
    command = ("-c", "open('log.txt', 'w'); raise SystemExit('bad {batch_size}')")
    message = "Warning: the launches left or changed 1 file: log.txt."
    assert message in run(*ON_THE_CPU, "--", sys.executable, *command).stderr
    (folder / "log.txt").unlink()
    options = ("check", "--batch-size", "2", "--device", "cpu", "--memory-limit", "1GiB")
    assert message in CliRunner().invoke(cli, [*options, "--", sys.executable, *command]).stderr


@pytest.mark.parametrize(
    ("manner", "error"),
    [
        ("divides", "not divisible by 2 ranks. Try --multiple-of 2, for"),
        ("shares", "got batch_size=0. Try --multiple-of with the number of ranks"),
    ],
)
def test_a_script_that_wants_sizes_divisible_by_its_ranks_is_advised(
    manner: str, error: str
) -> None:
    result = run_script("--manner", manner)
    assert result.exit_code == 1
    assert error in result.stderr


def test_an_option_behind_the_command_is_sent_before_it() -> None:
    result = run_script("--memory-limit", "4GiB")
    assert "unrecognized arguments: --memory-limit 4GiB" in result.stderr
    assert "Options of batchfinder belong before the command" in result.stderr


def test_a_script_that_refuses_small_batches_is_advised() -> None:
    code = "assert {batch_size} >= 16, 'the effective batch size should be at least 16'"
    result = run(*ON_THE_CPU, "--", sys.executable, "-c", code)
    assert "should be at least 16. Try --min-batch-size with a size" in result.stderr


def test_examples_are_seen_if_only_the_parts_of_the_model_are_in_training() -> None:
    result = run_script("--manner", "wraps", options=("--min-batch-size", "16"))
    assert (result.exit_code, result.stderr.count("hook could not see")) == (0, 0), result.stderr


def test_a_size_that_a_later_launch_refutes_gets_a_second_row() -> None:
    options = ("--min-batch-size", "100", "--max-batch-size", "101", "--json")
    manner = ("--manner", "swallows", "--limit", "100")
    lines = run_script(*manner, options=options).stderr.splitlines()
    rows = [line.split() for line in lines if line.split()[0] in ("100", "101")]
    assert [row[0] for row in rows] == ["100", "101", "100"], lines
    refuted = "a launch at 101 ran out, and memory differs by more from run to run"
    assert lines[-1].endswith(refuted)


def test_a_script_that_never_steps_is_named_and_all_its_processes_end() -> None:
    result = run_script("--manner", "hangs", options=("--timeout", "4"))
    assert result.exit_code == 1
    assert "no training step ended within" in result.stderr
    assert "a larger --min-batch-size shortens the validation" in result.stderr
    assert "waits\n" in result.stderr  # although it fills no buffer, and has one line only
    assert descendants(os.getpid()) == []


def test_a_time_limit_without_a_confirmed_size_is_an_error_and_ends_all_processes() -> None:
    result = run_script("--manner", "hangs", options=("--time-limit", "1"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no batch size was confirmed within the time limit of 1 s" in result.stderr
    assert descendants(os.getpid()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--", "python", "train.py"), "the command has no {batch_size}"),
        (("--", "no-such-program", "{batch_size}"), "no-such-program cannot be started"),
        (("--", "train.py", "{batch_size}"), "Try python train.py"),
        (("python", "train.py", "--lr", "1"), "the command has no {batch_size}"),
        (("--steps", "0", "--", "python", "{batch_size}"), "--steps must be at least 1"),
        (("--timeout", "0", "--", "python", "{batch_size}"), "--timeout must be above 0"),
        (("--time-limit", "1e10", "--", "python", "{batch_size}"), "the time limit must be above"),
        (("--env", "3", "--", "python", "{batch_size}"), "--env takes NAME=VALUE"),
    ],
)
def test_bad_input_is_refused(arguments: tuple[str, ...], message: str) -> None:
    result = run("--device", "cpu", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_a_command_without_python_is_refused() -> None:
    result = run("--device", "cpu", "--", "echo", "{batch_size}")
    assert result.exit_code == 1
    assert "no Python of the command loaded the hook" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_every_process_ends_with_the_driver(number: int, folder: Path) -> None:
    arguments = [*ON_THE_CPU, "--", *PYTHON, "--manner", "hangs", "--batch-size", "{batch_size}"]
    driver = subprocess.Popen(
        [sys.executable, "-m", "batchfinder", "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    # The guardian, the script, and what that has started.
    started = eventually(lambda: len(found := descendants(driver.pid)) >= 3 and found)
    driver.send_signal(number)
    driver.communicate(timeout=PATIENCE_SECONDS)
    assert eventually(lambda: all(map(is_gone, started)))
    assert eventually(lambda: not [*(folder.parent / "temporary").glob("batchfinder-*")])


def test_without_a_limit_a_search_on_the_cpu_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchfinder.cli.run.CPU_SECONDS", 1)
    command = (*PYTHON, "--manner", "hangs", "--batch-size", "{batch_size}")
    result = run("--device", "cpu", "--max-batch-size", "16", "--", *command)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no batch size was confirmed within the time limit of 1 s" in result.stderr
