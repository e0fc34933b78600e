"""The bundled examples, for the CPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import setup_loop
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils._pytree import tree_map

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))


def target(family: str = "mlp") -> tuple[nn.Module, Any]:
    """Return the model of ``train_<family>.py`` and one batch."""
    example = importlib.import_module(f"train_{family}")
    return example.build_model(), example.build_sample()


def start(family: str = "mlp") -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and its optimizer."""
    model, _ = target(family)
    model.train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def make_batch(sample: Any, batch_size: int) -> Any:
    """Return the first example of the sample as often as asked."""
    return tree_map(lambda tensor: tensor[torch.zeros(batch_size, dtype=torch.long)], sample)


if __name__ == "__main__":
    family = setup_loop.arguments.get("family", "mlp")
    sample = importlib.import_module(f"train_{family}").build_sample()
    model, optimizer = setup_loop.kept(start)
    for batch in (make_batch(sample, setup_loop.batch_size) for _ in range(setup_loop.steps)):
        if isinstance(batch, dict):
            output = model(**batch)
            loss = output["loss"]
        else:
            inputs, targets = batch
            output = model(inputs)
            loss = F.cross_entropy(output, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
