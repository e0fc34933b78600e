"""The ways into a Python process of a launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from batchfinder.launching.hook.failures import Failures
from batchfinder.launching.hook.memory import Memory
from batchfinder.launching.hook.requests import Requests
from batchfinder.launching.hook.steps import Steps
from batchfinder.launching.launch import HOOK

HOOK_FILE = HOOK / "sitecustomize.py"
PTH = (HOOK / "batchfinder_run.pth").read_text()


@pytest.mark.parametrize("flags", [["-E"], ["-I"], []])
def test_the_hook_enters_once_by_the_pth_file_or_by_the_path(
    flags: list[str], tmp_path: Path
) -> None:
    reports, order = tmp_path / "reports", tmp_path / "order"
    reports.touch()
    order.write_text("{}")
    environment = {
        **os.environ,
        "PYTHONPATH": str(HOOK),
        "BATCHFINDER_RUN": str(order),
        "BATCHFINDER_HOOK": str(HOOK_FILE),
    }
    subprocess.run([sys.executable, *flags, "-c", PTH], env=environment, check=True)
    assert [json.loads(line)["event"] for line in reports.read_text().splitlines()] == ["alive"]


def test_the_hook_imports_nothing_before_pytorch(tmp_path: Path) -> None:
    (tmp_path / "reports").touch()
    (tmp_path / "order").write_text("{}")
    show = [sys.executable, "-I", "-S", "-c", "import sys; exec(sys.argv[1]); print(*sys.modules)"]
    hooked = {"BATCHFINDER_RUN": str(tmp_path / "order"), "BATCHFINDER_HOOK": str(HOOK_FILE)}
    bare, more = (
        {*subprocess.check_output([*show, PTH], env=environment, text=True).split()}
        for environment in ({}, hooked)
    )
    assert more - bare == {"__future__", "_batchfinder_hook"}


def test_without_a_launch_the_pth_file_does_nothing() -> None:
    environment = {name: text for name, text in os.environ.items() if "BATCHFINDER" not in name}
    subprocess.run([sys.executable, "-c", PTH], env=environment, check=True)


def test_a_script_runs_on_if_the_allocator_has_no_observers() -> None:
    """That of the backend cudaMallocAsync has none, and raises as CUDA is initialized."""
    asked = []

    def attach(observer: Any) -> None:
        asked.append(observer)
        raise RuntimeError("cudaMallocAsync does not yet support attachOutOfMemoryObserver")

    fake: Any = SimpleNamespace(_C=SimpleNamespace(_cuda_attach_out_of_memory_observer=attach))
    Failures(fake, {"certain": [], "doubtful": []}, report=None, memory=None).begin_cuda()
    assert len(asked) == 1


class Ended(BaseException):
    """The launch is over."""


@pytest.mark.parametrize("goes_on", [True, False])
def test_memory_that_runs_out_in_an_operation_counts_if_it_is_raised(goes_on: bool) -> None:
    """cuDNN goes on with another kernel if it gets no workspace. Scripts swallow what they get."""
    reported: list[str] = []

    report: Any = Mock(side_effect=lambda event, **_: reported.append(event))
    report.pause.side_effect = Ended
    memory = SimpleNamespace(train_on=lambda _: None, identity=dict, peaks=dict)
    failures = Failures(torch, {"certain": [], "doubtful": []}, report, memory)

    ran_out: Any = partial(failures._ran_out, 0, 2**20, 0, 0)

    def fail() -> bool:
        raise torch.cuda.OutOfMemoryError

    def script() -> None:
        with suppress(torch.cuda.OutOfMemoryError):
            ran_out() or ran_out() or goes_on or fail()  # one line, as one operation

    before = sys.gettrace()
    with nullcontext() if goes_on else pytest.raises(Ended):
        script()
    assert reported == ([] if goes_on else ["out_of_memory"])
    assert sys.gettrace() is before


@pytest.mark.parametrize(
    ("devices", "rank", "touched"), [(1, None, [0]), (4, "2", [2]), (4, None, [])]
)
def test_a_script_may_train_on_another_device_than_a_full_one(
    devices: int, rank: str | None, touched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch would end the script, as this runs while CUDA is initialized.

    A look at the device of another rank would need memory there.
    """
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank:
        monkeypatch.setenv("LOCAL_RANK", rank)
    asked: list[int] = []

    def mem_get_info(index: int) -> tuple[int, int]:
        asked.append(index)
        raise RuntimeError("CUDA error: out of memory")

    cuda = SimpleNamespace(
        device_count=lambda: devices, device=nullcontext, mem_get_info=mem_get_info
    )
    torch: Any = SimpleNamespace(cuda=cuda)
    Memory(torch, {"cpu_budget_bytes": None}, None).begin_cuda()
    assert asked == touched


@pytest.mark.parametrize(
    ("held", "trained", "device", "limited"),
    [
        ([60, 80], ["cuda:0", "cuda:1"], "cuda:1 GPU", [0, 1]),  # its layers are on two devices
        ([60, 80], ["cuda:0"], "cuda:0 GPU", [0, 1]),  # a teacher is on the other one
        ([0, 80], ["cpu"], "cuda:1 GPU", [1]),  # they are on the CPU until their turn
        ([0, 80], [], "cuda:1 GPU", [1]),  # there is no optimizer
        ([0, 0], ["cpu"], "cpu", []),
    ],
)
def test_the_device_that_limits_a_training_is_the_fullest(
    held: list[int], trained: list[str], device: str, limited: list[int]
) -> None:
    fractions: dict[int, float] = {}

    def limit(fraction: float, index: int) -> None:
        fractions[index] = fraction

    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        device=nullcontext,
        max_memory_reserved=held.__getitem__,
        memory_reserved=held.__getitem__,
        mem_get_info=lambda index: (100 - held[index] - 2 * index, 100),
        get_device_properties=lambda index: SimpleNamespace(is_integrated=False),
        set_per_process_memory_fraction=limit,
        get_device_name=lambda index: "GPU",
    )
    fake: Any = SimpleNamespace(cuda=cuda, device=torch.device, version=torch.version)
    order = {
        "cpu_budget_bytes": None,
        "limit_bytes": None,
        "headroom": 0,
        "cuda_budget_bytes": None,
    }
    memory = Memory(fake, order, None)
    memory.train_on_fullest({torch.device(name) for name in trained})
    assert memory.facts["device"] == device
    assert [*fractions] == limited
    if len(trained) == 2:
        assert memory.facts["budget_bytes"] == 98  # all devices of the model have the least


@pytest.mark.parametrize(("share", "limit"), [(1.0, 0.9), (0.5, 0.5), (None, 0.9)])
def test_the_budget_is_within_the_limit_that_the_user_sets_by_the_allocator(
    share: float | None, limit: float
) -> None:
    limits: list[float] = []
    cuda = SimpleNamespace(
        device=nullcontext,
        mem_get_info=lambda _: (900, 1000),
        memory_reserved=lambda _: 0,
        get_device_properties=lambda _: SimpleNamespace(is_integrated=False),
        get_device_name=lambda _: "Paper",
        set_per_process_memory_fraction=lambda fraction, _: limits.append(fraction),
    )
    if share:  # older versions of PyTorch cannot be asked
        cuda.get_per_process_memory_fraction = lambda _: share
    torch: Any = SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=None))
    budget = {"cpu_budget_bytes": None, "cuda_budget_bytes": None, "limit_bytes": None}
    memory = Memory(torch, {**budget, "headroom": 0}, None)
    memory.limit_cuda(0)
    assert limits == [limit]
    memory.index = 0
    assert memory.outside() == 100


@pytest.mark.parametrize(
    ("index", "is_capturing", "has_ranks", "waits"),
    [(0, False, False, 1), (None, False, False, 0), (0, True, False, 0), (0, False, True, 0)],
)
def test_a_step_ends_when_the_device_has_run_it(
    index: int | None, is_capturing: bool, has_ranks: bool, waits: int
) -> None:
    """Kernels run later than they are launched. A stream that is captured cannot be waited for."""
    waited: list[int] = []
    torch: Any = SimpleNamespace(
        cuda=SimpleNamespace(
            is_current_stream_capturing=lambda: is_capturing, synchronize=waited.append
        ),
        distributed=SimpleNamespace(is_available=lambda: True, is_initialized=lambda: has_ranks),
    )
    memory = Memory(torch, {"cpu_budget_bytes": None}, None)
    memory.index = index
    memory.wait()
    assert waited == [0] * waits


@pytest.mark.parametrize(
    ("facts", "is_reported"),
    [({"budget_bytes": 100}, False), ({"budget_bytes": 20}, True), ({}, True)],
)
def test_a_kernel_that_the_device_lacks_is_no_lack_of_memory(
    facts: dict[str, int], is_reported: bool
) -> None:
    """Most of the memory is free then."""
    reported: list[str] = []
    memory = SimpleNamespace(facts=facts, peaks=lambda: {"reserved": 19})
    order = {"certain": ["CUDA out of memory"], "doubtful": ["unable to find an engine"]}
    failures = Failures(torch, order, lambda event, **_: reported.append(event), memory)
    failures.look_at(RuntimeError("GET was unable to find an engine to execute this computation"))
    assert reported == ["doubtful"] * is_reported


def test_keyword_arguments_are_read_in_an_older_pytorch_too() -> None:
    seen: list[Any] = []
    steps: Any = SimpleNamespace(_leaves=lambda *arguments: seen.append(arguments))
    handle = register_module_forward_hook(partial(Steps._leaves_by_frame, steps), always_call=True)
    with handle:
        nn.Linear(2, 1)(input=torch.zeros(3, 2))
    [(_, arguments, keywords, output)] = seen
    assert arguments == ()
    assert keywords["input"].shape == (3, 2)
    assert output.shape == (3, 1)


def test_a_validation_that_ends_in_a_training_anew_is_not_replayed() -> None:
    """What a next fold makes comes only once: ten more of it left room for 64 where 208 trains."""
    reported: list[str] = []
    history = SimpleNamespace(
        end_step=lambda: None, end_validation=lambda: None, recording=lambda: {"steps": []}
    )
    recorder = SimpleNamespace(begin=lambda: True, Recorder=lambda *_: history)
    for forgets in (True, False):
        requests = Requests(recorder, lambda event, **_: reported.append(event))
        requests.begin_cuda()
        requests.end_reading(0, waits=False)
        if forgets:
            requests.forget_validation()
        requests.end_validation()
        assert len(reported) == (not forgets)
