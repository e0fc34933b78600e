"""Searches in this very process, as on accelerators; here on the CPU."""

from __future__ import annotations

import copy
import io
import queue
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from batchfinder import (
    BatchSizeResult,
    Outcome,
    Probe,
    Status,
    TrainingSetup,
    find_max_batch,
)
from batchfinder.errors import DeviceError, UsageError
from batchfinder.probing.choose_prober import choose_prober
from batchfinder.probing.devices.cpu import CpuDevice
from batchfinder.probing.devices.device import DeviceMemory, Peaks
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers import here
from batchfinder.probing.workers.here import Here
from batchfinder.probing.workers.process_worker import ProcessWorker
from batchfinder.probing.workers.supervisor import Supervisor
from batchfinder.search.bounds import Bounds
from batchfinder.search.run import run_search
from batchfinder.training.complete_setup import completed
from batchfinder.units import GIB, MIB

SAMPLE = torch.randn(3, 4), torch.tensor([0, 1, 1])
UP_TO_SIX = Bounds.of(2, 6)


class Net(nn.Module):
    """Has all that a step changes: weights, running statistics, masks drawn at random."""

    def __init__(self, end: Callable[[], object] = lambda: None, at: int = 10**9) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2)
        )
        self.layers[0].bias.requires_grad_(False)
        self.end, self.at = end, at

    def forward(self, rows: Tensor) -> Tensor:
        if len(rows) >= self.at:
            self.end()
        output: Tensor = self.layers(rows)
        return output


def test_making_batches_leaves_generators_as_they_were() -> None:
    numbers = torch.Generator()
    before = numbers.get_state()

    def make_batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.rand(size, 4, generator=numbers), torch.zeros(size, dtype=torch.int64)

    search(Net(), sample=None, loss_fn=None, make_batch=make_batch)
    assert torch.equal(numbers.get_state(), before)


def with_history(model: Net, optimizer: Optimizer) -> None:
    """Some training, and gradients that wait for a step."""
    for _ in range(2):
        model(SAMPLE[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(SAMPLE[0]).sum().backward()
    model.layers[2].eval()


def fingerprint(model: nn.Module, optimizer: Optimizer) -> bytes:
    """Everything, in bytes."""
    gradients = {name: p.grad for name, p in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    rest = random.getstate(), torch.get_rng_state(), torch.is_grad_enabled()
    buffer = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict(), gradients, modes, rest), buffer)
    return buffer.getvalue()


def search(
    model: nn.Module,
    optimizer: Any = None,
    sample: Any = SAMPLE,
    loss_fn: Any = lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
    make_batch: Any = None,
    precision: str = "fp32",
    accumulate: bool = False,
    bounds: Bounds = UP_TO_SIX,
    **more: Any,
) -> BatchSizeResult:
    setup = TrainingSetup(
        model, sample, loss_fn=loss_fn, optimizer=optimizer, make_batch=make_batch
    )
    options = ProbeOptions(device="cpu", precision=precision, accumulate=accumulate)
    prober = Supervisor(Here(completed(setup)[0]), options)
    try:
        return run_search(prober, bounds, **more)
    finally:
        prober.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "make", [AdamW, lambda params: SGD(params, lr=0.1, momentum=0.9)], ids=["adamw", "sgd"]
)
def test_after_a_search_everything_is_as_it_was(make: Any, precision: str) -> None:
    model = Net()
    optimizer = make(model.parameters())
    with_history(model, optimizer)
    before = fingerprint(model, optimizer)
    result = search(model, optimizer, precision=precision, accumulate=True)
    assert (result.batch_size, result.status) == (6, Status.CAPPED)
    assert fingerprint(model, optimizer) == before


def raising(error: BaseException) -> Callable[[], None]:
    def end() -> None:
        raise error

    return end


@pytest.mark.parametrize("error", [ValueError("bad width"), KeyboardInterrupt(), SystemExit(4)])
def test_also_after_an_error_of_the_model(error: BaseException) -> None:
    model = Net(raising(error), at=4)
    optimizer = AdamW(model.parameters())
    with_history(model, optimizer)
    before = fingerprint(model, optimizer)
    with pytest.raises(type(error)) as raised:
        search(model, optimizer)
    assert raised.value is error
    assert fingerprint(model, optimizer) == before


class _Counting(nn.Module):
    """A loss with a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.unsendable = lambda: None

    def forward(self, output: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(output, batch[1])


def test_a_loss_module_is_as_it_was_too() -> None:
    loss = _Counting().eval()
    search(Net(), loss_fn=loss, bounds=Bounds.of(2, 2))
    assert loss.calls == 0
    assert not loss.training


def test_also_after_an_error_of_on_probe() -> None:
    model = Net()
    optimizer = AdamW(model.parameters())
    before = fingerprint(model, optimizer)

    def on_probe(probe: Probe) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        search(model, optimizer, on_probe=on_probe)
    assert fingerprint(model, optimizer) == before


def test_the_memory_limit_of_the_process_is_lifted_again() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    inside: queue.SimpleQueue[int] = queue.SimpleQueue()  # a list would be put back
    model = Net(lambda: inside.put(resource.getrlimit(resource.RLIMIT_DATA)[0]), at=2)
    result = search(model, None)
    assert {inside.get() for _ in range(inside.qsize())} == {result.budget_bytes}
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.fixture
def nothing_to_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with an accelerator."""
    monkeypatch.setattr("batchfinder.probing.choose_prober.obstacle_to_forks", lambda: "no forks")


@pytest.mark.usefixtures("nothing_to_fork")
def test_that_it_ran_in_this_process_is_said_with_the_reason() -> None:
    result = find_max_batch(Net(), SAMPLE, device="cpu", min_batch_size=2, max_batch_size=2)
    (warning,) = result.warnings
    assert warning.startswith(
        "sizes are tried in this process, because it cannot be forked: no forks. "
    )
    assert warning.endswith("Try batchfinder find")


def test_a_script_is_told_how_to_search_with_fsdp() -> None:
    with pytest.raises(UsageError, match=r"Try torchrun .*find FILE.py:FUNCTION --strategy fsdp"):
        find_max_batch(Net(), SAMPLE, device="cpu", strategy="fsdp")


def test_an_out_of_memory_is_an_outcome_and_the_search_goes_on() -> None:
    model = Net(raising(RuntimeError("DefaultCPUAllocator: can't allocate memory: 12")), at=6)
    result = search(model, None, bounds=Bounds.of(2, 100))
    assert (result.batch_size, result.status) == (5, Status.FOUND)
    assert result.next_failure is not None
    assert (result.next_failure.batch_size, result.next_failure.outcome) == (6, Outcome.OOM)
    assert result.confirmed_steps == 6


def test_a_size_that_breaks_the_device_ends_the_search_with_one_error() -> None:
    model = Net(raising(RuntimeError("CUDA error: device-side assert triggered\nmore")), at=4)
    optimizer = AdamW(model.parameters())
    before = fingerprint(model, optimizer)
    with pytest.raises(
        DeviceError, match=r"^a batch of 6 broke .*\(CUDA error: device-side assert triggered\)\. "
    ):
        search(model, optimizer)
    assert fingerprint(model, optimizer) == before


def test_a_size_too_small_for_batch_norm_is_no_failure() -> None:
    result = search(Net(), None, bounds=Bounds.of(1, 6))
    assert min(probe.batch_size for probe in result.probes) == 2
    assert result.batch_size == 6


def test_each_probe_is_told_as_it_ends() -> None:
    told: list[Probe] = []
    result = search(Net(), None, on_probe=told.append)
    assert tuple(told) == result.probes
    assert [probe.confirmed for probe in told] == [False] * (len(told) - 1) + [True]


def test_every_probe_trains_and_a_confirmation_starts_from_scratch() -> None:
    model = Net()
    optimizer = AdamW(model.parameters())
    setup = TrainingSetup(model, SAMPLE, optimizer=optimizer)
    prober = Supervisor(Here(setup), ProbeOptions(device="cpu"))
    before = copy.deepcopy(model.state_dict())
    prober.probe(2)
    assert len(optimizer.state) > 0
    assert not torch.equal(model.state_dict()["layers.3.weight"], before["layers.3.weight"])
    assert prober.probe(3, confirm=True).steps >= 3
    assert len(optimizer.state) == 0
    # So the step that shows the peak is the second one again.
    assert prober.probe(3).steps == 2
    prober.close()
    prober.close()
    assert len(optimizer.state) == 0
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(("peak_mib", "steps"), [(360, 2), (400, 3)])
def test_what_the_first_steps_use_outside_the_allocator_lowers_the_budget(
    peak_mib: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size that needs more than is left runs again."""
    limits, told = list[int](), list[None]()

    class Growing(CpuDevice):
        def memory(self) -> DeviceMemory:
            return DeviceMemory(GIB, 0, 224 * MIB, 0)

        @contextmanager
        def limited_to(self, budget_bytes: int) -> Iterator[None]:
            limits.append(budget_bytes)
            yield

        def peaks(self) -> Peaks:
            reserved = peak_mib if len(limits) == 1 else 300
            return Peaks(MIB, reserved * MIB, outside_bytes=300 * MIB)

    monkeypatch.setattr(here, "choose_device", lambda *_: Growing())
    worker = Here(TrainingSetup(Net(), SAMPLE), on_step=lambda: told.append(None))
    prober = Supervisor(worker, ProbeOptions(device="cpu", headroom=0.5))
    assert prober.budget_bytes == 400 * MIB
    assert prober.probe(2).fits
    assert prober.probe(3).fits
    prober.close()
    assert limits == [400 * MIB, 362 * MIB]
    assert prober.budget_bytes == 362 * MIB
    assert len(told) == steps + 1


def test_on_the_cpu_sizes_are_tried_in_forks() -> None:
    setup = TrainingSetup(nn.Linear(4, 2), SAMPLE)
    prober = choose_prober(setup, ProbeOptions(device="cpu"))
    try:
        assert isinstance(prober, Supervisor)
        assert isinstance(prober.worker, ProcessWorker)
        assert prober.warnings == ()
    finally:
        prober.close()
