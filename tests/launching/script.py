"""A training script that knows nothing of batchfinder, with the manners that scripts have."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

# Parts of PyTorch that take longer to import than the rest, and that this script does not need. The
# first optimizer asks its compiler for nothing but to leave its functions uncompiled.
for name in ("torch._dynamo", "torch._meta_registrations", "torch.export"):
    sys.modules[name] = ModuleType(name)
vars(sys.modules["torch._dynamo"]).update(
    disable=lambda function, *_, **__: function, graph_break=lambda: None
)
vars(sys.modules["torch.export"])["ExportedProgram"] = object  # imported by PyTorch 2.7

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter  # noqa: E402

# By default, the size beyond which the manners that depend on the size show.
LIMIT = 4


class Greedy(nn.Module):
    """Asks for more memory than there is."""

    def forward(self, x: Tensor) -> Tensor:
        """Never return."""
        return x + torch.empty(2**44)


class Padded:
    """Examples with a mask, as DETR's ``NestedTensor``."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.mask = x, torch.ones(len(x))


class Layers(nn.Sequential):
    """Layers for examples, with or without a mask."""

    def forward(self, examples: Tensor | Padded) -> Tensor:
        """Run the layers."""
        x = examples.x if isinstance(examples, Padded) else examples
        for layer in self:
            x = layer(x)
        return x


class Descent:
    """An optimizer that is none of PyTorch's, as fastai's."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [*parameters]

    def step(self) -> None:
        """Descend."""
        for parameter in self._parameters:
            assert parameter.grad is not None
            parameter.data -= 0.01 * parameter.grad

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters:
            parameter.grad = None


def main() -> None:
    """Train."""
    options = _options()
    size, manner = options.batch_size, options.manner
    refuse(manner, size)
    size = {"ignores": 3, "caps": min(size, LIMIT), "shares": size // 2}.get(manner, size)
    is_large = size > options.limit
    model = Layers(nn.Linear(8, 8), nn.BatchNorm1d(8) if manner == "norm" else nn.ReLU())
    model.training = manner != "wraps"  # as Lightning leaves DDP after a validation
    model(torch.randn(LIMIT, 8))  # as scripts do that ask a model for its shapes, before they train
    own = manner in ("by_hand", "descends")
    optimizer = None if own else torch.optim.Adam(model.parameters())
    if manner == "hangs":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("waits")
        with torch.no_grad():
            model.eval()(torch.randn(size, 8))  # the start of a long validation
        time.sleep(600)
    if manner == "evaluates":
        evaluate(model, size, options.steps)
        return
    if manner in ("validates", "validates_later", "trains_on", "descends"):
        kind = Descent if manner == "descends" else torch.optim.Adam
        train_in_epochs(model, kind(model.parameters()), options)
        return
    drops = manner == "drops"
    data = TensorDataset(torch.zeros(LIMIT))
    batches = len(DataLoader(data, batch_size=size, drop_last=drops))
    for _ in range(options.steps * min(1, batches)):
        for _ in range(options.accumulation):
            try:
                if manner == "swallows" and is_large:
                    Greedy()(torch.ones(1))
            except RuntimeError:
                continue
            losses = model(batch_of(manner, size)).square().mean(dim=1)
            losses.topk(options.limit + 1 if manner == "ranks" else 1)
            losses.mean().backward()
        if is_large:
            fail(manner)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    Path("end.txt").write_text("the script came to its end")


def batch_of(manner: str, size: int) -> Tensor | Padded:
    """Return the examples of a step."""
    x = torch.randn(size, 8)
    return Padded(x) if manner == "pads" else x


def refuse(manner: str, size: int) -> None:
    """Raise before the first step."""
    if manner == "raises":
        raise ValueError("there is no data set in this folder\nSee the manual")
    if manner == "keeps":  # as LightningCLI keeps its configuration
        with Path("config.yaml").open("x"):
            pass
    if manner == "divides" and size % 2:
        raise ValueError(f"a batch of {size} is not divisible by 2 ranks")


def fail(manner: str) -> None:
    """Fail as scripts do at large sizes."""
    if manner == "dies":
        os._exit(3)
    if manner == "fills_shared_memory":
        raise RuntimeError(
            "DataLoader worker (pid 1) is killed by signal: Bus error. It is possible that "
            "dataloader's workers are out of shared memory."
        )


def evaluate(model: nn.Module, size: int, steps: int) -> None:
    """Run forward passes only."""
    with torch.no_grad():
        for _ in range(steps):
            model.eval()(torch.randn(size, 8))


def train_in_epochs(
    model: nn.Module, optimizer: torch.optim.Optimizer | Descent, options: argparse.Namespace
) -> None:
    """Train on a loader, validate after each epoch, and save; or validate after many steps only."""
    data = TensorDataset(torch.randn(10_000, 8))
    training = DataLoader(data, batch_size=options.batch_size)
    validation, test = DataLoader(data, batch_size=4), DataLoader(data, batch_size=4)
    for epoch in range(options.steps):
        for (x,) in training:
            model.train()(x).square().mean().backward()
            if options.manner == "trains_on" and epoch and options.batch_size > options.limit:
                Greedy()(x)
            optimizer.step()
            optimizer.zero_grad()
        if options.manner == "validates_later" and epoch < 100:
            continue
        with torch.no_grad():
            own = options.manner == "trains_on"  # as fastai's loaders do
            for (x,) in _SingleProcessDataLoaderIter(validation) if own else validation:
                model.eval()(x)
                if options.manner == "validates" and options.batch_size > options.limit:
                    Greedy()(x)
        Path("model.txt").write_text("weights")
        torch.save(model.state_dict(), "model.pt")
    with torch.no_grad():
        for (x,) in test if options.manner == "descends" else ():
            model.eval()(x)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=int(os.environ.get("BATCH", "0")))
    parser.add_argument("--config")
    parser.add_argument("--manner", default="plain")
    parser.add_argument("--limit", type=int, default=int(os.environ.get("SCRIPT_LIMIT", LIMIT)))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--accumulation", type=int, default=1)
    options = parser.parse_args()
    if options.config:
        options.batch_size = int(Path(options.config).read_text())
    return options


if __name__ == "__main__":
    main()
