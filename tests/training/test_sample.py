from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from batchfinder.errors import SampleError
from batchfinder.training.sample import BatchMaker, move_batch
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.tree import map_leaves, named_tensors


class Pair(NamedTuple):
    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Example:
    tokens: Tensor
    mask: Tensor
    name: str


def counting(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor in which all values differ."""
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)


@st.composite
def samples(draw: st.DrawFn) -> tuple[Any, int]:
    """A tree in which all tensors have the same first dimension."""
    batch_size = draw(st.integers(1, 5))
    dtypes = st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16])
    shapes = st.lists(st.integers(1, 3), max_size=3)
    tensors = st.builds(lambda shape, dtype: counting(batch_size, *shape).to(dtype), shapes, dtypes)
    scalars = st.builds(torch.tensor, st.floats(0, 1))
    tree = draw(
        st.recursive(
            tensors | scalars | st.integers() | st.none(),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.text(max_size=2), inner, max_size=3)
                | st.builds(Pair, inner, inner)
                | st.builds(Example, inner, inner, st.text(max_size=2))
            ),
            max_leaves=6,
        )
    )
    return (draw(tensors), tree), batch_size


@given(samples(), st.integers(1, 17))
def test_every_batch_repeats_the_sample_s_examples_in_turn(
    case: tuple[Any, int], batch_size: int
) -> None:
    sample, examples = case
    maker = BatchMaker(sample)
    assert maker.batch_size == examples
    batch = maker.make(batch_size)
    for (path, before), (path_after, after) in zip(
        named_tensors(sample), named_tensors(batch), strict=True
    ):
        assert path_after == path
        assert after.dtype == before.dtype
        if before.dim() == 0:
            assert torch.equal(after, before)
            continue
        assert after.shape == (batch_size, *before.shape[1:])
        for index in range(batch_size):
            assert torch.equal(after[index], before[index % examples])

    def without_tensors(tree: Any) -> Any:
        return map_leaves(lambda _, leaf: None if isinstance(leaf, Tensor) else leaf, tree)

    assert without_tensors(batch) == without_tensors(sample)


@given(samples())
def test_every_batch_is_a_copy_that_a_step_may_write_into(case: tuple[Any, int]) -> None:
    sample, examples = case
    before = [x.clone() for _, x in named_tensors(sample)]
    maker = BatchMaker(sample)
    for _, tensor in named_tensors(maker.make(examples)):
        tensor.zero_()
    for (_, after), expected in zip(named_tensors(sample), before, strict=True):
        assert torch.equal(after, expected)
    for (_, again), expected in zip(named_tensors(maker.make(examples)), before, strict=True):
        assert torch.equal(again, expected)


def test_leaves_of_another_size_stay_as_they_are() -> None:
    sample: dict[str, Any] = {
        "input_ids": counting(3, 8, dtype=torch.int64),
        "labels": counting(3, 8, dtype=torch.int64),
        "mask": counting(8, 8),
        "temperature": torch.tensor(0.5),
        "task": "lm",
    }
    maker = BatchMaker(sample)
    batch = maker.make(7)
    assert {key: tuple(value.shape) for key, value in batch.items() if key != "task"} == {
        "input_ids": (7, 8),
        "labels": (7, 8),
        "mask": (8, 8),
        "temperature": (),
    }
    assert torch.equal(batch["mask"], sample["mask"])
    assert batch["task"] == "lm"
    (warning,) = maker.warnings
    assert "taken to be 3, so this stays as it is in every batch: sample['mask'] [8, 8];" in warning


def test_arrays_of_numpy_grow_with_the_batch() -> None:
    numpy = pytest.importorskip("numpy")
    sample = {"x": torch.zeros(2, 3), "ids": numpy.array([7, 8]), "names": numpy.array(["a", "b"])}
    batch = BatchMaker(sample).make(5)
    assert batch["ids"].tolist() == [7, 8, 7, 8, 7]
    assert batch["names"].tolist() == ["a", "b", "a", "b", "a"]


def test_lists_of_texts_grow_with_the_batch() -> None:
    """As a DataLoader makes them of the texts of its examples."""
    sample = {"text": ["a", "b"], "file": ("x", "y"), "tags": ["u", "v", "w"], "y": torch.ones(2)}
    maker = BatchMaker(sample)
    batch = maker.make(5)
    assert batch["text"] == ["a", "b", "a", "b", "a"]
    assert batch["file"] == ("x", "y", "x", "y", "x")
    assert batch["tags"] == ["u", "v", "w"]
    assert maker.make(1)["text"] == ["a"]
    assert not maker.warnings
    batch["tags"].clear()
    assert sample["tags"] == maker.make(2)["tags"] == ["u", "v", "w"]


def test_lists_that_may_have_an_entry_for_each_example_are_told_of() -> None:
    sample = {"x": torch.ones(3, 4), "lengths": [4, 2, 3], "size": [224, 224], "scale": (1, 2, 3)}
    maker = BatchMaker(sample)
    assert maker.make(7)["lengths"] == [4, 2, 3]
    (warning,) = maker.warnings
    assert "sample['lengths'], a list of 3, sample['scale'], a tuple of 3; if" in warning
    facts = [{"id": 1, "boxes": []}, {"id": 2, "boxes": [(0, 1)]}]
    (warning,) = BatchMaker((torch.ones(2, 4), facts)).warnings
    assert "so this stays as it is in every batch: sample[1], a list of 2; if" in warning


def test_batch_dim_may_be_another_one() -> None:
    maker = BatchMaker((counting(9, 2, 4), counting(9, 2)), batch_dim=1)
    assert maker.batch_size == 2
    inputs, targets = maker.make(3)
    assert (inputs.shape, targets.shape) == ((9, 3, 4), (9, 3))
    assert torch.equal(inputs[:, 2], counting(9, 2, 4)[:, 0])
    assert inputs.is_contiguous()


def test_batch_dim_may_count_from_the_end() -> None:
    maker = BatchMaker((counting(9, 2), counting(2)), batch_dim=-1)
    assert [x.shape for x in maker.make(5)] == [(9, 5), (5,)]


IMAGE_SHAPES = st.tuples(*[st.integers(1, 4)] * 4)


@given(IMAGE_SHAPES, st.integers(1, 9))
def test_channels_last_stays_so(shape: tuple[int, ...], batch_size: int) -> None:
    images = counting(*shape).to(memory_format=torch.channels_last)
    batch = BatchMaker(images).make(batch_size)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    # The strides that torch itself gives such a tensor, also where a size of 1 leaves a choice.
    assert batch.stride() == torch.empty(batch.shape).to(
        memory_format=torch.channels_last
    ).stride()  # fmt: skip


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(2, 9), st.data())
def test_contiguous_stays_so(shape: list[int], batch_size: int, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    batch = BatchMaker(counting(*shape), batch_dim=dim).make(batch_size)
    assert batch.is_contiguous()


def test_transposed_stays_so_and_expanded_becomes_dense() -> None:
    transposed = BatchMaker(counting(3, 4, 5).transpose(1, 2)).make(6)
    assert transposed.stride() == (20, 1, 5)
    expanded = BatchMaker(torch.ones(1, 3).expand(2, 3)).make(4)
    expanded[0].zero_()
    assert expanded.tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1]]


def test_tensors_that_require_grad_become_plain_data() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    with torch.enable_grad():
        batch = BatchMaker((parameter, parameter * 2)).make(3)
    assert [x.requires_grad for x in batch] == [False, False]


def test_sample_made_in_inference_mode_can_be_trained_on() -> None:
    with torch.inference_mode():
        sample = torch.ones(2, 3)
    batch = BatchMaker(sample).make(3)
    nn.Linear(3, 1)(batch).sum().backward()
    assert not batch.is_inference()


def test_making_a_large_batch_of_one_example_takes_few_copies() -> None:
    batch = BatchMaker(torch.tensor([[1.0, 2.0]])).make(1_000_003)
    assert batch.sum().item() == 3_000_009


def test_tensors_of_too_many_elements_have_no_data() -> None:
    images = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    labels = torch.tensor([7, 8])

    large, small = BatchMaker((images, labels)).make(5, most_elements=5)

    assert (large.shape, large.is_meta) == ((5, 3, 4, 4), True)
    assert large.is_contiguous(memory_format=torch.channels_last)
    assert small.tolist() == [7, 8, 7, 8, 7]


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        (None, "the sample, of type NoneType, holds no tensors; give a batch as your"),
        (
            {"a": 1, "b": ["x"]},
            "the sample, of type dict, holds no tensors.*torch.from_numpy for an array",
        ),
        (
            (torch.tensor(1.0), torch.tensor(2.0)),
            r"no tensor of the sample has a dimension 0.*sample\[0\] \[\], sample\[1\] \[\]",
        ),
        (
            {"x": torch.zeros(4, 3), "y": torch.zeros(5)},
            r"disagree about the batch size: 4 or 5\? \(sample\['x'\] \[4, 3\], sample\['y'\] "
            r"\[5\]\); set batch_dim .*your loader instead, or make_batch\(batch_size\)",
        ),
        (
            ([torch.ones(3, 8, 8)] * 2, [{"boxes": torch.ones(7, 4), "labels": torch.ones(7)}] * 2),
            r"a list of dicts whose tensors disagree about the batch size.*one for each example",
        ),
        (torch.zeros(0, 3), r"the sample is empty: sample \[0, 3\]"),
        (torch.zeros(2, 0), r"the sample is empty: sample \[2, 0\]"),
        ((torch.ones(2, 2).to_sparse(), 1), r"sample\[0\] is a sparse tensor.*make_batch"),
        (torch.zeros(2, device="meta"), "sample is a meta tensor.*make_batch"),
        (
            {"x": pack_sequence([torch.ones(2), torch.ones(1)])},
            r"sample\['x'\] is a PackedSequence, which cannot be made larger.*make_batch",
        ),
    ],
)
def test_samples_that_cannot_be_used(sample: Any, said: str) -> None:
    with pytest.raises(SampleError, match=said) as info:
        BatchMaker(sample)
    assert "\n" not in str(info.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(SampleError, match="sample is a nested tensor"):
        BatchMaker(nested)


def test_objects_that_hide_tensors_are_refused_not_passed_through() -> None:
    class Boxes:
        def __init__(self) -> None:
            self.corners = torch.zeros(2, 4)

    with pytest.raises(SampleError, match=r"sample\[1\] is a Boxes.*make_batch"):
        BatchMaker((torch.zeros(2, 3), Boxes()))


def test_many_shapes_are_cut_short() -> None:
    with pytest.raises(SampleError, match=r"sample\[5\] \[6\], \.\.\.\)"):
        BatchMaker([torch.zeros(size) for size in range(1, 9)])


def test_make_batch_is_used_in_place_of_the_sample() -> None:
    asked: list[int] = []

    def make_batch(batch_size: int) -> dict[str, Any]:
        asked.append(batch_size)
        return {"x": torch.zeros(batch_size, 3), "names": ["a"] * batch_size}

    maker = BatchMaker(torch.zeros(2), make_batch=make_batch)
    assert maker.batch_size is None
    assert maker.make(4)["x"].shape == (4, 3)
    assert len(maker.make(6)["names"]) == 6
    assert asked == [4, 6]


def test_make_batch_of_packed_data_needs_no_tensor_of_the_size() -> None:
    maker = BatchMaker(make_batch=lambda n: {"tokens": torch.zeros(1, 10 * n)})
    assert maker.make(1)["tokens"].shape == (1, 10)
    assert maker.make(5)["tokens"].shape == (1, 50)


def test_make_batch_of_a_list_of_images_is_of_the_size_asked_for() -> None:
    maker = BatchMaker(make_batch=lambda size: [torch.zeros(3, 2, 2) for _ in range(size)])
    assert len(maker.make(20)) == 20


def test_make_batch_of_objects_of_another_kind_passes() -> None:
    assert BatchMaker(make_batch=lambda n: ["graph"] * n).make(2) == ["graph", "graph"]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_make_batch_may_return_sparse_tensors(layout: torch.layout) -> None:
    maker = BatchMaker(make_batch=lambda size: torch.eye(size, 50).to_sparse(layout=layout))
    assert maker.make(8).shape == (8, 50)
    assert maker.made == {8: 8 * (4 + 2 * 8)}


@pytest.mark.parametrize("batch_size", [1, 4])
def test_make_batch_that_ignores_the_size_is_refused(batch_size: int) -> None:
    maker = BatchMaker(make_batch=lambda _: (torch.zeros(32, 3), torch.zeros(32)))
    with pytest.raises(
        SampleError, match=rf"make_batch\({batch_size}\).* the same shapes: sample\[0\] \[32, 3\]"
    ):
        maker.make(batch_size)


def test_make_batch_that_returns_nothing_is_refused() -> None:
    with pytest.raises(SampleError, match=r"make_batch\(4\) returned None"):
        BatchMaker(make_batch=lambda _: None).make(4)


def test_errors_of_make_batch_pass_unchanged() -> None:
    def make_batch(batch_size: int) -> Tensor:
        raise LookupError(f"no data for {batch_size}")

    with pytest.raises(LookupError, match="no data for 4"):
        BatchMaker(make_batch=make_batch).make(4)


def test_move_batch_moves_every_tensor() -> None:
    batch = Example(torch.zeros(2, dtype=torch.int64), torch.ones(2), "a")
    moved = move_batch({"batch": batch, "kind": torch.Tensor}, "meta")
    assert (moved["batch"].tokens.device.type, moved["batch"].mask.device.type) == ("meta", "meta")
    assert moved["batch"].name == "a"
    assert moved["kind"] is torch.Tensor


def test_move_batch_returns_tensors_that_are_there_as_they_are() -> None:
    x = torch.zeros(2)
    assert move_batch((x, {"x": x}), "cpu")[0] is x
    assert move_batch((x, {"x": x}), torch.device("cpu"))[1]["x"] is x


def test_move_batch_moves_other_objects_by_their_own_method() -> None:
    class Graph:
        device = "cpu"

        def to(self, device: str) -> Graph:
            moved = Graph()
            moved.device = device
            return moved

    assert move_batch([Graph()], "meta")[0].device == "meta"


def test_move_batch_keeps_what_moves_itself() -> None:
    class Graph:
        device = "cpu"

        def to(self, device: str) -> None:
            self.device = device

    assert move_batch([Graph()], "meta")[0].device == "meta"


def test_batch_encoding_of_transformers() -> None:
    tokenization = pytest.importorskip("transformers.tokenization_utils_base")
    sample = tokenization.BatchEncoding(
        {"input_ids": counting(2, 5, dtype=torch.int64), "attention_mask": torch.ones(2, 5)},
        n_sequences=1,
    )
    batch = BatchMaker(sample).make(3)
    assert type(batch) is type(sample)
    assert batch.n_sequences == 1
    assert batch.input_ids.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [0, 1, 2, 3, 4]]
    assert sample.input_ids.shape == (2, 5)
    assert move_batch(batch, "meta").input_ids.device.type == "meta"


Maker = Callable[[], Any]


@pytest.mark.parametrize("make_container", [list, tuple, dict])
def test_empty_containers_have_no_tensors(make_container: Maker) -> None:
    with pytest.raises(SampleError, match="holds no tensors"):
        BatchMaker(make_container())


def test_the_attributes_of_a_dict_may_be_its_keys() -> None:
    class Batch(dict[str, Tensor]):
        __getattr__ = dict.__getitem__

    setup = TrainingSetup(nn.Linear(2, 1), Batch(x=torch.ones(2, 2)))
    assert setup.loader is None
    assert BatchMaker.of(setup, 0).make(5)["x"].shape == (5, 2)
