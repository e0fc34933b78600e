"""``batchfinder watch``: the memory of a training from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from batchfinder.cli.app import cli
from batchfinder.launching import guardian as guardian_module
from batchfinder.launching import memory_in_use as usage_module
from batchfinder.launching.memory_in_use import Gpus, read_usage, resident_bytes
from batchfinder.units import GIB, MIB

TRAINING = f"import time; held = bytearray({200 * MIB}); time.sleep(1)"


# A GPU whose allocator has flushed its cache twice after the first step, and 5 times at the end.
# Optimizers import PyTorch's compiler, which takes seconds, only to leave functions uncompiled.
FLUSHING = """
import sys, time, types, torch
sys.modules["torch._dynamo"] = types.SimpleNamespace(
    disable=lambda function, *_, **__: function, graph_break=lambda: None
)
torch.cuda.is_initialized = lambda: True
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight])
for total in (2, 5):
    torch.cuda.memory_stats = lambda total=total: {"num_alloc_retries": total}
    optimizer.step()
    time.sleep(1)
"""


def watch(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["watch", *arguments])


def with_nvml(monkeypatch: pytest.MonkeyPatch, running: dict[int, int | None]) -> None:
    """Let NVML show one GPU of 24 GiB, with 10 GiB in use, and these processes."""
    nvml = ModuleType("pynvml")
    processes = [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in running.items()]
    vars(nvml).update(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=24 * GIB, used=10 * GIB),
        nvmlDeviceGetName=lambda _: "NVIDIA A10G",
        nvmlDeviceGetComputeRunningProcesses=lambda _: processes,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


def test_a_command_is_watched_until_it_ends_and_its_status_is_kept() -> None:
    ended = watch("--every", "0.2", "--json", "--", sys.executable, "-c", TRAINING)

    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert ended.exit_code == 0
    assert max(line["host_bytes"] for line in lines) > 200 * MIB
    assert watch("--", sys.executable, "-c", "raise SystemExit(7)").exit_code == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_these_signals_end_the_command_too(number: signal.Signals, tmp_path: Path) -> None:
    heeding = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    heeding += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"  # under nohup, too
    command = [sys.executable, "-c", heeding, "-m", "batchfinder", "watch", "--every", "0.2"]
    command += ["--json", "--", sys.executable, "-c", "import time; time.sleep(60)"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as watching:
        assert watching.stdout is not None
        watching.stdout.readline()
        watching.send_signal(number)
        assert watching.wait(30) == 143
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(60)
def test_a_signal_while_the_command_is_waited_for_leaves_nothing_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupted(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            # The signal's handler raises between the two lines that lock and unlock.
            vars(self)["_waitpid_lock"].acquire()
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    assert watch("--", "sh", "-c", "sleep 1; exit 7").exit_code == 7


def test_a_process_without_pages_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (python) R 1")
    for module in (usage_module, guardian_module):
        monkeypatch.setattr(module, "PROC", tmp_path)
    sizes = []
    for pages in (3, 0):
        (tmp_path / "7" / "statm").write_text(f"9 {pages} 1")
        sizes.append(resident_bytes(7))
    assert sizes == [3 * os.sysconf("SC_PAGE_SIZE"), None]


def test_retries_of_the_allocator_are_counted_in_a_command_and_its_peak_is_the_last_line() -> None:
    ended = watch("--every", "0.2", "--json", "--", sys.executable, "-c", FLUSHING)

    told = [json.loads(line)["allocation_retries"] for line in ended.stdout.splitlines()]
    assert [*dict.fromkeys(told)] == [None, 2, 5]
    again = watch("--every", "0.2", "--", sys.executable, "-c", FLUSHING)
    last = again.stderr.splitlines()[-1]
    assert re.fullmatch(r"Peak: .*host \d.*, allocator retries: 5", last)


def test_memory_of_a_gpu_is_split_into_ours_and_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with_nvml(monkeypatch, {os.getpid(): 8 * GIB, 1: 2 * GIB})

    usage = read_usage(os.getpid(), Gpus())

    assert usage is not None
    (gpu,) = usage.gpus
    assert (gpu.name, gpu.process_bytes, gpu.others_bytes) == ("0 NVIDIA A10G", 8 * GIB, 2 * GIB)


def test_where_the_driver_hides_the_processes_all_that_is_used_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_nvml(monkeypatch, {os.getpid(): None})

    usage = read_usage(os.getpid(), Gpus())

    assert usage is not None
    (gpu,) = usage.gpus
    assert (gpu.process_bytes, gpu.others_bytes) == (None, 10 * GIB)


def test_without_nvml_the_host_is_shown_and_the_extra_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)

    assert Gpus().missing == "GPUs are not shown. Try pip install nvidia-ml-py"


def test_a_gpu_that_tells_no_memory_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    with_nvml(monkeypatch, {os.getpid(): None})

    def refuse(_: int) -> None:
        raise RuntimeError("Not Supported")

    monkeypatch.setattr(sys.modules["pynvml"], "nvmlDeviceGetMemoryInfo", refuse)
    gpus = Gpus()
    assert gpus.missing == "GPUs are not shown: NVML says Not Supported"
    assert gpus.read(set()) == ()


def test_a_command_that_ends_before_the_first_reading_keeps_its_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("batchfinder.cli.watch.read_usage", lambda *_: None)
    ended = watch("--", sys.executable, "-c", "raise SystemExit(7)")
    assert (ended.exit_code, "Error" in ended.stderr) == (7, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Try --pid 1234"),
        (("--pid", "4194304"), "there is no process 4194304"),
        (("--", "no-such-command"), "no-such-command cannot be started"),
        (("--", "train.py"), "Try python train.py"),
        (("--every", "0", "--pid", "1"), "--every must be above 0"),
        (("--every", "inf", "--pid", "1"), "not inf. Try 1."),
    ],
)
def test_what_cannot_be_watched_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    ended = watch(*arguments)

    assert ended.exit_code == 2
    assert message in ended.stderr
