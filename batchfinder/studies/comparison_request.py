"""The request for a comparison, and the comparisons of the strategies that have ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from batchfinder.errors import UsageError
from batchfinder.probing.options import ProbeOptions
from batchfinder.results.accumulation import AccumulationPlan, plan_accumulation
from batchfinder.search.bounds import Bounds
from batchfinder.simulation.gpus import Gpu
from batchfinder.studies.checkpointing import is_checkpointed
from batchfinder.studies.comparison import Comparison, StrategyRow
from batchfinder.studies.strategies import Strategy, parse_strategy, usual_strategies
from batchfinder.training.optimizer import DEFAULT_OPTIMIZER, FUSED, find_optimizer
from batchfinder.training.setup import DTYPES, TrainingSetup
from batchfinder.training.step_source import own_precision
from batchfinder.units import positive


@dataclass(frozen=True)
class ComparisonRequest:
    """A request for a comparison.

    Attributes:
        setup: what to train.
        options: options of the steps, unless a strategy sets them.
        strategies: one for each row; the first changes nothing.
        bounds: the sizes that may be tried.
        world_size: the number of ranks for the strategies that need several.
        global_batch_size: examples of one optimizer step; None for any number.
    """

    setup: TrainingSetup
    options: ProbeOptions
    strategies: tuple[Strategy, ...]
    bounds: Bounds
    world_size: int = 1
    global_batch_size: int | None = None

    @classmethod
    def of(
        cls,
        setup: TrainingSetup,
        options: ProbeOptions,
        bounds: Bounds,
        *,
        strategies: Sequence[str] = (),
        world_size: int = 1,
        global_batch_size: int | None = None,
        is_measured: bool = False,
    ) -> ComparisonRequest:
        """Check what a user asks for, and fill in the strategies if none are named.

        Raises:
            UsageError: a number or a strategy is invalid.
        """
        positive("the world size", world_size)
        if global_batch_size is not None:
            positive("the global batch size", global_batch_size)
        accumulate = options.accumulate or global_batch_size is not None
        options = dataclasses.replace(options, accumulate=accumulate)
        named = [parse_strategy(text) for text in strategies]
        alone = [each.name for each in named if each.parallel]
        if alone and world_size == 1:
            raise UsageError(f"{alone[0]} needs several ranks. Try --world-size 8.")
        if not named:
            named = usual_strategies(
                precision=options.precision,
                has_own_precision=own_precision(setup) is not None,
                optimizer=_optimizer_name(setup),
                accumulate=accumulate,
                is_checkpointed=is_checkpointed(setup),
                world_size=world_size,
                is_measured=is_measured,
            )
        rows = tuple(dict.fromkeys((Strategy(), *named)))
        return cls(setup, options, rows, bounds, world_size, global_batch_size)

    @property
    def base(self) -> str:
        """The training without any strategy, such as ``"bf16, AdamW, checkpointing"``."""
        optimizer = self.setup.optimizer
        if optimizer is None:
            name = "AdamW"
        elif isinstance(optimizer, str):
            made = find_optimizer(optimizer)
            name = made.__name__ if isinstance(made, type) else "fused AdamW"
        else:
            name = type(optimizer).__name__ if isinstance(optimizer, Optimizer) else "own optimizer"
        precision = own_precision(self.setup) or self.options.precision
        if precision == "fp32":
            precision = _stored_as(self.setup)
        switches = {
            "checkpointing": is_checkpointed(self.setup),
            "gradient accumulation": self.options.accumulate,
        }
        return ", ".join([precision, name, *(text for text, is_on in switches.items() if is_on)])

    def ranks_of(self, strategy: Strategy) -> int:
        """Return the number of ranks that train together with a strategy."""
        return self.world_size if strategy.parallel else 1

    def plan_of(self, strategy: Strategy, batch_size: int) -> AccumulationPlan | None:
        """Return how a strategy reaches the global batch size; None if it cannot or need not."""
        if self.global_batch_size is None or not batch_size:
            return None
        return plan_accumulation(
            self.global_batch_size,
            batch_size,
            self.ranks_of(strategy),
            min_batch_size=self.bounds.first,
            multiple_of=self.bounds.multiple_of,
        )


def comparisons_of(
    request: ComparisonRequest, done: Sequence[Sequence[StrategyRow]], gpus: Sequence[Gpu] = ()
) -> list[Comparison]:
    """Return the comparisons of the strategies that have ended; none before the first has.

    Each of them has done a row for each simulated GPU, or without GPUs, the measured one.
    """
    results = [row.result for rows in done[:1] for row in rows if row.result]
    devices = [gpu.name for gpu in gpus] or [result.device for result in results]
    warnings = warnings_of(done)
    return [
        Comparison(
            device,
            result.budget_bytes,
            not gpus,
            rows,
            request.global_batch_size,
            request.base,
            warnings,
        )
        for device, result, rows in zip(devices, results, zip(*done, strict=True), strict=False)
    ]


def warnings_of(done: Sequence[Sequence[StrategyRow]]) -> tuple[str, ...]:
    """Return the warnings of the first strategy, which hold for all."""
    first = [row.result for rows in done[:1] for row in rows if row.result]
    return tuple(dict.fromkeys(text for result in first for text in result.warnings))


def _stored_as(setup: TrainingSetup) -> str:
    """Return the precision of the parameters, such as ``"bf16 parameters"``, or ``"fp32"``."""
    stored = {parameter.dtype for parameter in setup.model.parameters()}
    names = [name for name, dtype in DTYPES.items() if dtype in stored]
    return "fp32" if names in ([], ["fp32"]) else f"{' and '.join(names)} parameters"


def _optimizer_name(setup: TrainingSetup) -> str:
    """Return the name of the setup's optimizer; "" if it is unknown before it is made."""
    optimizer = setup.optimizer or DEFAULT_OPTIMIZER
    if isinstance(optimizer, Optimizer):
        is_fused = type(optimizer).__name__ == "AdamW" and optimizer.defaults.get("fused")
        return FUSED if is_fused else type(optimizer).__name__.lower()
    return optimizer.lower() if isinstance(optimizer, str) else ""
