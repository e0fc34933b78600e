"""Trainers of transformers: what a search and an estimate take from them, and leave alone."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Adam
from torch.utils.data import DataLoader
from training.frameworks.trainers import Output, Tagger, Texts, Trainer, collate, opened

from batchfinder import TrainingSetup, estimate_max_batch, estimate_peak_memory, find_max_batch
from batchfinder.errors import SampleError, StepError
from batchfinder.training.frameworks.trainer_evaluation import GatheredEvaluation
from batchfinder.training.optimizer import make_optimizer
from batchfinder.training.step import TrainingStep

CPU = torch.device("cpu")


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


def test_without_data_the_model_itself_may_have_an_example() -> None:
    trainer = Trainer()
    trainer.train_dataset = None
    with pytest.raises(SampleError, match="there is no example batch"):
        opened(trainer)
    trainer.model.dummy_inputs = {"input_ids": torch.zeros(2, 3, dtype=torch.long)}
    assert "no sample was given" in opened(trainer)[1][0]


class Newer(Trainer):
    """As a Trainer since transformers 4.46 trains: by its batches and what it counts in them."""

    current_gradient_accumulation_steps: int

    def __init__(self, *given: Any, **args: Any) -> None:
        super().__init__(*given, **args)
        self.metrics: dict[str, list[Any]] = {"loss": []}

    def get_batch_samples(self, batches: Any, count: int, device: Any) -> tuple[list[Any], Any]:
        taken = [next(batches) for _ in range(count)]
        assert device.type == "cpu"
        return taken, sum(batch["labels"].ne(-100).sum() for batch in taken)

    def _prepare_inputs(self, inputs: Any) -> Any:
        return {**self._prepare_input(inputs), "is_prepared": True}

    def _prepare_input(self, data: Any) -> Any:
        raise AssertionError("moves it to the device of the arguments")

    def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        assert inputs.pop("is_prepared")
        assert model is self.model is self.model_wrapped
        loss = super().compute_loss(model, inputs) / num_items_in_batch
        self.metrics["loss"].append(loss / self.current_gradient_accumulation_steps)
        return loss


class WithoutDevice(Newer):
    def get_batch_samples(self, batches: Any, count: int) -> tuple[list[Any], Any]:  # type: ignore[override]
        return super().get_batch_samples(batches, count, CPU)


class OnTwoDevices(Newer):
    """Where two GPUs are visible each replica of DataParallel gets the number, in its own row."""

    def get_batch_samples(self, batches: Any, count: int, device: Any) -> tuple[list[Any], Any]:
        taken, items = super().get_batch_samples(batches, count, device)
        return taken, items.unsqueeze(0).expand(2, -1)

    def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        assert num_items_in_batch.shape == ()
        return super().compute_loss(model, inputs, num_items_in_batch)


@pytest.mark.parametrize("kind", [Newer, WithoutDevice, OnTwoDevices])
def test_its_loss_gets_what_it_gets_in_training(kind: type[Newer]) -> None:
    trainer = kind(Texts(20, longest_at=3))
    setup, _ = opened(trainer)
    TrainingStep(setup, CPU).forward_backward(setup.sample)
    assert estimate_max_batch(trainer, gpu="t4", max_batch_size=2).batch_size == 2
    assert trainer.metrics == {"loss": []}


def test_a_method_of_the_same_name_may_generate() -> None:
    class OfOldTRL(Trainer):
        """As DPOTrainer, KTOTrainer and ORPOTrainer of TRL before 0.12."""

        def get_batch_samples(self, model: Any, batch: Any) -> Any:
            raise AssertionError("it generates texts")

    setup, _ = opened(OfOldTRL(Texts(20, longest_at=3)))
    step = TrainingStep(setup, CPU)
    step.forward_backward(setup.sample)
    loss = step.forward(setup.sample)
    assert loss is not None
    assert loss.requires_grad


def test_an_estimate_counts_what_it_holds_beside_its_model() -> None:
    class Teacher(Trainer):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = torch.nn.Linear(10, 1000, bias=False)
            self.weights = torch.ones(10)

        def compute_loss(self, model: Any, inputs: Any) -> Any:
            out = model(**inputs)
            return out.loss + (self.teacher(out.logits * self.weights) ** 2).mean()

    trainer = Teacher()
    terms = estimate_max_batch(trainer, gpu="t4", max_batch_size=8).explanation.terms
    alone = estimate_max_batch(Trainer(), gpu="t4", max_batch_size=8).explanation.terms
    assert terms["parameters"] - alone["parameters"] == 40_448 + 512  # in whole blocks
    assert type(trainer.teacher.weight.data) is torch.Tensor


def test_one_that_trains_on_what_it_generates_is_refused() -> None:
    with pytest.raises(StepError, match="a Trainer trains on what its model generates"):
        opened(Trainer(steps_per_generation=2))


def test_an_optimizer_without_a_schedule_is_told_that_it_trains() -> None:
    class ScheduleFree(Adam):
        is_told = False

        def train(self) -> None:
            self.is_told = True

    def create(acting: Any) -> None:
        acting.optimizer = ScheduleFree(acting.model.parameters())

    setup, _ = opened(type("Own", (Trainer,), {"create_optimizer": create})())
    assert make_optimizer(setup.optimizer, setup.model).is_told  # type: ignore[attr-defined]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_its_own_training_step_runs_with_its_backward_pass(micro_batches: int) -> None:
    class Doubled(Trainer):
        """Trains on each batch twice over, and asks its optimizer."""

        def training_step(self, model: Any, inputs: Any) -> Any:
            self.optimizer.zero_grad()
            inputs = {name: torch.cat([part, part]) for name, part in inputs.items()}
            loss = self.compute_loss(model, inputs)
            loss.backward()
            rows.append(len(self.output.logits))
            return loss.detach()

    rows: list[int] = []
    trainer = Doubled(gradient_accumulation_steps=micro_batches)
    before = {name: part.clone() for name, part in trainer.model.state_dict().items()}
    setup, warnings = opened(trainer)
    assert not warnings
    step = TrainingStep(setup, CPU)
    for batch in step.fetch(lambda: setup.sample):
        step.forward_backward(batch)
    step.check_loss()
    step.optimizer_step()
    assert rows == micro_batches * [2 * len(setup.sample["labels"])]
    assert not torch.equal(trainer.model.layer.weight, before["layer.weight"])
    assert trainer.optimizer is None


@pytest.mark.parametrize("option", ["deepspeed", "fsdp"])
def test_one_that_was_launched_to_shard_is_refused(option: str) -> None:
    trainer = Trainer()
    setattr(trainer, f"is_{option}_enabled", True)
    with pytest.raises(StepError, match="shards its model"):
        opened(trainer)


def test_the_precision_may_come_from_accelerate() -> None:
    trainer: Any = Trainer()
    trainer.accelerator = SimpleNamespace(native_amp=True, mixed_precision="bf16")
    setup, _ = opened(trainer)
    inside: list[torch.dtype] = []
    trainer.model.layer.register_forward_hook(lambda *call: inside.append(call[-1].dtype))
    TrainingStep(setup, CPU).forward_backward(setup.sample)
    assert inside == [torch.bfloat16]


@pytest.mark.parametrize("option", ["deepspeed", "fsdp"])
def test_one_that_shards_its_model_is_refused(option: str) -> None:
    with pytest.raises(StepError, match=f"shards its model \\({option} is set\\)"):
        opened(Trainer(**{option: "yes"}))


def test_the_user_is_told_what_the_step_does_not_show() -> None:
    _, warnings = opened(Trainer(n_gpu=2))
    assert "DataParallel" in warnings[0]
    peak = estimate_peak_memory(Trainer(n_gpu=2), batch_size=2, gpu="t4")
    assert peak.warnings == tuple(warnings)
    _, warnings = opened(Trainer(torch_empty_cache_steps=4))
    assert "training may run out of it at the answer. Try without" in warnings[0]
    assert opened(Trainer(torch_empty_cache_steps=None))[1] == []


def test_kernels_that_only_the_training_gives_to_the_model_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "transformers.integrations.liger", raising=False)
    assert opened(Trainer(use_liger_kernel=True))[1] == []  # the constructor gave them
    monkeypatch.setitem(sys.modules, "transformers.integrations.liger", ModuleType("liger"))
    assert "more may fit. Try batchfinder run" in opened(Trainer(use_liger_kernel=True))[1][0]


def test_compiling_is_missed_only_where_the_steps_do_not_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peak = estimate_peak_memory(Trainer(torch_compile=True), batch_size=2, gpu="t4")
    assert "batchfinder find --compile" in peak.warnings[0]
    monkeypatch.setattr(torch, "compile", lambda model: model)
    setup, warnings = opened(Trainer(torch_compile=True))
    assert [*warnings, *TrainingStep(setup, CPU, compiled=True).warnings] == []


def test_its_loss_is_named_where_it_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()
    monkeypatch.setattr(trainer, "compute_loss", lambda model, inputs: "low")
    setup, _ = opened(trainer)
    said = "compute_loss of the Trainer gave an object of type str as the loss"
    with pytest.raises(StepError, match=said):
        TrainingStep(setup, CPU).forward_backward(setup.sample)


class Evaluated(Trainer):
    """One that evaluates, with metrics of its logits."""

    def __init__(self, **args: Any) -> None:
        args = {"per_device_eval_batch_size": 5, "prediction_loss_only": None, **args}
        super().__init__(Texts(20), **args)
        self.compute_metrics: Any = lambda results: {}
        self.preprocess_logits_for_metrics: Any = None
        self.kept_bytes: list[int] = []

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool) -> Any:
        assert not self.model.training
        self.kept_bytes.append(sum(block.numel() for block in vars(self)["gathered"]._old))
        output = model(**inputs)
        if prediction_loss_only:
            return output.loss, None, None
        return output.loss, output.logits, inputs["labels"]


def validated(trainer: Any) -> tuple[int | None, list[int]]:
    """What a validation's batch size is, and what is kept beside each of its batches."""
    step = TrainingStep(opened(trainer)[0], CPU)
    own: Any = step.setup.step
    vars(own._trainer)["gathered"] = own._evaluation
    batch = collate([Texts(20)[place] for place in range(step.eval_batch_size or 1)])
    step.validate(lambda: batch)
    return step.eval_batch_size, own._trainer.kept_bytes


def test_a_validation_has_beside_it_what_the_evaluation_gathered() -> None:
    # Of the 15 examples before the last 5: the logits, 10 floats each, and the labels.
    assert validated(Evaluated()) == (5, [0, 15 * (10 * 4 + 8)])


def test_logits_that_go_to_the_host_are_not_gathered() -> None:
    assert validated(Evaluated(eval_accumulation_steps=2)) == (5, [0, 5 * (10 * 4 + 8)])
    trainer = Evaluated()
    trainer.compute_metrics = None
    assert validated(trainer) == (5, [0, 0])


def test_inputs_that_the_metrics_get_are_gathered_and_numbers_may_be() -> None:
    class Counting(Evaluated):
        """With a number beside its logits, as the auxiliary loss of a mixture of experts."""

        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool) -> Any:
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only)
            return loss, (logits, loss), labels

    rows = 15 * (10 * 4 + 8)
    assert validated(Counting()) == (5, [0, rows + 15 * 4 // 5])
    assert validated(Evaluated(include_for_metrics=["inputs"])) == (5, [0, rows + 15 * 8])


class Loading(Evaluated):
    """One that says how it loads the data that it evaluates on."""

    def get_eval_dataloader(self, dataset: Any) -> Any:
        return DataLoader(dataset, batch_size=2, collate_fn=self.data_collator)


def test_what_is_gathered_is_that_of_one_of_several_data_sets() -> None:
    trainer = Loading()
    trainer.eval_dataset = {"few, long": Texts(6, longest_at=1), "short": Texts(49)}
    evaluation = GatheredEvaluation.of(trainer)
    assert evaluation is not None
    assert evaluation.examples == 7  # of 7 tokens each, as 49 of one token


def test_a_validation_runs_on_the_longest_examples_of_its_own_data() -> None:
    trainer = Loading(per_device_eval_batch_size=50)  # trains on texts of one token
    trainer.eval_dataset = {"few, long": Texts(3, longest_at=1), "short": Texts(20)}
    step = TrainingStep(opened(trainer)[0], CPU)
    assert step.eval_batch_size == 20  # as many as the larger data set has
    assert step.eval_batches is not None
    assert step.eval_batches.make(20)["input_ids"].shape == (20, 7)


def test_a_validation_generates_as_much_as_the_arguments_say() -> None:
    seen = []

    class Generating(Evaluated):
        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool) -> Any:
            seen.append(vars(self)["_gen_kwargs"])
            return super().prediction_step(model, inputs, prediction_loss_only)

    trainer = Generating(generation_max_length=200, generation_num_beams=None)
    validated(trainer)
    assert seen == 2 * [{"max_length": 200, "num_beams": None}]
    assert not hasattr(trainer, "_gen_kwargs")


def test_a_validation_in_lower_precision_still_sees_what_the_model_takes() -> None:
    """``generate`` refuses arguments that are not in the signature of ``forward``."""
    seen = []

    class Generating(Evaluated):
        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool) -> Any:
            seen.append([*inspect.signature(self.model.forward).parameters])
            return super().prediction_step(model, inputs, prediction_loss_only)

    validated(Generating(bf16=True))
    assert seen == 2 * [["input_ids", "labels"]]


def test_results_grow_on_a_device_as_they_are_concatenated() -> None:
    grown: list[int] = []

    class Noted(GatheredEvaluation):
        def _blocks(self, examples: int) -> list[Tensor]:
            grown.append(examples)
            return super()._blocks(examples)

    evaluation = Noted(batch_size=4, examples=68)
    batch = torch.zeros(4, 3, device="meta")
    acting = SimpleNamespace(preprocess_logits_for_metrics=None, model=None)
    evaluation.with_last_batch(acting, batch, 0, batch, batch)
    grown.clear()
    with evaluation.before_last_batch():
        assert grown == [*range(4, 65, 4)]  # as the batches, if they are few
    evaluation.examples = 4 + 64 * 40
    grown.clear()
    with evaluation.before_last_batch():
        assert grown == [*range(40, 64 * 40 + 1, 40)]


def test_a_trainer_without_data_to_evaluate_on_does_not_validate() -> None:
    trainer = Evaluated()
    trainer.eval_dataset = None
    assert TrainingStep(opened(trainer)[0], CPU).eval_batch_size is None


def test_a_trainer_predicts_without_labels() -> None:
    class Unlabelled(Tagger):
        def forward(self, input_ids: Any, labels: Any = None) -> Any:
            assert labels is None
            return self.layer(self.embedding(input_ids))

    trainer = Evaluated()
    trainer.model = Unlabelled()
    assert find_max_batch(trainer, device="cpu", mode="inference", max_batch_size=2).mode
