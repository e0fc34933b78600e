"""Settings of the run that a set-up's own loop trains in; ``train_setup.py`` makes them.

With the values below a set-up also runs by hand: ``python scripts/benchmarks/setups/images.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

Built = TypeVar("Built")

batch_size = 2
steps = 3
device = "cpu"
in_bf16 = False
seed = 0  # another one shuffles the data into another order
arguments: dict[str, Any] = {}

_built: list[Any] = []


def kept(build: Callable[..., Built]) -> Built:
    """Return what ``build(**arguments)`` returned at first: bisection trains one model."""
    if not _built:
        _built.append(build(**arguments))
    built: Built = _built[0]
    return built


def with_adamw(build: Callable[..., Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the first model of ``build(**arguments)`` on the device, and AdamW over its weights.

    A target returns a sample beside the model.
    """

    def start(**arguments: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        built = build(**arguments)
        model = (built[0] if isinstance(built, tuple) else built).to(device).train()
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return model, torch.optim.AdamW(trainable, lr=1e-4)

    return kept(start)


def autocast() -> torch.autocast:
    """Train in bfloat16 where that was asked for."""
    return torch.autocast(device, torch.bfloat16, enabled=in_bf16)


def forget_gradients() -> None:
    """Drop the gradients of what is kept, as a failed step leaves them."""
    for built in _built:
        for part in built if isinstance(built, tuple) else (built,):
            if isinstance(part, torch.nn.Module):
                part.zero_grad()
