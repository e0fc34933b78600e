"""Stale values are never read, whatever writes to a tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from without_data import IDS, without_data

from batchfinder import estimate_peak_memory
from batchfinder.errors import StepError
from batchfinder.simulation.tracing.fake import fake_copy, fake_cuda
from batchfinder.simulation.tracing.tracker import StorageTracker
from batchfinder.simulation.values.known import MOST_ELEMENTS
from batchfinder.simulation.values.unknown import ValueUnknownError

SAMPLE = torch.randn(2, 8), torch.randn(2, 8)


def _another_storage(x: Tensor) -> Tensor:
    x.data = torch.randn(8)
    return x


def _written_by_another_name(x: Tensor) -> Tensor:
    torch.empty(0).set_(x.untyped_storage(), 0, (8,), (1,)).normal_()
    return x


def _set_to_it(x: Tensor) -> Tensor:
    torch.randn(8).set_(x).normal_()  # type: ignore[call-overload]
    return x


def _written_through_a_large_view(x: Tensor) -> Tensor:
    x.as_strided((MOST_ELEMENTS, 2), (0, 0))[0, 0].normal_()
    return x


def _viewed_and_drawn(x: Tensor) -> Tensor:
    view = x[:1].view(())
    x[:1].uniform_()
    return view


def _copied_and_written(x: Tensor) -> Tensor:
    copy.copy(x).normal_()
    return x


def _normalized(x: Tensor) -> Tensor:
    F.batch_norm(torch.randn(4, 8), x, x.clone(), training=True)
    return x


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize(
    "write",
    [
        _another_storage,
        _written_by_another_name,
        _set_to_it,
        _written_through_a_large_view,
        _viewed_and_drawn,
        _copied_and_written,
        _normalized,
    ],
)
def test_an_untracked_write_drops_the_value(write: Callable[[Tensor], Tensor]) -> None:
    with without_data() as ids:
        written = write(ids.float())
        with pytest.raises((DataDependentOutputException, ValueUnknownError)):
            int(written.max().item())


def test_a_write_to_one_element_changes_only_that() -> None:
    with without_data():
        mask = torch.isnan(torch.randn(4))
        mask[0] = True
        assert mask.tolist() == [True, False, False, False]


def test_an_operator_writes_only_to_its_out() -> None:
    with without_data() as ids:
        for out in (torch.empty(8, dtype=torch.int64), torch.empty(0, dtype=torch.int64)):
            assert torch.add(ids, 1, out=out) is out
            assert out.tolist() == (IDS + 1).tolist()
            assert ids.tolist() == IDS.tolist()
        with pytest.raises(DynamicOutputShapeException):
            torch.nonzero(ids, out=out)


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (lambda x: x[torch.ones(4, dtype=torch.bool)], r"The shape of the mask \[4\] at index 0"),
        (
            lambda x: x.view(2, 4)[:, torch.ones(3, dtype=torch.bool)],
            r"\[3\] at index 0 .* at index 1",
        ),
        (lambda x: x.masked_select(torch.ones(3, dtype=torch.bool)), "The size of tensor a"),
        (lambda x: (x - 5).bincount(), "non-negative"),
        (lambda x: torch.arange(5)[x], r"index \d is out of bounds"),
    ],
)
def test_invalid_values_raise_the_error_of_pytorch(
    mistake: Callable[[Tensor], Any], told: str
) -> None:
    with pytest.raises((IndexError, RuntimeError), match=told):
        mistake(IDS.clone())
    with without_data() as ids, pytest.raises((IndexError, RuntimeError), match=told):
        mistake(ids)


def test_views_of_one_storage_share_it_in_a_copy() -> None:
    model = nn.Module()
    whole = torch.arange(6)
    model.parts = [*whole.chunk(2)]  # type: ignore[assignment]
    with fake_cuda((8, 0)) as mode, StorageTracker(1, model):
        first, second = fake_copy(model, mode, model).parts  # type: ignore[misc]
        assert (first.tolist(), second.tolist()) == ([0, 1, 2], [3, 4, 5])
        first.as_strided((6,), (1,)).add_(1)
        assert (first.tolist(), second.tolist()) == ([1, 2, 3], [4, 5, 6])
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]


def test_values_written_by_an_optimizer_are_unknown() -> None:
    class Counted(nn.Linear):
        count: Tensor

        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            assert self.count.item() >= 0
            return super().forward(x)

    class Counting(torch.optim.SGD):
        count: Tensor

        def step(self, closure: Any = None) -> Any:
            self.count.add_(1)
            return super().step(closure)

    model = Counted()
    optimizer = Counting(model.parameters(), lr=0.1)
    optimizer.count = model.count
    with pytest.raises(StepError, match="the step reads a value of a tensor"):
        estimate_peak_memory(model, SAMPLE, optimizer=optimizer, batch_size=4, gpu="t4")
    assert model.count.item() == 0


@torch.library.custom_op("batchfinder_test::on_gpu_alone", mutates_args=())
def on_gpu_alone(x: Tensor) -> Tensor:
    raise AssertionError("this kernel is for a GPU")


@on_gpu_alone.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_custom_operator_never_runs() -> None:
    with without_data() as ids:
        doubled = on_gpu_alone(ids)
        assert doubled.shape == ids.shape
        with pytest.raises(DataDependentOutputException):
            doubled.max().item()


def test_a_mask_of_ones_of_a_large_tensor_selects_everything() -> None:
    with without_data():
        x = torch.randn(4, MOST_ELEMENTS)
        assert x[torch.isfinite(x)].shape == (4 * MOST_ELEMENTS,)
        assert x[torch.isnan(x)].shape == (0,)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_a_tensor_without_memory_is_never_read() -> None:
    with without_data() as ids:
        shared = torch.utils.dlpack.from_dlpack(ids)
        assert shared.sum(0).shape == ()
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            shared + 1  # as told in one line


class Texts:
    """A batch that is not a tree of tensors."""

    def __init__(self, size: int) -> None:
        self.x = torch.randn(size, 8)
        self.lengths = torch.arange(size) % 4

    def __len__(self) -> int:
        return len(self.x)


class Packed(nn.GRU):
    """A model that reads packed sequences from the batch."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, batch: Any) -> Tensor:  # type: ignore[override]
        output: Tensor = super().forward(batch)[0].data
        return output.sum()


class Picking(nn.Linear):
    """A model that reads an object."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, batch: Texts) -> Tensor:  # type: ignore[override]
        return super().forward(batch.x[batch.lengths > 0])[:, : batch.lengths.max()].sum()


@pytest.mark.parametrize(
    ("model", "make_batch"),
    [
        (Picking(), Texts),
        (Packed(), lambda n: nn.utils.rnn.pack_sequence([torch.randn(5, 8)] * n)),
    ],
)
def test_values_in_objects_are_known(model: nn.Module, make_batch: Callable[[int], Any]) -> None:
    assert estimate_peak_memory(
        model, make_batch(2), make_batch=make_batch, batch_size=8, gpu="t4"
    ).fits
