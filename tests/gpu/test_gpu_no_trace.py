"""After a search on the device everything is as it was: bits, memory, the allocator's limit."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Iterator
from io import StringIO
from itertools import accumulate
from typing import Any

import pytest
import torch
from gpu.models import (
    DEVICE,
    LIMIT,
    ImageModel,
    image_sample,
    needs_cuda,
    train,
    wide_model,
    wide_sample,
)
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from batchfinder import find_max_batch
from batchfinder.errors import DeviceError
from batchfinder.probing import host_batches
from batchfinder.training.state.snapshot import preserved_state
from batchfinder.units import GIB

pytestmark = needs_cuda


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All values that a step could change, as copies."""
    return copy.deepcopy(
        tree_leaves(
            [
                dict(model.state_dict()),
                [parameter.grad for parameter in model.parameters()],
                [module.training for module in model.modules()],
                optimizer.state_dict(),
                torch.get_rng_state(),
                torch.cuda.get_rng_state(DEVICE),
            ]
        )
    )


def assert_same(before: list[Any], after: list[Any]) -> None:
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        if isinstance(old, Tensor):
            assert old.device == new.device
            assert torch.equal(old.cpu(), new.cpu())
        else:
            assert old == new


def trained_model() -> tuple[ImageModel, torch.optim.Optimizer]:
    """A model in the middle of training: existing states, a gradient, a part in eval mode."""
    model = ImageModel().to(DEVICE)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    train(model, image_sample(), optimizer, steps=2)
    model.head.weight.grad = torch.randn_like(model.head.weight)
    model.body[3].eval()
    return model, optimizer


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_training_state_is_the_same_bit_for_bit(precision: str) -> None:
    model, optimizer = trained_model()
    sample = image_sample()
    before = state_of(model, optimizer)

    result = find_max_batch(
        model, sample, optimizer=optimizer, memory_limit=LIMIT, precision=precision
    )

    assert result.batch_size > 1
    assert_same(before, state_of(model, optimizer))


def test_the_training_state_is_the_same_after_an_error_of_the_user() -> None:
    model, optimizer = trained_model()
    sample = image_sample()
    before = state_of(model, optimizer)

    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        if len(output) > 2:
            raise ValueError("no labels for this one")
        return output.sum()

    with pytest.raises(ValueError, match="no labels for this one"):
        find_max_batch(model, sample, optimizer=optimizer, loss_fn=loss_fn, memory_limit=LIMIT)

    assert_same(before, state_of(model, optimizer))


def test_a_model_on_the_host_goes_to_the_device_and_comes_back() -> None:
    model = ImageModel()
    weights = copy.deepcopy(model.state_dict())

    result = find_max_batch(model, image_sample(), memory_limit=LIMIT, max_batch_size=8)

    assert result.device.startswith("cuda:0 ")
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert_same(tree_leaves(dict(weights)), tree_leaves(dict(model.state_dict())))


def test_all_memory_is_given_back() -> None:
    model, optimizer = trained_model()
    gc.collect()
    torch.cuda.empty_cache()
    allocated = torch.cuda.memory_allocated(DEVICE)
    reserved = torch.cuda.memory_reserved(DEVICE)

    find_max_batch(model, image_sample(), optimizer=optimizer, memory_limit=LIMIT)

    assert torch.cuda.memory_allocated(DEVICE) == allocated
    assert torch.cuda.memory_reserved(DEVICE) <= reserved


def cublas_workspaces() -> int:
    """How many there are."""
    size = 32 * 2**20 if torch.cuda.get_device_capability(DEVICE) >= (9, 0) else 8_519_680
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    blocks = (block for segment in segments for block in segment["blocks"])
    return [b["requested_size"] for b in blocks if b["state"] == "active_allocated"].count(size)


def multiply() -> None:
    square = torch.ones(64, 64, device=DEVICE, requires_grad=True)
    (square @ square).sum().backward()  # type: ignore[no-untyped-call]


def test_workspaces_come_to_lie_as_in_a_fresh_process() -> None:
    """Each probe makes them anew, and the last one leaves none."""
    torch._C._cuda_clearCublasWorkspaces()
    seen = StringIO()  # a list would be put back

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        print(cublas_workspaces(), file=seen)
        return model(batch).sum()  # type: ignore[no-any-return]

    result = find_max_batch(
        nn.Linear(64, 64), torch.randn(2, 64), step=step, device=DEVICE, max_batch_size=8
    )

    counts = [int(count) for count in seen.getvalue().split()]
    firsts = [0, *accumulate(probe.steps for probe in result.probes)][:-1]
    assert len(firsts) > 1
    assert [counts[first] for first in firsts] == [0] * len(firsts)
    assert set(counts) == {0, 2}
    assert cublas_workspaces() == 0


def test_workspaces_that_were_there_stay() -> None:
    torch._C._cuda_clearCublasWorkspaces()
    multiply()

    find_max_batch(nn.Linear(64, 64), torch.randn(2, 64), device=DEVICE, max_batch_size=8)

    assert cublas_workspaces() == 2


def test_workspaces_that_a_graph_may_have_recorded_stay() -> None:
    torch._C._cuda_clearCublasWorkspaces()
    pool = torch.cuda.MemPool()  # as each graph has one
    kept: list[Tensor] = []

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        if not kept:
            with torch.cuda.use_mem_pool(pool):
                kept.append(torch.ones(64, device=DEVICE))
        return model(batch).sum()  # type: ignore[no-any-return]

    find_max_batch(
        nn.Linear(64, 64), torch.randn(2, 64), step=step, device=DEVICE, max_batch_size=8
    )

    assert cublas_workspaces() == 2


def test_nor_does_the_allocator_keep_the_states_of_an_optimizer_made_for_the_search() -> None:
    model = nn.Linear(8192, 8192, device=DEVICE)

    find_max_batch(model, torch.randn(2, 8192), optimizer="adamw", max_batch_size=8)

    weights_bytes = model.weight.nbytes
    assert torch.cuda.memory_reserved(DEVICE) < 1.5 * weights_bytes


def test_the_limit_is_lifted() -> None:
    find_max_batch(wide_model(), wide_sample(), device=DEVICE, memory_limit=LIMIT)

    larger_than_the_limit = torch.empty(3 * GIB, dtype=torch.uint8, device=DEVICE)
    assert larger_than_the_limit.numel() == 3 * GIB


@pytest.fixture
def limit_of_the_user() -> Iterator[int]:
    """3 GiB, in bytes."""
    if not hasattr(torch.cuda, "get_per_process_memory_fraction"):
        pytest.skip("this PyTorch does not tell what limit was set")
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(3 * GIB / total, DEVICE)
    yield 3 * GIB
    torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)


def test_a_limit_of_the_user_is_put_back(limit_of_the_user: int) -> None:
    find_max_batch(wide_model(), wide_sample(), device=DEVICE, memory_limit=LIMIT)

    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(limit_of_the_user + GIB, dtype=torch.uint8, device=DEVICE)


def test_a_limit_of_the_user_bounds_the_budget(limit_of_the_user: int) -> None:
    result = find_max_batch(wide_model(), wide_sample(), device=DEVICE, max_batch_size=2)

    assert 0.9 * limit_of_the_user < result.budget_bytes <= limit_of_the_user


def test_gradients_come_back_also_where_an_error_holds_the_step(limit_of_the_user: int) -> None:
    model = nn.Linear(GIB // 4, 1, bias=False, device=DEVICE)
    gradient = model.weight.grad = torch.ones_like(model.weight)

    def step() -> None:
        activations = torch.empty(3 * GIB // 2, dtype=torch.uint8, device=DEVICE)
        raise ValueError(f"a bug, with {activations.nbytes} of {limit_of_the_user} bytes in use")

    with pytest.raises(ValueError, match="a bug"), preserved_state(model):
        step()

    assert model.weight.grad is gradient
    assert gradient.is_cuda


class LargeLayer(nn.Module):
    """Its weights, and so their gradients, take 1 GiB."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(GIB // 4, device=DEVICE))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.weight[:4]


def test_gradients_come_back_also_after_an_error_in_a_search(limit_of_the_user: int) -> None:
    model = LargeLayer()
    gradient = model.weight.grad = torch.ones_like(model.weight)

    def loss_fn(output: Tensor, batch: Tensor) -> Tensor:
        activations = torch.empty(3 * GIB // 2, dtype=torch.uint8, device=DEVICE)
        raise ValueError(f"a bug, with {activations.nbytes} of {limit_of_the_user} bytes in use")

    with pytest.raises(ValueError, match="a bug"):
        find_max_batch(model, torch.ones(2, 4), loss_fn=loss_fn, optimizer="sgd")

    assert model.weight.grad is gradient
    assert gradient.is_cuda


def test_what_is_cached_before_is_within_the_limit() -> None:
    larger_than_the_limit = torch.empty(3 * GIB, dtype=torch.uint8, device=DEVICE)
    del larger_than_the_limit

    result = find_max_batch(
        wide_model(), wide_sample(), device=DEVICE, memory_limit=LIMIT, max_batch_size=2
    )

    for probe in result.probes:
        assert probe.peak_reserved_bytes is not None
        assert probe.peak_reserved_bytes <= result.budget_bytes


def test_the_limit_is_lifted_after_an_error() -> None:
    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        find_max_batch(
            wide_model(), wide_sample(), device=DEVICE, loss_fn=loss_fn, memory_limit=LIMIT
        )

    larger_than_the_limit = torch.empty(3 * GIB, dtype=torch.uint8, device=DEVICE)
    assert larger_than_the_limit.numel() == 3 * GIB


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before")
def test_an_error_about_shapes_says_what_to_try() -> None:
    with pytest.raises(RuntimeError, match="groups=1") as raised:
        find_max_batch(nn.Conv2d(3, 8, 3), torch.ones(3, 8, 8), device=DEVICE)
    assert "If the sample is one example, try tensor[None]" in vars(raised.value)["__notes__"][0]


def test_a_host_without_room_for_copies_is_told_before_it_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the system would kill the process, such as the kernel of a notebook."""
    model, optimizer = trained_model()
    monkeypatch.setattr(host_batches, "host_memory", lambda: (2000, 1000))
    with pytest.raises(DeviceError, match="the host has no room for copies of model and optimizer"):
        find_max_batch(model, image_sample(), optimizer=optimizer, memory_limit=LIMIT)
