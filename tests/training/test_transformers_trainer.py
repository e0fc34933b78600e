"""Trainers of transformers: what a search and an estimate take from them, and leave alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, IterableDataset

from batchfinder import TrainingSetup, estimate_max_batch, estimate_peak_memory, find_max_batch
from batchfinder.errors import SampleError, StepError
from batchfinder.training.completion import completed
from batchfinder.training.optimizers import make_optimizer
from batchfinder.training.setup import setup_of
from batchfinder.training.step import TrainingStep
from batchfinder.training.transformers_trainer import FIRST_EXAMPLES, MOST_EXAMPLES

CPU = torch.device("cpu")
Example = dict[str, list[int]]


class Output(NamedTuple):
    loss: Tensor
    logits: Tensor
    name: str


class Tagger(nn.Module):
    """The least of a model for texts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.layer = nn.Linear(4, 10)
        self.saves_activations: dict[str, Any] | None = None

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        logits = self.layer(self.embedding(input_ids))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return Output(loss, logits, "tags")

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any) -> None:
        self.saves_activations = gradient_checkpointing_kwargs


class Texts:
    """So many texts, of one token each unless one is the longest; notes which are looked at."""

    def __init__(self, size: int, longest_at: int | None = None) -> None:
        self.size, self.longest_at = size, longest_at
        self.seen: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: int) -> Example:
        self.seen.append(place)
        length = 1 if self.longest_at is None else 7 if place == self.longest_at else 1 + place % 3
        return {"input_ids": [place % 10] * length, "labels": [1] * length}


def collate(examples: list[Example]) -> dict[str, Tensor]:
    def padded(name: str) -> Tensor:
        longest = max(len(example[name]) for example in examples)
        return torch.tensor([row[name] + [0] * (longest - len(row[name])) for row in examples])

    return {name: padded(name) for name in examples[0]}


class Trainer:
    """The least that a Trainer of transformers has."""

    def __init__(self, dataset: Any = None, **args: Any) -> None:
        self.model: Any = Tagger()
        self.args = SimpleNamespace(learning_rate=0.1, **args)
        self.train_dataset: Any = Texts(20) if dataset is None else dataset
        self.eval_dataset = self.train_dataset
        self.optimizer: Any = None
        self.model_wrapped = self.model
        self.batches_seen = 0

    def compute_loss(self, model: Any, inputs: Any) -> Any:
        self.batches_seen += 1
        self.output = model(**inputs)
        return self.output.loss

    def create_optimizer(self) -> Any:
        named = list(self.model.named_parameters())
        groups: list[dict[str, Any]] = [
            {"params": [p for name, p in named if "bias" not in name], "weight_decay": 0.1},
            {"params": [p for name, p in named if "bias" in name]},
        ]
        self.optimizer = SGD(groups, lr=self.args.learning_rate, momentum=0.9)
        return self.optimizer

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=4, collate_fn=collate)


def opened(trainer: Any, *given: Any) -> tuple[TrainingSetup, list[str]]:
    return completed(setup_of(trainer, *given))


def test_a_search_takes_all_from_a_trainer_and_leaves_it_as_it_was() -> None:
    trainer = Trainer(Texts(20, longest_at=3))
    before = dict(vars(trainer))
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    random_state = torch.get_rng_state()

    result = find_max_batch(trainer, device="cpu", max_batch_size=8)

    assert (result.batch_size, result.warnings) == (8, ())
    assert vars(trainer) == before
    assert all(
        torch.equal(weights[key], value) for key, value in trainer.model.state_dict().items()
    )
    assert torch.equal(torch.get_rng_state(), random_state)


def test_an_estimate_counts_what_its_optimizer_keeps() -> None:
    estimate = estimate_max_batch(Trainer(), gpu="t4", max_batch_size=8)
    assert estimate.batch_size == 8
    assert estimate.explanation.terms["optimizer states"] == 3 * 512  # a block for each parameter


def test_the_setup_may_say_otherwise() -> None:
    sample = {"input_ids": torch.zeros(2, 3, dtype=torch.long), "labels": torch.zeros(2, 3).long()}
    trainer = Trainer()
    setup, _ = opened(TrainingSetup(trainer, sample, optimizer="adam"))  # type: ignore[arg-type]
    assert setup.sample is sample
    assert type(make_optimizer(setup.optimizer, setup.model)) is Adam
    assert trainer.train_dataset.seen == []
    setup, _ = opened(trainer, None, lambda output, batch: output.loss)
    assert setup.step is None
    setup, _ = opened(trainer, None, None, None, lambda model, batch: model(**batch).loss)
    assert setup.step is not None
    assert TrainingStep(setup, CPU).micro_batches == 1


def test_an_optimizer_that_the_trainer_was_given_is_used() -> None:
    trainer = Trainer()
    trainer.optimizer = Adam(trainer.model.parameters())
    assert opened(trainer)[0].optimizer is trainer.optimizer


def test_one_that_accelerate_has_wrapped_is_used_without_its_wrapper() -> None:
    class Wrapper(Adam):
        optimizer: Adam

    trainer = Trainer()
    own = Adam(trainer.model.parameters())
    trainer.optimizer = Wrapper(trainer.model.parameters())
    trainer.optimizer.optimizer = own
    assert opened(trainer)[0].optimizer is own


@pytest.mark.parametrize(("steps", "micro_batches"), [(1, 1), (4, 2)])
def test_accumulation(steps: int, micro_batches: int) -> None:
    setup, _ = opened(Trainer(gradient_accumulation_steps=steps))
    assert TrainingStep(setup, CPU).micro_batches == micro_batches


@pytest.mark.parametrize(
    ("args", "dtype"),
    [({}, torch.float32), ({"bf16": True}, torch.bfloat16), ({"fp16": True}, torch.float16)],
)
def test_the_forward_pass_alone_runs_in_lower_precision(
    args: dict[str, Any], dtype: torch.dtype
) -> None:
    trainer = Trainer(**args)
    setup, _ = opened(trainer)
    inside: list[torch.dtype] = []
    trainer.model.layer.register_forward_hook(lambda *call: inside.append(call[-1].dtype))
    outside: list[Output] = []
    trainer.model.register_forward_hook(lambda *call: outside.append(call[-1]))

    TrainingStep(setup, CPU).forward_backward(setup.sample)

    assert inside == [dtype]
    assert outside[0].logits.dtype == torch.float32  # as Accelerate returns it
    assert outside[0].name == "tags"
    assert "forward" not in vars(trainer.model)


def test_activations_are_checkpointed_as_its_arguments_say() -> None:
    options = {"use_reentrant": False}
    trainer = Trainer(gradient_checkpointing=True, gradient_checkpointing_kwargs=options)
    setup, _ = opened(trainer)
    assert trainer.model.saves_activations is None
    TrainingStep(setup, CPU).forward_backward(setup.sample)
    assert trainer.model.saves_activations == options


def test_activations_are_checkpointed_as_newer_ones_ask() -> None:
    class Newer(Tagger):
        def activation_checkpointing_enable(self, **options: Any) -> None:
            self.saves_activations = options

    options = {"use_reentrant": False, "every_n_layers": 2}
    trainer = Trainer(activation_checkpointing=True, activation_checkpointing_kwargs=options)
    trainer.model = Newer()
    setup, _ = opened(trainer)
    TrainingStep(setup, CPU).forward_backward(setup.sample)
    assert trainer.model.saves_activations == {
        "activation_checkpointing_kwargs": {"use_reentrant": False},
        "every_n_layers": 2,
    }


class Uneven(Texts):
    """The longest inputs and the longest labels are not of the same example."""

    def __getitem__(self, place: int) -> Example:
        example = super().__getitem__(place)
        return {**example, "labels": [1] * (9 if place == 5 else 2)}


def test_the_batch_is_as_long_as_any_in_training() -> None:
    setup, warnings = opened(Trainer(Texts(300, longest_at=299)))
    assert setup.sample["input_ids"].shape[1] == 7
    setup, _ = opened(Trainer(Uneven(20, longest_at=3)))
    assert (setup.sample["input_ids"].shape[1], setup.sample["labels"].shape[1]) == (7, 9)
    assert warnings == []


def test_where_all_are_of_one_length_few_are_looked_at() -> None:
    dataset = Texts(10 * MOST_EXAMPLES)
    _, warnings = opened(Trainer(dataset))
    assert len(dataset.seen) <= FIRST_EXAMPLES + 2
    assert warnings == []


def test_of_many_that_differ_some_are_looked_at_and_the_user_is_told() -> None:
    dataset = Texts(2 * MOST_EXAMPLES, longest_at=0)
    setup, (warning,) = opened(Trainer(dataset))
    assert setup.sample["input_ids"].shape[1] == 7
    assert max(dataset.seen) > 1.9 * MOST_EXAMPLES
    assert "the longest of 4096 examples of the Trainer's 8192" in warning


class Stream(IterableDataset[Example]):
    def __iter__(self) -> Iterator[Example]:
        yield from Texts(8, longest_at=2)  # type: ignore[misc]


def test_of_a_stream_the_first_batch_is_taken_and_the_user_is_told() -> None:
    setup, (warning,) = opened(Trainer(Stream()))
    assert setup.sample["input_ids"].shape == (4, 7)
    assert "give a sample as long as any in training" in warning


def test_a_trainer_without_examples_is_refused() -> None:
    with pytest.raises(SampleError, match="train_dataset has no examples"):
        opened(Trainer(Texts(0)))


def test_without_data_the_model_itself_may_have_an_example() -> None:
    trainer = Trainer()
    trainer.train_dataset = None
    with pytest.raises(SampleError, match="there is no example batch"):
        opened(trainer)
    trainer.model.dummy_inputs = {"input_ids": torch.zeros(2, 3, dtype=torch.long)}
    assert "no sample was given" in opened(trainer)[1][0]


@pytest.mark.parametrize("option", ["deepspeed", "fsdp"])
def test_one_that_shards_its_model_is_refused(option: str) -> None:
    with pytest.raises(StepError, match=f"shards its model \\({option} is set\\)"):
        opened(Trainer(**{option: "yes"}))


def test_the_user_is_told_what_the_step_does_not_show() -> None:
    _, warnings = opened(Trainer(n_gpu=2, torch_compile=True))
    assert "DataParallel" in warnings[0]
    assert "search with --compile" in warnings[1]
    peak = estimate_peak_memory(Trainer(n_gpu=2), batch_size=2, gpu="t4")
    assert peak.warnings == tuple(warnings[:1])


def test_its_loss_is_named_where_it_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()
    monkeypatch.setattr(trainer, "compute_loss", lambda model, inputs: "low")
    setup, _ = opened(trainer)
    with pytest.raises(StepError, match="compute_loss of the Trainer gave str as the loss"):
        TrainingStep(setup, CPU).forward_backward(setup.sample)
