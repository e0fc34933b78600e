from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from training.frameworks.trainers import Texts, Trainer

from batchfinder import Status, set_max_batch
from batchfinder.errors import BatchFinderWarning, StepError, UsageError


class Trained(Trainer):
    """A Trainer with a training loop, as much of one as reads the numbers that are set."""

    def __init__(self, batch_size: int = 2, steps: int = 1, **args: Any) -> None:
        torch.manual_seed(0)
        super().__init__(
            Texts(600),
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=steps,
            **args,
        )
        self._train_batch_size = batch_size

    def get_train_dataloader(self) -> Any:
        collate = self.data_collator
        return DataLoader(self.train_dataset, self._train_batch_size, True, collate_fn=collate)

    def train(self) -> list[float]:
        optimizer = self.create_optimizer()
        losses = []
        for step, batch in zip(range(6), self.get_train_dataloader(), strict=False):
            loss = self.compute_loss(self.model, batch)
            loss.backward()
            losses.append(loss.item())
            if (step + 1) % self.args.gradient_accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
        return losses


def found(trainer: Trainer, global_batch_size: int | None = None, **options: Any) -> Any:
    return set_max_batch(trainer, global_batch_size, device="cpu", **options)


def numbers_of(trainer: Trained) -> tuple[int, int, int]:
    args = trainer.args
    return (
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        trainer._train_batch_size,
    )


def test_the_answer_is_set_and_trains_as_if_written_by_hand() -> None:
    trainer = Trained()
    result = found(trainer, max_batch_size=24)
    assert result.batch_size == 24
    assert numbers_of(trainer) == (24, 1, 24)
    assert result.notes[-1].startswith("set per_device_train_batch_size=24")
    assert trainer.train() == Trained(24).train()


def test_no_size_is_above_the_examples_of_a_rank() -> None:
    trainer = Trained(world_size=2)
    trainer.train_dataset = Texts(41)
    result = found(trainer, max_batch_size=50)
    assert result.status is Status.CAPPED
    assert numbers_of(trainer) == (20, 1, 20)
    assert result.notes[-1].endswith("as many as the data set has for a rank")


def test_a_global_batch_size_is_kept_exactly() -> None:
    trainer = Trained()
    result = found(trainer, 96, max_batch_size=40)
    # 32 x 3: found again with three accumulation steps, as they need more memory than one.
    assert numbers_of(trainer) == (32, 3, 32)
    assert result.batch_size == 32
    assert "A batch of 40 fits too" in result.notes[-1]
    assert trainer.train() == Trained(32, 3).train()


def test_a_batch_as_large_as_the_global_one_needs_no_accumulation() -> None:
    trainer = Trained(steps=4)
    found(trainer, 16)
    assert numbers_of(trainer) == (16, 1, 16)


def test_the_nearest_global_batch_size_is_named() -> None:
    trainer = Trained(world_size=2)
    with pytest.warns(BatchFinderWarning, match="global batch size of 15 cannot be reached"):
        result = found(trainer, 15, max_batch_size=8)
    size, steps, _ = numbers_of(trainer)
    assert size * steps * 2 in (14, 16)
    assert "cannot be reached" in result.warnings[-1]


def test_a_loader_that_ignores_the_number_is_named() -> None:
    class Fixed(Trained):
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, 4, collate_fn=self.data_collator)

    with pytest.warns(BatchFinderWarning, match="of Fixed makes batches of 4, not of 8. Try "):
        found(Fixed(), max_batch_size=8)


@pytest.mark.parametrize(("most", "answer"), [(5, 5), (0, 0)])
def test_an_evaluation_that_limits_the_size_is_named(most: int, answer: int) -> None:
    class Evaluated(Trained):
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            trained[0] = len(inputs["labels"])
            return super().compute_loss(model, inputs)

        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool) -> Any:
            if trained[0] > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return None, None, None

    trained = [0]
    trainer = Evaluated(per_device_eval_batch_size=2)
    vars(trainer)["compute_metrics"] = None
    with pytest.warns(BatchFinderWarning, match="trains, but the evaluation runs out of memory"):
        result = found(trainer)
    assert result.batch_size == answer
    assert "eval_accumulation_steps=1" in result.warnings[-1]
    assert ("batch size 1 with its validation needs more" in str(result)) == (not answer)


def test_where_nothing_fits_the_numbers_stay() -> None:
    trainer = Trained(steps=3)

    def compute_loss(model: Any, inputs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    trainer.compute_loss = compute_loss  # type: ignore[method-assign]
    result = found(trainer)
    assert result.status is Status.NOTHING_FITS
    assert numbers_of(trainer) == (2, 3, 2)


@pytest.mark.parametrize(
    ("args", "error", "says"),
    [
        ({"n_gpu": 2}, UsageError, "one process per GPU"),
        ({"deepspeed": "zero3.json"}, StepError, "deepspeed is set.*Try batchfinder run on the"),
        ({"fsdp": True}, StepError, "fsdp is set.*Try batchfinder run on the script"),
        ({"steps_per_generation": 4}, StepError, "generates.*Try batchfinder run on the script"),
    ],
)
def test_what_cannot_be_searched_is_refused_and_nothing_is_set(
    args: dict[str, Any], error: type[Exception], says: str
) -> None:
    trainer = Trained(steps=3, **args)
    with pytest.raises(error, match=says):
        found(trainer)
    assert numbers_of(trainer) == (2, 3, 2)


def test_a_global_batch_size_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 1, not 0"):
        found(Trained(), 0)


def test_a_model_is_no_trainer() -> None:
    with pytest.raises(UsageError, match=r"not an object of type Linear. Try find_max_batch\("):
        set_max_batch(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
