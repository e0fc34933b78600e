"""What a worker does where a probe leaves no trace: it starts over by itself, or says it cannot."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from batchfinder import Outcome, TrainingSetup
from batchfinder.errors import DeviceError
from batchfinder.probing.devices.device import Device, DeviceMemory, Peaks
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.here import Here
from batchfinder.probing.workers.worker import Order
from batchfinder.training.state.snapshot import Snapshot
from batchfinder.units import GIB

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."


class PaperAccelerator(Device):
    """An accelerator of which only the host's side is there.

    Attributes:
        held: the bytes that the process holds between probes.
        limit: what it is limited to; None: nothing.
    """

    name = "paper"
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.held = 0
        self.limit: int | None = None

    def memory(self) -> DeviceMemory:
        return DeviceMemory(8 * GIB, 0, 0, 0)

    @contextlib.contextmanager
    def limited_to(self, budget_bytes: int) -> Iterator[None]:
        before, self.limit = self.limit, budget_bytes
        yield
        self.limit = before

    def held_bytes(self) -> int:
        return self.held

    def reset_peaks(self) -> None: ...

    def peaks(self) -> Peaks:
        return Peaks(GIB, GIB)

    def release_cache(self) -> None: ...


# A list of the model's own would be put back.
SEEN: list[float] = []


class Net(nn.Module):
    """Runs out of memory above some size, and notes the first weight of each other pass."""

    def __init__(self, largest: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.largest = largest

    def forward(self, rows: Tensor) -> Tensor:
        if len(rows) > self.largest:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        SEEN.append(self.layer.weight.flatten()[0].item())
        output: Tensor = self.layer(rows)
        return output


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> PaperAccelerator:
    paper = PaperAccelerator()
    monkeypatch.setattr("batchfinder.probing.workers.here.choose_device", lambda *_: paper)
    SEEN.clear()
    return paper


@pytest.fixture
def worker(device: PaperAccelerator) -> Iterator[Here]:
    model = Net(largest=8)
    setup = TrainingSetup(
        model,
        (torch.randn(3, 4), torch.tensor([0, 1, 1])),
        loss_fn=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
        optimizer=AdamW(model.parameters(), lr=0.1),
    )
    ours = Here(setup, is_replaceable=True)
    ours.start(Order(ProbeOptions(device="paper")))
    yield ours
    ours.end()


def test_each_confirmation_starts_from_the_same_weights(worker: Here) -> None:
    for size, confirm in ((4, False), (4, True), (4, True)):
        attempt = worker.attempt(size, confirm)
        assert (attempt.probe.outcome, attempt.is_reusable) == (Outcome.FITS, True)
    probed, first, second = SEEN[:2], SEEN[2:5], SEEN[5:8]
    assert first == second  # three steps each, the optimizer without states
    assert probed == first[:2]


def test_of_a_model_that_draws_on_the_host_the_first_confirmation_takes_ten_steps(
    worker: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Net.forward

    def drawing(net: Net, rows: Tensor) -> Tensor:
        return plain(net, rows) * (1 + random.random())

    monkeypatch.setattr(Net, "forward", drawing)
    assert worker.attempt(2, confirm=False).probe.fits
    assert [worker.attempt(size, confirm=True).probe.steps for size in (2, 4)] == [10, 3]


def test_a_size_that_runs_out_leaves_a_process_fit_for_the_next(worker: Here) -> None:
    refused = worker.attempt(9, confirm=True)
    assert (refused.probe.outcome, refused.is_believed) == (Outcome.OOM, True)
    assert refused.is_reusable
    assert worker.attempt(8, confirm=True).probe.outcome is Outcome.FITS


def test_a_failed_output_that_a_module_keeps_is_released(
    worker: Here, device: PaperAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Net.forward
    modules: list[Net] = []

    def keeping(net: Net, rows: Tensor) -> Tensor:
        net.kept = rows
        modules[:] = [net]
        return plain(net, rows)

    def held() -> int:
        return GIB if modules and len(vars(modules[0]).get("kept", ())) > 8 else 0

    monkeypatch.setattr(Net, "forward", keeping)
    monkeypatch.setattr(device, "held_bytes", held)
    assert worker.attempt(2, confirm=False).is_reusable
    assert not worker.attempt(12, confirm=False).is_reusable
    attempt = worker.attempt(9, confirm=False)
    assert (attempt.probe.outcome, attempt.is_believed) == (Outcome.OOM, True)


def test_the_limit_holds_between_probes(worker: Here, device: PaperAccelerator) -> None:
    worker.attempt(2, confirm=True)
    assert device.limit == int(0.95 * 8 * GIB)


def test_a_process_that_keeps_memory_is_to_be_replaced(
    worker: Here, device: PaperAccelerator
) -> None:
    assert worker.attempt(2, confirm=True).is_reusable
    device.held = GIB
    assert not worker.attempt(2, confirm=True).is_reusable
    attempt = worker.attempt(9, confirm=True)
    assert (attempt.probe.outcome, attempt.is_believed) == (Outcome.OOM, False)


def test_a_process_that_cannot_start_over_says_nothing_of_the_size(
    worker: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker.attempt(2, confirm=False).is_reusable

    def fail(_: Snapshot) -> None:
        raise DeviceError("not all of the training state could be put back")

    monkeypatch.setattr(Snapshot, "start_over", fail)
    attempt = worker.attempt(2, confirm=True)
    assert (attempt.is_believed, attempt.is_reusable) == (False, False)
    assert attempt.probe.steps == 0
