"""``batchfinder find`` as people and programs meet it."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fakes import FakeProber
from processes import descendants, eventually, is_gone
from warm import COMMAND, WarmPython, start_command

from batchfinder import Outcome
from batchfinder.cli.app import cli
from batchfinder.cli.find import NOT_ACCUMULATED_WARNING
from batchfinder.errors import BatchFinderError, UserCodeError
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.setup_source import SetupSource

TARGETS = Path(__file__).parents[1] / "targets"

KEYS = {
    *("schema_version", "batch_size", "status", "device", "budget_bytes", "memory_model"),
    *("probes", "next_failure", "confirmed_steps", "cost_full_size_steps", "seconds", "versions"),
}
PROBE_KEYS = {
    *("batch_size", "outcome", "peak_allocated_bytes", "peak_reserved_bytes", "seconds"),
    *("steps", "note"),
}

MIB = 2**20


def small_device(**more: Any) -> FakeProber:
    """Runs out of memory beyond a batch of 2."""
    return FakeProber(
        budget_bytes=125 * MIB,
        bytes_per_sample=10 * MIB,
        capacity_bytes=140 * MIB,
        used_by_others_bytes=5 * MIB,
        **{"fixed_bytes": 100 * MIB, **more},
    )


def find(prober: FakeProber, *options: str) -> Result:
    """Run the command on a device on paper."""
    arguments = ["find", "train.py:build_model", *options]
    return CliRunner().invoke(cli, arguments, obj=lambda source, options: prober)


def without_seconds(text: str) -> str:
    """The headline, with the time that the search took taken out."""
    return re.sub(r"(probes?, )[\d.]+ m?s", r"\1T", text)


TABLE = """\
fake:0 Paper   140.0 MiB, 5.0 MiB used by others, budget 125.0 MiB (5% headroom)
  batch size  peak memory    step
           1    110.0 MiB  250 ms  fits
           2    120.0 MiB  250 ms  fits
           3                       OOM when confirming: oom on paper
           2    120.0 MiB  250 ms  fits, confirmed by 3 steps
"""
HEADLINE = "Max batch size 2     100.0 MiB fixed + 10.0 MiB per sample     4 probes, T\n"


def test_progress_goes_to_stderr_and_the_answer_to_stdout() -> None:
    prober = small_device()
    done = find(prober)
    assert done.exit_code == 0
    assert done.stderr == TABLE
    assert without_seconds(done.stdout) == (
        HEADLINE + "Batch size 3 runs out of memory: oom on paper\n"
    )
    assert prober.is_closed


def test_without_arguments_an_example_of_each_command_is_shown() -> None:
    shown = CliRunner().invoke(cli, []).output
    for name in ("find", "estimate", "run"):
        assert f"\n      batchfinder {name}" in shown


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("batchfinder est", "plain,estimate"),
        ("batchfinder find --prec", "plain,--precision"),
        ("batchfinder find tr", "file,tr"),
        ("batchfinder run -- python tr", "file,tr"),
        ("batchfinder compare --gpu rtx409", "plain,rtx4090"),
    ],
)
def test_the_shell_completes_commands_options_files_and_gpus(words: str, offered: str) -> None:
    environment = {
        **os.environ,
        "_BATCHFINDER_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    code = "import sys; sys.argv = ['batchfinder']; from batchfinder.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == f"{offered}\n"


def test_quiet_is_one_line() -> None:
    done = find(small_device(), "-q")
    assert (done.stderr, without_seconds(done.stdout)) == ("", HEADLINE)


def test_verbose_shows_the_phases_and_the_cost() -> None:
    done = find(small_device(), "-v", "--max-batch-size", "2")
    assert "forward/backward 110.0 MiB, optimizer step 0 B, 1 step in 250 ms" in done.stderr
    assert done.stdout.splitlines()[1:] == [
        "It is the largest size allowed; nothing larger was tried.",
        "The search cost as much as 3.5 steps at the size found.",
        "Time: steps 1.00 s, rest 0.0 ms",
    ]


def test_notes_are_shown_with_verbose_only() -> None:
    def wandering() -> FakeProber:
        return FakeProber(budget_bytes=10_000, is_repeatable=False, noise=0.02)

    note = "fit in some runs only: memory varies from run to run"
    assert note in find(wandering(), "-v").stdout
    plain = find(wandering())
    assert "Note" not in plain.stdout
    assert "Warning" not in plain.stderr
    assert json.loads(find(wandering(), "--json").stdout)["notes"]


def test_how_to_reach_a_global_batch_size() -> None:
    done = find(small_device(), "--global-batch-size", "64")
    assert done.stdout.splitlines()[-1] == (
        "Global batch 64 = 2 per device x 32 accumulation steps"
    )
    assert f"Warning: {NOT_ACCUMULATED_WARNING}" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    "options", [("--global-batch-size", "2"), ("--global-batch-size", "64", "--accumulate")]
)
def test_that_gradients_live_on_is_told_only_where_they_were_not_measured(
    options: tuple[str, ...],
) -> None:
    assert "Warning" not in find(small_device(), *options).stderr


def test_the_json_is_all_there_is_on_stdout() -> None:
    done = find(small_device(), "--json")
    answer = json.loads(done.stdout)
    assert done.exit_code == 0
    assert answer.keys() >= KEYS
    assert all(probe.keys() >= PROBE_KEYS for probe in answer["probes"])
    assert answer["next_failure"] == {"batch_size": 3, "outcome": "oom", "reason": "oom on paper"}
    assert answer["memory_model"]["fixed_bytes"] == 100 * MIB
    assert (answer["schema_version"], answer["batch_size"], answer["status"]) == (1, 2, "found")
    assert [probe["batch_size"] for probe in answer["probes"]] == [1, 2, 3, 2]
    assert [probe["outcome"] for probe in answer["probes"]] == ["fits", "fits", "oom", "fits"]
    assert answer["confirmed_steps"] == 3
    assert done.stderr == TABLE


def test_json_and_quiet_leave_stderr_empty() -> None:
    done = find(small_device(), "--json", "-q")
    assert done.stderr == ""
    assert json.loads(done.stdout)["batch_size"] == 2


def test_the_global_batch_as_json() -> None:
    done = find(small_device(), "--global-batch-size", "64", "--json")
    plan = json.loads(done.stdout)["accumulation_plan"]
    assert plan["requested"] == 64
    exact = plan["exact"]
    assert exact["batch_size"] * exact["gradient_accumulation_steps"] == 64
    assert "accumulation_plan" not in json.loads(find(small_device(), "--json").stdout)


def test_the_global_batch_is_split_into_sizes_that_the_search_may_try() -> None:
    done = find(small_device(), "--global-batch-size", "65", "--multiple-of", "2", "--json")
    plan = json.loads(done.stdout)["accumulation_plan"]
    assert plan["exact"] is None
    assert plan["below"]["batch_size"] == plan["above"]["batch_size"] == 2


def test_nothing_fits() -> None:
    done = find(small_device(fixed_bytes=200 * MIB))
    assert done.exit_code == 3
    assert without_seconds(done.stdout.splitlines()[0]) == (
        "Nothing fits: batch size 1 needs more than 125.0 MiB     2 probes, T"
    )
    for lever in ("--precision bf16", "checkpointing", "--optimizer sgd"):
        assert lever in done.stdout


def test_nothing_fits_as_json() -> None:
    done = find(small_device(fixed_bytes=200 * MIB), "--json")
    answer = json.loads(done.stdout)
    assert done.exit_code == 3
    assert (answer["batch_size"], answer["status"]) == (0, "nothing_fits")
    assert answer["next_failure"]["batch_size"] == 1


def test_warnings_stand_before_the_answer() -> None:
    done = find(small_device(warnings=("the loss is nan; look at it",)), "--max-batch-size", "2")
    assert done.stderr.splitlines()[-1] == "Warning: the loss is nan; look at it"


def test_an_error_after_some_probes_keeps_what_they_proved() -> None:
    prober = small_device(faults={3: UserCodeError("ValueError: no", "Traceback: theirs\n")})
    done = find(prober)
    assert done.exit_code == 1
    assert done.stdout.startswith("Stopped by an error. Largest size that ran: 2 (not confirmed)")
    assert done.stderr.splitlines()[-2:] == ["Traceback: theirs", "Error: ValueError: no"]
    assert prober.is_closed


def test_an_error_after_some_probes_keeps_them_as_json() -> None:
    done = find(small_device(faults={3: UserCodeError("ValueError: no")}), "--json")
    answer = json.loads(done.stdout)
    assert done.exit_code == 1
    assert (answer["batch_size"], answer["status"]) == (2, "failed")
    assert [probe["batch_size"] for probe in answer["probes"]] == [1, 2]


def test_an_error_before_any_probe_prints_nothing_on_stdout() -> None:
    done = find(small_device(faults={1: BatchFinderError("no such thing; do this")}), "--json")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "Error: no such thing; do this"


def test_a_size_that_crashes_even_at_the_smallest() -> None:
    done = find(small_device(faults={1: Outcome.FAILED}))
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == (
        "Error: not even a batch of 1 runs: failed on paper; "
        "run one training step by yourself to see more"
    )


def test_ctrl_c_prints_the_best_size_so_far() -> None:
    prober = small_device(faults={3: KeyboardInterrupt()})
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    done = find(prober)
    assert done.exit_code == 130
    assert done.stdout.startswith("Stopped. Largest size that ran: 2 (not confirmed)")
    assert prober.is_closed
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_ctrl_c_before_anything_ran() -> None:
    done = find(small_device(faults={1: KeyboardInterrupt()}), "--json")
    answer = json.loads(done.stdout)
    assert done.exit_code == 130
    assert (answer["batch_size"], answer["status"], answer["probes"]) == (0, "interrupted", [])


def test_every_option_reaches_the_prober() -> None:
    given: list[tuple[SetupSource, ProbeOptions]] = []

    def make_prober(source: SetupSource, options: ProbeOptions) -> FakeProber:
        given.append((source, options))
        return small_device()

    options = (
        "--sample data.py:batch --input float32[3] --loader data.py:loader --arg depth=12 "
        "--arg name=gpt --device cuda:1 --memory-limit 24GiB --headroom 7.5% --precision bf16 "
        "--optimizer sgd --accumulate "
        "--compile --max-batch-size 2 --confirm-steps 5"
    )
    done = CliRunner().invoke(cli, ["find", "a.py:build", *options.split()], obj=make_prober)
    assert done.exit_code == 0, done.output
    ((source, probe_options),) = given
    assert source == SetupSource(
        "a.py:build",
        {"depth": 12, "name": "gpt"},
        sample="data.py:batch",
        input_spec="float32[3]",
        loader="data.py:loader",
        optimizer="sgd",
    )
    assert probe_options == ProbeOptions(
        device="cuda:1",
        memory_limit=24 * 2**30,
        headroom=0.075,
        precision="bf16",
        accumulate=True,
        compiled=True,
        confirm_steps=5,
    )


def test_the_bounds_reach_the_search() -> None:
    prober = FakeProber()
    done = find(prober, "--min-batch-size", "10", "--max-batch-size", "50", "--multiple-of", "8")
    assert done.exit_code == 0
    assert prober.sizes == [16, 48]


def test_the_help_names_every_option() -> None:
    done = CliRunner().invoke(cli, ["find", "--help"])
    assert done.exit_code == 0
    options = (
        "sample input loader arg device memory-limit headroom precision optimizer accumulate "
        "compile min-batch-size max-batch-size multiple-of confirm-steps probe-timeout "
        "global-batch-size json quiet verbose"
    )
    assert all(f"--{option}" in done.stdout for option in options.split())


def test_the_version() -> None:
    done = CliRunner().invoke(cli, ["--version"])
    assert re.fullmatch(r"batchfinder, version \d+\.\d+\.\d+\n", done.stdout)


# With real workers, in processes of their own.


def words(target: str, *options: str) -> list[str]:
    return ["find", f"{TARGETS}/{target}", "--device", "cpu", *options]


INTERRUPTED_ON_IMPORT = """
import signal, sys
from batchfinder.__main__ import main

class CtrlC:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, CtrlC())
sys.argv = ["batchfinder", *{words}]
main()
"""
SCRIPT = ["python", "train.py", "{batch_size}"]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        *(
            (module, ["find", "train.py:build_model"])
            for module in ("click", "batchfinder.cli.app", "batchfinder.cli.find")
        ),
        ("torch", ["run", *SCRIPT]),
        ("torch", ["check", "--batch-size", "4", "--", *SCRIPT]),
    ],
)
def test_ctrl_c_before_the_command_has_begun_ends_it_without_a_word(
    module: str, words: list[str]
) -> None:
    program = INTERRUPTED_ON_IMPORT.format(module=module, words=words)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(
    ("function", "options", "proved"),
    [
        ("build_and_do", (), None),
        ("build", ("--arg", "at=2"), 1),
        ("build", ("--arg", "at=3", "--max-batch-size", "3"), 1),
    ],
    ids=["while loading", "in a probe", "in a confirmation"],
)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_by_a_signal(
    function: str,
    options: tuple[str, ...],
    proved: int | None,
    number: signal.Signals,
    status: int,
    tmp_path: Path,
) -> None:
    at_it = tmp_path / "at_it"
    options = ("--arg", "deed=hang", "--arg", f"once={at_it}", "--json", *options)
    process = start_command(*words(f"deaths.py:{function}", *options))
    eventually(lambda: at_it.exists() and at_it.read_text().endswith("\n"))
    started = descendants(process.pid)
    assert int(at_it.read_text()) in started
    process.send_signal(number)
    stdout, stderr = process.communicate()
    assert process.wait() == status
    assert "Traceback" not in stderr
    assert all(is_gone(pid) for pid in started)
    if proved is None:
        assert stdout == ""
        return
    answer = json.loads(stdout)
    assert (answer["status"], answer["batch_size"]) == ("interrupted", proved)
    assert answer.keys() >= KEYS


class Terminal:
    """A command in a terminal of its own, 100 columns wide."""

    # What a login does: the first terminal that a session opens is where Ctrl-C interrupts it.
    LOGIN = """
import os, sys
terminal = os.open(sys.argv.pop(1), os.O_RDWR)
print(flush=True)
for standard in range(3):
    os.dup2(terminal, standard)
"""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        environment = {"TERM": "xterm-256color", "COLUMNS": "100", "NO_COLOR": ""}
        code = ("-c", self.LOGIN + COMMAND, os.ttyname(theirs))
        self._process = WarmPython(*code, *arguments, new_session=True, **environment)
        self._process.stdout.readline()  # it has opened the terminal
        os.close(theirs)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def read_until(self, text: str) -> None:
        while text not in self.text:
            self.text += os.read(self._ours, 4096).decode()

    def read_to_the_end(self) -> int:
        """Everything, and the exit status."""
        try:
            while data := os.read(self._ours, 4096):
                self.text += data.decode()
        except OSError:  # how Linux says that nobody is at the other end any more
            pass
        os.close(self._ours)
        self._process.communicate()
        return self._process.wait()


def plain(text: str) -> str:
    """What stays on the screen: without colours, and without what was overwritten."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return "\n".join(line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n"))


def test_in_a_terminal_it_shows_bars_and_colours() -> None:
    options = ("--memory-limit", "1GiB", "--max-batch-size", "2")
    terminal = Terminal(*words("models.py:build_small", *options))
    assert terminal.read_to_the_end() == 0
    # The live line of the probe at work, with its dots, is wiped out each time.
    lines = [line for line in plain(terminal.text).splitlines() if line.strip() and "…" not in line]
    assert lines[0].startswith("cpu   ")
    assert lines[0].endswith("budget 972.8 MiB (5% headroom)")
    assert lines[1].split() == ["batch", "size", "peak", "memory", "step"]
    assert re.search(r"^ +1 +\d+\.\d MiB  [▏▎▍▌▋▊▉█]+ +.* ms  fits$", lines[2])
    assert re.search(r"^ +2 .*fits, confirmed by \d+ steps$", lines[-3])
    assert lines[-2].startswith("Max batch size 2     ")
    assert "\x1b[32mfits" in terminal.text


def test_ctrl_c_in_a_terminal(tmp_path: Path) -> None:
    at_it = tmp_path / "at_it"
    arguments = ("--arg", "deed=hang", "--arg", "at=2", "--arg", f"once={at_it}")
    terminal = Terminal(*words("deaths.py:build", *arguments))
    terminal.read_until("trying")
    worker = int(eventually(lambda: at_it.exists() and at_it.read_text().strip()))
    terminal.type("\x03")
    assert terminal.read_to_the_end() == 130
    assert "Stopped. Largest size that ran: 1 (not confirmed)" in plain(terminal.text)
    assert is_gone(worker)
