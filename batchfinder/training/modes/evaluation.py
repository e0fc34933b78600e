"""Forward passes in eval mode, without gradients, as a plain validation loop runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# The forward passes that reach the peak memory: in the second, the output of the first is alive.
BATCHES = 2


@dataclass(eq=False)
class Evaluation:
    """The loop ``for ...: batch = to(device); output = model(batch)`` without gradients.

    Each variable holds its old value until it gets a new one.
    """

    model: nn.Module
    run: Callable[[nn.Module, Any], Any]
    autocast: Callable[[], AbstractContextManager[Any]]
    kept: tuple[Any, Any] = (None, None)

    def fetch(self, next_batch: Callable[[], Any]) -> Iterator[Any]:
        """Yield as many batches as the peak needs, each after the one before it has run."""
        for _ in range(BATCHES):
            yield next_batch()

    def forward(self, batch: Any) -> None:
        """Run one batch that is on the device."""
        with in_eval_mode(self.model), torch.no_grad(), self.autocast():
            self.kept = batch, self.kept[1]
            self.kept = batch, self.run(self.model, batch)

    def release(self) -> None:
        """Release the last batch and its output."""
        self.kept = None, None


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Run a block in eval mode. Afterwards each module is in its old mode again.

    Example:
        >>> layer = nn.Dropout()
        >>> with in_eval_mode(layer):
        ...     layer.training
        False
        >>> layer.training
        True
    """
    in_training = model.training
    frozen = [module for module in model.modules() if not module.training]
    model.eval()
    try:
        yield
    finally:
        # Call train() itself: some modules merge weights in eval mode, and split them here.
        model.train(in_training)
        for module in model.modules():
            module.training = True
        for module in frozen:
            module.training = False
