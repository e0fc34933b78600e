"""Batches of any size, drawn from a user's loader that stays as it is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    random_split,
)

from batchfinder import TrainingSetup, estimate_max_batch, find_max_batch
from batchfinder.errors import BatchFinderWarning, SampleError, UsageError
from batchfinder.training.complete_setup import completed
from batchfinder.training.data.drawn import DRAWN_BATCHES
from batchfinder.training.data.rate import samples_per_second
from batchfinder.training.loading import load_setup
from batchfinder.training.user_traceback import error_line

LENGTHS = [1 + place % 5 for place in range(40)]
LENGTHS[17] = 9


class Words(nn.Module):
    """A model of token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.layer = nn.Linear(4, 10)

    def forward(self, batch: Tensor) -> Tensor:
        return self.layer(self.embedding(batch)).square().mean()  # type: ignore[no-any-return]


def padded(texts: list[list[int]]) -> Tensor:
    longest = max(map(len, texts))
    return torch.tensor([text + [0] * (longest - len(text)) for text in texts])


def texts() -> Any:
    return [[place % 10] * length for place, length in enumerate(LENGTHS)]


def shapes(setup: TrainingSetup, batch_size: int) -> list[tuple[int, ...]]:
    assert setup.make_batch is not None
    return [tuple(setup.make_batch(batch_size, step).shape) for step in range(DRAWN_BATCHES)]


def drawn(loader: Any) -> tuple[TrainingSetup, list[str]]:
    return completed(TrainingSetup(nn.Identity(), loader=loader))


def test_the_longest_comes_first_and_others_as_the_sampler_draws_them() -> None:
    setup, warnings = drawn(DataLoader(texts(), batch_size=4, collate_fn=padded))
    assert warnings == []
    assert setup.sample.shape == (1, 9)  # repeated to any size
    # Places 0 to 2, 3 to 5 and so on; the longest of all is at 17.
    expected = [9, *(max(LENGTHS[first : first + 3]) for first in range(0, 18, 3))]
    assert shapes(setup, 3) == [(3, length) for length in expected]
    for size in (1, 100):  # more than there are: they come again
        assert [shape[0] for shape in shapes(setup, size)] == [size] * DRAWN_BATCHES


def test_the_draw_is_the_same_each_time_and_changes_nothing_of_the_users() -> None:
    class Shuffled(SequentialSampler):
        def __init__(self, source: Any) -> None:
            super().__init__(source)
            self.random = random.Random(3)

        def __iter__(self) -> Iterator[int]:
            yield from self.random.sample(range(40), 40)

    generator = torch.Generator().manual_seed(7)
    of_torch = DataLoader(texts(), 4, shuffle=True, generator=generator, collate_fn=padded)
    own: Any = DataLoader(texts(), 4, sampler=Shuffled(texts()), collate_fn=padded, num_workers=2)
    states = [torch.get_rng_state(), generator.get_state(), own.sampler.random.getstate()]
    for loader in (of_torch, own, (texts(), padded)):
        first, again = (shapes(drawn(loader)[0], 4) for _ in range(2))
        assert first == again
        assert len(set(first)) > 1
    assert torch.equal(states[0], torch.get_rng_state())
    assert torch.equal(states[1], generator.get_state())
    assert states[2] == own.sampler.random.getstate()


@pytest.mark.parametrize("kinds", [2, 3, 4, 7, 16])
def test_the_longest_is_found_where_kinds_of_examples_alternate(kinds: int) -> None:
    # So many that every second, third, ... example would be read, all of one kind.
    texts = [[0] * (1 + place % kinds) for place in range(64 * kinds)]
    setup, _ = drawn((texts, padded))
    assert setup.sample.shape == (1, kinds)
    assert len(set(shapes(setup, 2))) > 1


@pytest.mark.parametrize("as_list", [False, True])
def test_shapes_that_a_collator_draws_begin_with_the_largest(as_list: bool) -> None:
    """As in training at many scales, where each batch of images gets another size."""

    def at_a_scale(images: list[Tensor]) -> Any:
        scale = random.choice(range(4, 12))
        resized = nn.functional.interpolate(torch.stack(images), size=(scale, scale))
        return (resized, [{"boxes": torch.zeros(1, 4)}] * len(images)) if as_list else resized

    def shape(setup: TrainingSetup, step: int) -> tuple[int, ...]:
        assert setup.make_batch is not None
        batch = setup.make_batch(5, step)
        return tuple(batch[0].shape if as_list else batch.shape)

    state = random.getstate()
    images = [torch.zeros(3, 8, 8)] * 6
    setup, warnings = drawn(DataLoader(images, 2, collate_fn=at_a_scale))  # type: ignore[arg-type]
    assert random.getstate() == state
    assert warnings == []
    assert (setup.sample is None) is as_list
    found = [shape(setup, step) for step in range(DRAWN_BATCHES)]
    assert found[0] == (5, 3, 11, 11) == max(found)
    assert len(set(found)) > 2
    assert found == [shape(setup, step) for step in range(DRAWN_BATCHES)]


def test_examples_of_one_shape_are_a_sample_that_repeats() -> None:
    setup, warnings = drawn([(torch.zeros(3), 1), (torch.ones(3), 0)])
    assert (setup.make_batch, warnings) == (None, [])
    assert [part.shape for part in setup.sample] == [(1, 3), (1,)]
    # Texts of different lengths that are always padded to one.
    setup, _ = drawn((texts(), lambda some: torch.zeros(len(some), 12)))
    assert setup.make_batch is None


def test_a_list_with_an_entry_for_each_example_grows_with_the_batch() -> None:
    """As lengths for pack_padded_sequence, which a sample would keep as they are."""
    setup, warnings = drawn((texts(), lambda some: (padded(some), [len(text) for text in some])))
    assert (setup.sample, warnings) == (None, [])
    assert setup.make_batch is not None
    for step in (0, 1):
        batch, lengths = setup.make_batch(5, step)
        assert len(batch) == len(lengths) == 5


class Stream(IterableDataset[list[int]]):
    """It would be used up."""

    left: Iterator[list[int]] = iter(texts())

    def __iter__(self) -> Iterator[list[int]]:
        return self.left


class Buckets(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("loader", "advice"),
    [
        (DataLoader(Stream(), batch_size=2), "Try make_batch=make_batch.batch_size, step. in"),
        (DataLoader(texts(), batch_size=None), "Try make_batch=make_batch.batch_size, step. in"),
        (
            DataLoader(texts(), batch_sampler=Buckets(SequentialSampler(texts()), 2, False)),
            r"made by Buckets.*\. Try \(loader.dataset, loader.collate_fn\)",
        ),
        ([], "data set of the loader has no examples"),
        ({"train": texts(), "test": texts()}, r"a dict and no .* try one of them: \['train'\]\."),
    ],
    ids=["stream", "without batches", "own batches", "empty", "splits"],
)
def test_a_loader_that_cannot_be_resized_is_refused(loader: Any, advice: str) -> None:
    with pytest.raises(SampleError, match=advice):
        drawn(loader)


def test_texts_that_nothing_pads_are_explained() -> None:
    setup, _ = drawn([torch.zeros(length) for length in LENGTHS])
    assert setup.make_batch is not None
    with pytest.raises(RuntimeError) as raised:
        setup.make_batch(4, 1)
    explained = "(raised while the loader made a batch). Try your DataLoader, whose collate_fn pads"
    assert explained in error_line(raised.value)


def test_a_loader_beside_a_sample_is_refused() -> None:
    with pytest.raises(UsageError, match="both a loader and a sample"):
        completed(TrainingSetup(Words(), torch.zeros(2, 3).long(), loader=texts()))


def test_a_loader_in_the_place_of_the_sample_is_the_loader() -> None:
    loader: Any = DataLoader(texts(), batch_size=4, collate_fn=padded)
    setup = TrainingSetup(Words(), loader)
    assert (setup.sample, setup.loader) == (None, loader)


def test_an_answer_above_the_number_of_examples_is_warned_of() -> None:
    loader = DataLoader(texts(), batch_size=4, collate_fn=padded)
    few = DataLoader(texts(), batch_size=4, collate_fn=padded, sampler=range(5))
    model = Words()
    message = "an epoch has only 40 examples, and no batch of your data has more"
    with pytest.warns(BatchFinderWarning, match=message):
        assert find_max_batch(model, loader, device="cpu", max_batch_size=41).batch_size == 41
    with pytest.warns(BatchFinderWarning, match="an epoch has only 5 examples, .* Give 5 as"):
        assert estimate_max_batch(model, few, gpu="t4", max_batch_size=6).batch_size == 6
    # The tests turn warnings into errors.
    assert find_max_batch(model, loader, device="cpu", max_batch_size=40).batch_size == 40
    assert estimate_max_batch(model, few, gpu="t4", max_batch_size=5).batch_size == 5


def test_searches_and_estimates_train_on_it() -> None:
    loader: Any = DataLoader(texts(), batch_size=4, collate_fn=padded)
    result = find_max_batch(Words(), loader=loader, device="cpu", max_batch_size=4)
    assert (result.batch_size, result.warnings) == (4, ())
    assert result.probes[-1].steps >= 8
    assert estimate_max_batch(Words(), loader=loader, gpu="t4", max_batch_size=4).batch_size == 4


class DataModule:
    """As Lightning's: it has its data once it is set up."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def prepare_data(self) -> None:
        self.done.append("prepared")

    def setup(self, stage: str) -> None:
        self.done.append(stage)
        self.data, _ = random_split(texts(), [0.5, 0.5])

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=4, collate_fn=padded)


def test_a_data_module_is_set_up_for_its_loader() -> None:
    module, model = DataModule(), Words()
    state = torch.get_rng_state()
    setup = completed(TrainingSetup(model, loader=module))[0]
    assert module.done == ["prepared", "fit"]
    assert [shape[0] for shape in shapes(setup, 3)] == [3] * DRAWN_BATCHES
    assert torch.equal(torch.get_rng_state(), state)
    assert samples_per_second(module, seconds=0.01) > 0


def test_a_data_module_is_set_up_once_also_if_its_speed_is_measured() -> None:
    module = DataModule()
    options = {"device": "cpu", "max_batch_size": 4, "throughput": True}
    find_max_batch(Words(), module, **options)  # type: ignore[arg-type]
    assert module.done == ["prepared", "fit"]


MODULE = """
import torch
from torch import nn

class Module(nn.Module):
    example_input_array = torch.zeros(1, 3)

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, index):
        return self(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.data, batch_size=2)

def module(ready=True):
    module = Module()
    if ready:
        module.data = torch.ones(5, 3)
    return module

def with_sample():
    return Module(), torch.zeros(2, 3)

def build_loader(width=3):
    return torch.utils.data.DataLoader(torch.full((4, width), 2.0), batch_size=2)

def nothing():
    pass
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(MODULE)
    return f"{tmp_path / 'train.py'}"


def test_a_lightning_module_brings_its_own_loader(target: str) -> None:
    setup, warnings = load_setup(f"{target}:module", {})
    assert (setup.sample.tolist(), warnings) == ([[1.0] * 3], [])
    assert setup.step is not None
    setup, (failed, hint) = load_setup(f"{target}:module", {"ready": False})
    assert "has no attribute 'data'), so its data is not used; give --loader" in failed
    assert "the example input that the model carries" in hint


def test_a_loader_on_the_command_line_comes_before_every_sample(target: str) -> None:
    setup, warnings = load_setup(f"{target}:with_sample", {}, loader=f"{target}:build_loader")
    assert (setup.sample.tolist(), warnings) == ([[2.0] * 3], [])
    _, (ignored,) = load_setup(
        f"{target}:with_sample", {}, loader=f"{target}:build_loader", input_spec="float32[3]"
    )
    assert ignored == "--input is ignored, as the loader brings the batches; leave one of them out"
    with pytest.raises(SampleError, match="nothing returned None"):
        load_setup(f"{target}:with_sample", {}, loader=f"{target}:nothing")


def test_a_sample_of_padded_texts_is_said_to_have_constant_lengths() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    sample = {"input_ids": torch.zeros(2, 3), "attention_mask": mask}
    (remark,) = completed(TrainingSetup(Words(), sample))[1]
    assert remark.startswith("the sample pads its sequences to 3: the answer holds where every")
    sample["attention_mask"] = torch.ones_like(mask)
    assert completed(TrainingSetup(Words(), sample))[1] == []
