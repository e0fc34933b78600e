"""Simulate the results that the evaluation of a ``Trainer`` gathers on the device.

Source: ``Trainer.evaluation_loop`` and ``EvalLoopContainer`` of Transformers
(https://github.com/huggingface/transformers/blob/main/src/transformers/trainer.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from batchfinder.training.frameworks.trainer_batch import longest_to_evaluate
from batchfinder.training.sample import BatchMaker
from batchfinder.training.setup import Trainer
from batchfinder.training.step_source import filled_block
from batchfinder.training.tree import bytes_in, named_tensors

# The most concatenations that stand for those of all batches. Fewer are as they are: which free
# blocks they leave decides if the next step fits (of a GPT-2, 284 died and 281 trains).
MOST_GROWTHS = 64


@dataclass
class GatheredEvaluation:
    """The logits, labels and inputs that an evaluation keeps on the device for ``compute_metrics``.

    Each batch is concatenated to the batches before it, so old and new tensors exist together. Only
    a few batches run here. Blocks of the same size replace the results of all others.

    Attributes:
        batch_size: the number of examples in each batch.
        batches: makes batches of the longest examples that are evaluated; None: as in training.
        examples: the number of examples that are gathered before they move to the host.
        is_concatenated: True if the batches are concatenated, False if they are kept in a list.
        has_inputs: True if ``compute_metrics`` also gets the model's main input.
    """

    batch_size: int = 0
    batches: BatchMaker | None = None
    examples: int = 0
    is_concatenated: bool = True
    has_inputs: bool = False
    _bytes_per_example: list[float] = field(default_factory=list, init=False)
    _device: torch.device | None = field(default=None, init=False)
    _old: list[Tensor] = field(default_factory=list, init=False)

    @classmethod
    def of(cls, trainer: Trainer) -> GatheredEvaluation | None:
        """Return the evaluation of a Trainer; None if it has no data to evaluate on."""
        dataset = getattr(trainer, "eval_dataset", None)
        batch_size = getattr(trainer.args, "per_device_eval_batch_size", None)
        if not dataset or not batch_size:
            return None
        # There is one evaluation per data set.
        datasets = [*dataset.values()] if isinstance(dataset, dict) else [dataset]
        lengths = [len(data) if hasattr(data, "__len__") else 0 for data in datasets]
        batch_size = min(batch_size, max(lengths) or batch_size)
        makers = longest_to_evaluate(trainer, datasets)
        # Only the largest examples of all sets run here, and stand for those of each set.
        sizes = [bytes_in(make(1)) for make in makers] or [1] * len(datasets)
        largest = max(sizes)
        examples = max(n * size // largest for n, size in zip(lengths, sizes, strict=True))
        steps = getattr(trainer.args, "eval_accumulation_steps", None)
        if steps:
            examples = min(examples, steps * batch_size)
        if getattr(trainer.args, "batch_eval_metrics", False):
            examples = 0
        concatenates = getattr(trainer.args, "eval_do_concat_batches", True)
        # Transformers before 4.46 has only the second argument.
        has_inputs = "inputs" in (getattr(trainer.args, "include_for_metrics", None) or ())
        has_inputs |= bool(getattr(trainer.args, "include_inputs_for_metrics", False))
        batches = BatchMaker(make_batch=makers[sizes.index(largest)]) if makers else None
        return cls(batch_size, batches, examples, concatenates, has_inputs)

    @contextmanager
    def before_last_batch(self) -> Iterator[None]:
        """Hold blocks for the results of all earlier batches, once a batch has shown their size."""
        most = self.examples - self.batch_size
        # Each batch is concatenated to those before it. The blocks that this frees are too small
        # for the next ones, so they fragment a caching allocator.
        is_cached = self._device is not None and self._device.type != "cpu"
        batches = most // max(1, self.batch_size)
        growths = max(1, min(batches, MOST_GROWTHS)) if self.is_concatenated and is_cached else 1
        for growth in range(1, growths + 1):
            self._old = self._blocks(most * growth // growths)
        try:
            yield
        finally:
            self._old = []

    def with_last_batch(self, acting: Any, batch: Any, loss: Any, logits: Any, labels: Any) -> Any:
        """Return the results of the last batch as the Trainer gathers them."""
        if logits is not None and acting.preprocess_logits_for_metrics is not None:
            logits = acting.preprocess_logits_for_metrics(logits, labels)
        name = getattr(acting.model, "main_input_name", "input_ids")
        inputs = batch.get(name) if self.has_inputs else None
        tensors = [tensor for _, tensor in named_tensors((logits, labels, inputs))]
        examples = next(len(tensor) for _, tensor in named_tensors(batch))
        self._bytes_per_example = [tensor.nbytes / examples for tensor in tensors]
        self._device = tensors[0].device if tensors else None
        if self.is_concatenated:
            self._blocks(self.examples)  # these exist together with the old ones for a moment
        return loss, logits, labels

    def _blocks(self, examples: int) -> list[Tensor]:
        sizes = [int(size * max(0, examples)) for size in self._bytes_per_example]
        return [filled_block(size, self._device) for size in sizes]
