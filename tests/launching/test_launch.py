"""One launch of a command, from its start to its end."""

from __future__ import annotations

import getpass
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchfinder.errors import UsageError
from batchfinder.launching.launch import Launch
from batchfinder.launching.options import RunOptions, make_order
from batchfinder.launching.record import Record
from batchfinder.launching.template import Template
from batchfinder.launching.verdict import judge
from batchfinder.launching.watching import Patience, watch, watch_epoch_end
from batchfinder.results.probe import Outcome
from batchfinder.units import GIB


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


def test_a_launch_that_cannot_start_leaves_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("size: {batch_size}")
    template = Template(["true", str(file)], files=(str(file),))
    file.unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        Launch(template, 8, {}, steps=3)
    assert not list((tmp_path / "tmp").iterdir())


def test_a_user_without_a_name_may_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(getpass, "getuser", unknown)
    with closing(Launch(Template(["true", "{batch_size}"]), 8, {}, steps=3)) as launch:
        list(launch.reports())
    assert launch.exit_status == 0


def test_no_tracker_records_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "7")  # of that server only
    names = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID", "COMET_AUTO_LOG_DISABLE", "WANDB_MODE")
    show = f"import os; print(*[os.environ.get(name) for name in {names}])"
    template = Template([sys.executable, "-c", show, "{batch_size}"])
    with closing(Launch(template, 8, {}, steps=3)) as launch:
        list(launch.reports())
    store, *others = launch.output.split()
    assert launch.owns(store.removeprefix("file://"))
    assert others == ["None", "1", "disabled"]


@pytest.mark.timeout(60)
def test_a_launch_ends_although_a_signal_came_while_its_process_was_polled() -> None:
    launch = Launch(Template(["sleep", "100", "{batch_size}"]), 8, {}, steps=3)
    # The signal's handler raised between the two lines of Popen.poll() that lock and unlock.
    vars(vars(launch)["_guardian"])["_waitpid_lock"].acquire()
    launch.close()


def test_a_script_that_kills_what_supervises_it_is_not_taken_to_fit() -> None:
    kill = "import os; os.kill(os.getppid(), 9)"
    template = Template(["python", "-c", kill, "{batch_size}"])
    with closing(Launch(template, 8, {}, steps=3)) as launch:
        list(launch.reports())
    assert launch.exit_status is None
    record = Record(8, steps=3, headroom=0.05, cpu_budget_bytes=2**30)
    verdict = judge(record, launch.exit_status, launch.output, hung="")
    assert verdict.probe.outcome is Outcome.FAILED
    assert "supervised" in verdict.probe.note


# Trains as differentially private training does, by clipped gradients of each example.
CLIPS = """
import sys, torch
from torch.func import functional_call, grad, vmap
model, examples = torch.nn.Linear(8, 8), torch.randn(int(sys.argv[1]), 8)
optimizer = torch.optim.SGD(model.parameters())
def loss(parameters, example):
    return functional_call(model, parameters, (example[None],)).square().mean()
while True:
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    gradients = vmap(grad(loss), in_dims=(None, 0))(parameters, examples)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].clamp(-1, 1).mean(dim=0)
    optimizer.step()
"""
# Trains as SAM does: the outer optimizer has the parameters of the inner one, and never steps.
WRAPS = """
import sys, torch
model = torch.nn.Linear(8, 8)
inner, outer = torch.optim.SGD(model.parameters()), torch.optim.SGD(model.parameters())
for _ in range(4):
    model(torch.randn(int(sys.argv[1]), 8)).square().mean().backward()
    inner.step()
print("ended")
"""

# Trains as LOMO does: the optimizer has no step, and changes the parameters in the backward pass.
LOMO = """
import sys, torch
model = torch.nn.Linear(8, 8)
optimizer = type("Lomo", (torch.optim.Optimizer,), {})(model.parameters(), {})
for _ in range(9):
    model(torch.randn(int(sys.argv[1]), 8)).square().mean().backward()
"""

# Trains in two phases, as one fold after another.
PHASES = """
import sys, torch
model, data = torch.nn.Linear(8, 8), torch.randn(10_000, 8)
for _ in range(2):
    optimizer = torch.optim.SGD(model.parameters())
    for batch in torch.utils.data.DataLoader(data, batch_size=int(sys.argv[1])):
        model(batch).square().mean().backward()
        optimizer.step()
"""


def readings(count: int, command: list[str]) -> list[dict[str, Any]]:
    """Launch a script with two examples, and return its readings until it waits after some."""
    order = make_order(RunOptions(device="cpu"), 4 * GIB, None)
    found: list[dict[str, Any]] = []
    with closing(Launch(Template([*command, "{batch_size}"]), 2, order, steps=count)) as launch:
        for report in launch.reports():
            if report and report["event"] == "step":
                found, last = [*found, report], time.monotonic()
            elif len(found) >= count and time.monotonic() > last + 0.5:
                break
    return found


def test_each_backward_pass_after_the_first_step_ends_a_reading_of_a_script_that_accumulates() -> (
    None
):
    """So readings repeat, as steps do. One of two passes would differ from those of one."""
    script = [sys.executable, str(Path(__file__).with_name("script.py")), "--accumulation", "3"]
    found = readings(7, [*script, "--batch-size"])
    assert [len(reading["shapes"]) for reading in found] == [3, 1, 1, 1, 1, 1, 1]
    assert [reading["steps"] for reading in found] == [1, 1, 1, 1, 2, 2, 2]


def test_gradients_of_single_examples_make_a_step_without_a_backward_pass() -> None:
    found = readings(3, [sys.executable, "-c", CLIPS])
    assert [reading["steps"] for reading in found] == [1, 2, 3]
    assert all([2, 1, 8] in reading["shapes"] for reading in found)


def test_an_optimizer_around_another_is_not_waited_for() -> None:
    """Each launch of a script with SAM ran five times the steps."""
    assert len(readings(2, [sys.executable, "-c", WRAPS])) == 2


def test_an_optimizer_without_a_step_trains_in_the_backward_pass() -> None:
    """As LOMO does, whose scripts ended "without a training step"."""
    assert len(readings(3, [sys.executable, "-c", LOMO])) == 3


def test_a_script_that_trains_anew_is_said_to_have_shown_little_of_it() -> None:
    options = RunOptions(device="cpu")
    template = Template([sys.executable, "-c", PHASES, "{batch_size}"])
    record = Record(2, steps=3, headroom=0.05, cpu_budget_bytes=4 * GIB)
    order = make_order(options, 4 * GIB, None)
    with closing(Launch(template, 2, order, steps=3)) as launch:
        watch(launch, record, 3, Patience(options))
        watch_epoch_end(launch, record)
    assert "another optimizer" in record.remarks(4 * GIB)["anew"]
