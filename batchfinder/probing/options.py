"""The options that a prober needs to try sizes, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from batchfinder.errors import UsageError

# The kinds of step that a search can measure.
MODES = ("train", "eval", "inference")
STRATEGIES = (None, "ddp", "fsdp")
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class ProbeOptions:
    """The options of every probe of one search.

    Attributes:
        device: the device, such as ``"cuda:0"``; None to choose it by the model and the machine.
        memory_limit: bytes that the device is assumed to have; None for all free memory.
        budget_bytes: bytes that a step may use; None to compute it from the limit and headroom.
        headroom: fraction of the memory kept free, from 0 to below 1.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        accumulate: train with gradient accumulation, so that gradients of an earlier micro-batch
            are alive in the forward pass.
        compiled: run the model through ``torch.compile``.
        confirm_steps: least number of full steps of a confirmation, at least 1.
        smallest: the smallest batch size that the search may try.
        batch_dim: index of the batch dimension.
        warm_up_batch_size: batch size that warms up a new process. It is the first size that ran in
            an earlier process; None until one has run.
        strategy: ``"ddp"`` or ``"fsdp"`` if the ranks of a job train together; None if one process
            trains alone.
        mode: the kind of step: ``"train"``, ``"eval"`` or ``"inference"``.
        eval_batch_size: examples of each batch in the validation after each step; None for no
            validation, unless the framework that trains runs one.

    Raises:
        UsageError: a value is invalid.
    """

    device: str | None = None
    memory_limit: int | None = None
    budget_bytes: int | None = None
    headroom: float = 0.05
    precision: str = "fp32"
    accumulate: bool = False
    compiled: bool = False
    confirm_steps: int = 3
    smallest: int = 1
    batch_dim: int = 0
    warm_up_batch_size: int | None = None
    strategy: str | None = None
    mode: str = "train"
    eval_batch_size: int | None = None

    def __post_init__(self) -> None:
        choices = {"mode": MODES, "strategy": STRATEGIES, "precision": PRECISIONS}
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                *others, last = filter(None, known)
                raise UsageError(f"{name} is {', '.join(others)} or {last}, not {value!r}")
        if self.eval_batch_size is not None and self.eval_batch_size < 1:
            raise UsageError(f"eval_batch_size must be at least 1, not {self.eval_batch_size}")
        if self.mode != "train":
            for name in ("accumulate", "eval_batch_size", "strategy"):
                if getattr(self, name):
                    raise UsageError(
                        f"{name} belongs to training, and mode is {self.mode}. Try without it."
                    )
        if not isinstance(self.headroom, int | float) or not 0 <= self.headroom < 1:
            raise UsageError(
                f"headroom is a fraction of the memory from 0 to below 1, not {self.headroom!r}"
            )
        if self.confirm_steps < 1:
            raise UsageError(f"confirm_steps must be at least 1, not {self.confirm_steps}")
