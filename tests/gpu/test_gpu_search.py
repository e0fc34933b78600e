"""The search under real CUDA out-of-memory conditions, in this process."""

from __future__ import annotations

import gc
import random
import re
import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch
from gpu.models import (
    DEVICE,
    LIMIT,
    LIMIT_BYTES,
    needs_cuda,
    repeated,
    train,
    wide_model,
    wide_sample,
)
from torch import Tensor, nn

from batchfinder import BatchFinderError, Outcome, Status, find_max_batch
from batchfinder.probing.devices.choose_device import choose_device
from batchfinder.training.state import storage
from batchfinder.units import GIB, MIB

pytestmark = needs_cuda

HOLD_MEMORY = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda:0")
torch.cuda.synchronize()
print("holding", flush=True)
sys.stdin.read()
"""


def test_the_answer_is_one_below_a_real_out_of_memory() -> None:
    result = find_max_batch(wide_model(), wide_sample(), device=DEVICE, memory_limit=LIMIT)

    assert result.status is Status.FOUND
    assert result.device.startswith("cuda:0 ")
    assert result.next_failure is not None
    # Among sizes that thrash the bracket is drawn to 1 %.
    gap = result.next_failure.batch_size - result.batch_size
    assert 0 < gap <= max(1, result.next_failure.batch_size // 100)
    assert result.next_failure.outcome is Outcome.OOM
    # A size that runs only by flushing the allocator's cache in every step is refused as well.
    assert re.search("out of memory|flushing", result.next_failure.reason)
    assert result.confirmed_steps >= 3


def test_an_affine_model_needs_few_probes() -> None:
    result = find_max_batch(wide_model(), wide_sample(), device=DEVICE, memory_limit=LIMIT)

    # On the allocator's own account, simulated, it takes 14: blocks are cut from segments of some
    # MiB, so the very last size is not on the line.
    assert len(result.probes) <= 18
    assert result.memory_model is not None
    *_, peak = (p.peak_allocated_bytes for p in result.probes if p.batch_size == result.batch_size)
    assert peak is not None
    assert abs(result.memory_model.peak_bytes(result.batch_size) / peak - 1) < 0.05


def test_a_model_that_skips_a_layer_now_and_then_is_confirmed_by_more_steps() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.steps = wide_model(), 0

        def forward(self, rows: Tensor) -> Tensor:
            self.steps += 1
            return self.body(rows if self.steps % 3 else self.body[:2](rows))  # type: ignore[no-any-return]

    sample = wide_sample()
    result = find_max_batch(Skipping(), sample, device=DEVICE, memory_limit=LIMIT)

    assert result.confirmed_steps >= 10


def test_a_model_that_routes_its_rows_is_confirmed_as_batches_of_varying_length_are() -> None:
    """Each step makes the same requests, but of other bytes."""

    class Routing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([wide_model(), wide_model()])

        def forward(self, rows: Tensor) -> Tensor:
            first = int(len(rows) * random.uniform(0.4, 0.6))
            parts = rows[:first], rows[first:]
            return torch.cat([f(part) for f, part in zip(self.experts, parts, strict=True)])

    result = find_max_batch(Routing(), wide_sample(), device=DEVICE, memory_limit=LIMIT)

    answer = [probe for probe in result.probes if probe.batch_size == result.batch_size][-1]
    assert answer.steps_differ
    assert result.confirmed_steps >= 5


def test_no_probe_ever_exceeds_the_budget() -> None:
    result = find_max_batch(wide_model(), wide_sample(), device=DEVICE, memory_limit=LIMIT)

    peaks = [probe.peak_reserved_bytes for probe in result.probes if probe.peak_reserved_bytes]
    assert result.budget_bytes < LIMIT_BYTES
    assert max(peaks) <= result.budget_bytes
    # And the answer makes use of it.
    assert max(peaks) > 0.9 * result.budget_bytes


def test_the_answer_trains_under_the_same_limit_and_much_more_does_not() -> None:
    result = find_max_batch(wide_model(), wide_sample(), device=DEVICE, memory_limit=LIMIT)
    model = wide_model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction(result.budget_bytes / 0.95 / total, DEVICE)
    try:
        train(model, repeated(wide_sample(), result.batch_size), optimizer, steps=20)
        gc.collect()
        torch.cuda.empty_cache()
        with pytest.raises(torch.cuda.OutOfMemoryError):
            train(model, repeated(wide_sample(), int(1.12 * result.batch_size)), optimizer)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)


def test_the_rounding_of_the_allocator_is_no_leak() -> None:
    device = choose_device(DEVICE)
    block = torch.empty(32 * MIB, dtype=torch.uint8, device=DEVICE)
    before = device.in_use_bytes()
    del block
    smaller = torch.empty(32 * MIB - 1000, dtype=torch.uint8, device=DEVICE)  # in the same block

    assert device.in_use_bytes() == before - 1000
    del smaller


def test_multiples_are_kept_to() -> None:
    result = find_max_batch(
        wide_model(), wide_sample(), device=DEVICE, memory_limit=LIMIT, multiple_of=32
    )

    assert result.status is Status.FOUND
    assert {probe.batch_size % 32 for probe in result.probes} == {0}
    assert result.next_failure is not None
    assert result.next_failure.batch_size == result.batch_size + 32


def test_the_maximum_asked_for_is_the_answer_where_it_fits() -> None:
    result = find_max_batch(
        wide_model(), wide_sample(), device=DEVICE, memory_limit=LIMIT, max_batch_size=16
    )

    assert (result.batch_size, result.status) == (16, Status.CAPPED)


def test_nothing_fits_where_the_model_does_not() -> None:
    # 1.5 GiB of parameters; with gradients and Adam's states four times that.
    model = torch.nn.Linear(20_000, 20_000)
    sample = torch.randn(2, 20_000), torch.randn(2, 20_000)

    result = find_max_batch(model, sample, device=DEVICE, memory_limit="4GiB")

    assert (result.batch_size, result.status) == (0, Status.NOTHING_FITS)


def test_a_limit_above_the_device_is_refused() -> None:
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    with pytest.raises(BatchFinderError, match="above what the device has"):
        find_max_batch(wide_model(), wide_sample(), device=DEVICE, memory_limit=total + GIB)


def test_what_another_process_holds_is_not_in_the_budget() -> None:
    alone = find_max_batch(wide_model(), wide_sample(), device=DEVICE, max_batch_size=2)
    held_bytes = 2 * GIB
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_MEMORY, str(held_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "holding\n"
        beside = find_max_batch(wide_model(), wide_sample(), device=DEVICE, max_batch_size=2)
        other.communicate("")

    assert beside.budget_bytes <= alone.budget_bytes - 0.95 * held_bytes


def test_what_steps_use_outside_the_allocator_is_not_in_the_budget() -> None:
    """As libraries and kernels do; here another process, from the first step on."""
    model, held_bytes = wide_model(), GIB // 2
    alone = find_max_batch(model, wide_sample(), device=DEVICE, memory_limit=LIMIT)
    with ExitStack() as opened:

        def grow(*_: object) -> None:
            hook.remove()
            command = [sys.executable, "-c", HOLD_MEMORY, str(held_bytes)]
            pipe = subprocess.PIPE
            other = opened.enter_context(
                subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
            )
            assert other.stdin is not None
            assert other.stdout is not None
            opened.callback(other.stdin.close)
            assert other.stdout.readline() == "holding\n"

        hook = model.register_forward_pre_hook(grow)
        grown = find_max_batch(model, wide_sample(), device=DEVICE, memory_limit=LIMIT)

    assert grown.budget_bytes <= alone.budget_bytes - 0.95 * held_bytes
    assert grown.batch_size < alone.batch_size
    assert grown.cost_full_size_steps < alone.cost_full_size_steps + 3


def test_a_model_in_host_memory_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    real = storage.host_copy

    def noted(tensor: Tensor) -> Tensor:
        copied.append(tensor.nbytes)
        return real(tensor)

    monkeypatch.setattr(storage, "host_copy", noted)
    model = nn.Linear(1024, 1024)
    weight, before = model.weight, model.weight.detach().clone()
    for _ in range(2):
        find_max_batch(model, torch.ones(2, 1024), device=DEVICE, max_batch_size=4)
        assert model.weight is weight
        assert torch.equal(weight, before)
    assert weight.nbytes not in copied
