"""Workers forked from the user's own process, for setups that no other process can be sent."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import descendants, eventually, idle_bytes, is_gone
from torch import Tensor, nn
from warm import WarmPython, run_warm, server

from batchfinder import BatchSizeResult, Outcome, Status, find_max_batch
from batchfinder.errors import UserCodeError
from batchfinder.probing.workers.fork import obstacle_to_forks
from batchfinder.units import MIB

pytestmark = [
    pytest.mark.skipif(bool(obstacle_to_forks()), reason="needs Linux without accelerators"),
    pytest.mark.usefixtures("nothing_is_left"),
]

SAMPLE = torch.randn(4, 256)

# Trains before it searches, so that OpenMP and autograd are at work already.
SCRIPT = """
import sys
import threading
import torch
from torch import nn
from batchfinder import find_max_batch

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(4096), nn.GELU(), nn.Linear(4096, 16))

    def forward(self, rows):
        {deed}
        return self.layers(rows).mean()

model = Mine()
rows = torch.randn(64, 4096)
model.layers(rows).sum().backward()
print("once", end=" ")
result = find_max_batch(model, rows, device="cpu", **{options})
model.layers(rows).sum().backward()
print(result.batch_size, *result.warnings)
"""


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    def held() -> tuple[list[int], list[Path]]:
        return descendants(os.getpid()), sorted(Path("/proc/self/fd").iterdir())

    server()  # its connection stays
    before = held()
    yield
    assert eventually(lambda: held() == before)


def script(deed: str = "pass", **options: Any) -> str:
    return SCRIPT.format(deed=deed, options=options)


def search(end: Callable[[], object], at: int, **bounds: Any) -> BatchSizeResult:
    """A search with a model that does something from a batch size on."""
    layer = nn.Linear(256, 256)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        if len(batch) >= at:
            end()
        loss: Tensor = layer(batch).sum()
        return loss

    before, generator = layer.weight.clone(), torch.get_rng_state()
    try:
        return find_max_batch(layer, SAMPLE, step=step, device="cpu", **bounds)
    finally:
        assert torch.equal(layer.weight, before)
        assert layer.weight.grad is None
        assert torch.equal(torch.get_rng_state(), generator)


def run_out() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_a_model_of_the_script_itself_is_searched_for_under_a_real_limit() -> None:
    """And then trains under it in the very process that asked."""
    limit = idle_bytes() + 400 * MIB
    code = (
        script(memory_limit=limit)
        + f"""
import resource
resource.setrlimit(resource.RLIMIT_DATA, ({limit}, -1))
optimizer = torch.optim.AdamW(model.parameters())

def train(batch_size):
    for _ in range(5):
        model(torch.randn(batch_size, 4096)).backward()
        optimizer.step()
        optimizer.zero_grad()

train(result.batch_size)
try:
    train(2 * result.batch_size)
except RuntimeError as error:
    print(error)
"""
    )
    found, failed = run_warm(code).splitlines()
    assert found.startswith("once ")
    assert "this process" not in found
    assert "can't allocate memory" in failed


def test_sizes_fail_in_the_fork_and_nothing_changes_here() -> None:
    result = search(run_out, at=6, max_batch_size=100)
    assert (result.batch_size, result.status, result.confirmed_steps) == (5, Status.FOUND, 6)
    assert result.warnings == ()


def test_random_numbers_are_drawn_in_the_fork() -> None:
    search(lambda: torch.rand(3), at=1, max_batch_size=4)


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (lambda: os._exit(3), Outcome.FAILED),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), Outcome.OOM),
    ],
    ids=["_exit", "SIGKILL"],
)
def test_a_fork_may_die(end: Callable[[], object], outcome: Outcome) -> None:
    result = search(end, at=4, max_batch_size=64)
    assert result.batch_size == 3
    assert result.next_failure is not None
    assert (result.next_failure.batch_size, result.next_failure.outcome) == (4, outcome)


def test_an_error_of_the_users_own_comes_with_its_traceback() -> None:
    def fail() -> None:
        raise KeyError("token")

    with pytest.raises(UserCodeError, match="KeyError: 'token'") as told:
        search(fail, at=1)
    assert "in fail" in told.value.user_traceback
    assert "batchfinder/" not in told.value.user_traceback


def test_what_the_fork_prints_is_not_the_users_output() -> None:
    deed = "print('many'); sys.stderr.write('times')"
    printed, errors = WarmPython("-c", script(deed, max_batch_size=4)).communicate()
    assert (printed.split(), errors) == (["once", "4"], "")


def test_without_standard_streams(tmp_path: Path) -> None:
    told = tmp_path / "told"
    closed = "import os, sys; os.closerange(0, 3); sys.stdin = sys.stdout = sys.stderr = None\n"
    code = f"open({str(told)!r}, 'w').write(str(result.batch_size)); os._exit(0)"
    WarmPython("-c", closed + script(max_batch_size=4) + code).communicate()
    assert told.read_text() == "4"


def test_a_user_who_lets_the_system_wait_for_children() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert search(run_out, at=6, max_batch_size=8).batch_size == 5
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_in_a_thread_beside_others() -> None:
    code = script(max_batch_size=4).replace("result = find", "result = run(lambda: find")
    code = code.replace("{'max_batch_size': 4})", "{'max_batch_size': 4}))")
    run = """
from concurrent.futures import ThreadPoolExecutor
pause = threading.Event()
threading.Thread(target=pause.wait, daemon=True).start()
run = lambda call: ThreadPoolExecutor(1).submit(call).result()
"""
    code = code.replace("model = Mine()", run + "model = Mine()")
    assert run_warm(code).split() == ["once", "4"]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_no_fork_outlives_the_script(end: signal.Signals) -> None:
    code = script("print(threading.Event().wait())", max_batch_size=4)
    process = WarmPython("-c", code, new_session=True)
    forks = eventually(lambda: descendants(process.pid))
    os.killpg(process.pid, end)
    process.communicate()
    assert eventually(lambda: all(is_gone(pid) for pid in forks))


def test_a_fork_of_a_process_that_has_compiled_has_compiler_threads_of_its_own() -> None:
    code = """
import torch
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from batchfinder import find_max_batch

def step(model, rows):
    AsyncCompile.submit(int).result()
    return model(rows).mean()

config.compile_threads = 2
model, rows = torch.nn.Linear(4, 4), torch.randn(4, 4)
step(model, rows)
result = find_max_batch(model, rows, step=step, device="cpu", max_batch_size=2)
print(result.batch_size, *result.warnings)
"""
    assert run_warm(code) == "2\n"


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_process_can_be_forked_where_gradients_are_off(off: type) -> None:
    with off():
        assert not obstacle_to_forks()


def test_a_driver_is_in_the_way_only_where_it_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert obstacle_to_forks() == ""  # as after bitsandbytes was imported, without a GPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "a step in a trial fork failed" in obstacle_to_forks()


def test_a_process_with_many_open_files_can_be_forked() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert obstacle_to_forks() == ""
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
