"""Strategies: the levers that change a step's memory, and the combinations worth a row."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

from batchfinder.errors import UsageError, did_you_mean
from batchfinder.training.optimizer import FUSED, optimizer_names

BASE = "as it is"


@dataclass(frozen=True)
class Strategy:
    """A combination of levers. Anything that no lever sets stays as the user has it.

    Attributes:
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``, as in a search. With ``"pure-bf16"``, the
            parameters, their gradients and the optimizer's states are bf16 too.
        checkpointing: ``"checkpointing"`` recomputes the blocks in the backward pass.
            ``"selective-checkpointing"`` keeps products, convolutions and attention.
            ``"no-checkpointing"`` turns off what the model or the Trainer has turned on.
        optimizer: a name from :func:`optimizer_levers`.
        accumulate: train with gradient accumulation.
        compiled: run the model through ``torch.compile``.
        parallel: ``"ddp"`` or ``"fsdp"``.

    Example:
        >>> Strategy(precision="bf16", optimizer="sgd").name
        'bf16 + sgd'
    """

    precision: str | None = None
    checkpointing: str | None = None
    optimizer: str | None = None
    accumulate: bool = False
    compiled: bool = False
    parallel: str | None = None

    @property
    def name(self) -> str:
        """The levers, as :func:`parse_strategy` reads them."""
        switches = {"accumulate": self.accumulate, "compile": self.compiled}
        levers = [self.precision, self.checkpointing, self.optimizer, self.parallel]
        levers += [name for name, is_on in switches.items() if is_on]
        return " + ".join(lever for lever in levers if lever) or BASE


_KINDS = "", "selective-", "no-"
_CHANGES: Mapping[str, tuple[str, object]] = {
    **{name: ("precision", name) for name in ("fp32", "bf16", "fp16", "pure-bf16")},
    **{f"{kind}checkpointing": ("checkpointing", f"{kind}checkpointing") for kind in _KINDS},
    **{name: ("parallel", name) for name in ("ddp", "fsdp")},
    "accumulate": ("accumulate", True),
    "compile": ("compiled", True),
}


def optimizer_levers() -> list[str]:
    """Return the names of the optimizers that a strategy may train with.

    Its row says so if Adafactor (PyTorch 2.5) or a package for 8-bit optimizers is missing.
    """
    return [*optimizer_names(), FUSED, "adafactor", "adamw-8bit"]


def parse_strategy(text: str) -> Strategy:
    """Read a strategy, written as its levers with ``+`` between them.

    Args:
        text: the levers, such as ``"bf16+checkpointing+sgd"``; ``"base"`` changes nothing.

    Raises:
        UsageError: a lever is unknown, or two change the same thing.

    Example:
        >>> parse_strategy("bf16+checkpointing").name
        'bf16 + checkpointing'
    """
    known = {**_CHANGES, **{name: ("optimizer", name) for name in optimizer_levers()}}
    changes: dict[str, object] = {}
    for lever in (part.strip().lower() for part in text.split("+")):
        if lever in ("base", BASE):
            continue
        if lever not in known:
            usual = f"{', '.join(_CHANGES)}, or an optimizer such as sgd"
            hint = did_you_mean(lever, known, otherwise=f". Try {usual}.")
            raise UsageError(f"there is no strategy {lever!r}{hint}")
        part, value = known[lever]
        if part in changes:
            raise UsageError(
                f"{text!r} sets the {part} twice. Try one strategy for each: {changes[part]} and "
                f"{lever}."
            )
        changes[part] = value
    return dataclasses.replace(Strategy(), **changes)  # type: ignore[arg-type]


def usual_strategies(
    *,
    precision: str,
    has_own_precision: bool = False,
    optimizer: str,
    accumulate: bool,
    is_checkpointed: bool = False,
    world_size: int,
    is_measured: bool,
) -> list[Strategy]:
    """Return the most informative strategies: each lever alone, then sensible combinations.

    What the base has already, which changes nothing, gets no row of its own. No strategy changes
    the precision of a step that sets its own. One rank has nothing to share, and compiling changes
    something only where rows are measured.
    """
    is_low = has_own_precision or precision in ("bf16", "fp16")
    precisions = () if has_own_precision else ("fp32", "bf16", "fp16", "pure-bf16")
    best = (*(() if is_low else ("bf16",)), *(() if is_checkpointed else ("checkpointing",)))
    optimizers = [FUSED, "sgd", "adafactor"]
    optimizers += ["adamw-8bit"] if eight_bit_package() else []
    texts = [
        "base",
        *(name for name in precisions if name != precision),
        "no-checkpointing" if is_checkpointed else "checkpointing",
        "selective-checkpointing",
        *(name for name in optimizers if name != optimizer),
        *(() if accumulate else ("accumulate",)),
        *(("compile",) if is_measured else ()),
        *(("ddp", "fsdp") if world_size > 1 else ()),
        "+".join(best or ("base",)),
        "+".join((*best, "adafactor")),
        *(("+".join((*best, "fsdp")),) if world_size > 1 else ()),
    ]
    return list(dict.fromkeys(map(parse_strategy, texts)))


def eight_bit_package() -> str | None:
    """Return the installed package that has 8-bit optimizers; None if there is none."""
    names = ("bitsandbytes", "torchao")
    return next((name for name in names if importlib.util.find_spec(name)), None)
