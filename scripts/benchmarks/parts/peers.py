"""One batch-size finder on one target, in this process, under a memory limit.

    cd scripts/benchmarks
    python -m parts.peers lightning_binsearch ../examples/train_mlp.py:build_model 1GiB
    python -m parts.peers toma ../examples/gpu_models.py:gpt2 23GiB --device cuda:0

Each is used as its own documentation shows, on the training loop of ``train_at.py``: AdamW, a fresh
batch in every step, three steps at every size that is tried where the finder does not choose.
Prints one JSON object: batch_size (0: none), steps, samples, seconds, error.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from parts.train_at import forward, is_out_of_memory, limit_memory, load, parse_size
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

# What finders that only ever shrink start from: far above every answer.
GENEROUS_START = 8192
STEPS = 3


class Training:
    """A plain training loop that counts what is run in it."""

    def __init__(self, target: str, device: torch.device) -> None:
        self.device = device
        self.model, self.make_batch = load(target)
        self.model.to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.steps = 0
        self.samples = 0

    def run(self, batch_size: int, steps: int = STEPS) -> None:
        """Some steps at a size."""
        for _ in range(steps):
            batch = self.make_batch(batch_size)
            self.begin(batch)
            batch = tree_map(lambda leaf: leaf.to(self.device), batch)
            output, loss = forward(self.model, batch)  # noqa: RUF059 - lives on, as in most loops
            torch.autograd.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

    def run_anew(self, batch_size: int) -> int:
        """Some steps at a size, whatever an earlier size has left; the size."""
        self.optimizer.zero_grad()
        self.run(batch_size)
        return batch_size

    def begin(self, batch: Any) -> None:
        """Count a step, whether it comes to an end or not."""
        self.steps += 1
        self.samples += len(tree_leaves(batch)[0])


def doubling_and_bisection(training: Training) -> int:
    """As people write it by hand."""

    def fits(batch_size: int) -> bool:
        try:
            training.run(batch_size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            training.optimizer.zero_grad()
            gc.collect()
        return True

    return bisected(fits)


def bisected(fits: Callable[[int], bool]) -> int:
    """The largest size that fits, by doubling and bisection; 0: none."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def accelerate_shrinking(training: Training) -> int:
    """https://huggingface.co/docs/accelerate/usage_guides/memory."""
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=GENEROUS_START)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> int:
        return training.run_anew(batch_size)

    found: int = train()
    return found


def toma_shrinking(training: Training) -> int:
    """https://github.com/BlackHC/toma."""
    from toma import toma

    @toma.batch(initial_batchsize=GENEROUS_START)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> int:
        return training.run_anew(batch_size)

    found: int = train()
    return found


def torch_max_mem_shrinking(training: Training) -> int:
    """https://torch-max-mem.readthedocs.io."""
    from torch_max_mem import MemoryUtilizationMaximizer

    maximizer = MemoryUtilizationMaximizer()

    @maximizer  # type: ignore[untyped-decorator]
    def train(batch_size: int = GENEROUS_START) -> int:
        return training.run_anew(batch_size)

    found: int = train()
    return found


def lightning(mode: str) -> Callable[[Training], int]:
    """https://lightning.ai/docs/pytorch/stable/advanced/training_tricks.html."""

    def find(training: Training) -> int:
        from lightning.pytorch import LightningModule, Trainer
        from lightning.pytorch.tuner import Tuner
        from torch.utils.data import DataLoader, Dataset

        sample = training.make_batch(4)

        class Examples(Dataset[Any]):
            def __len__(self) -> int:
                return 2**24

            def __getitem__(self, index: int) -> Any:
                return tree_map(lambda leaf: leaf[index % 4], sample)

        class Module(LightningModule):  # type: ignore[misc]
            batch_size = 2

            def __init__(self) -> None:
                super().__init__()
                self.inner: nn.Module = training.model

            def train_dataloader(self) -> Any:
                return DataLoader(Examples(), batch_size=self.batch_size)

            def training_step(self, batch: Any, index: int) -> torch.Tensor:
                training.begin(batch)
                return forward(self.inner, batch)[1]

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.inner.parameters(), lr=1e-4)

        trainer = Trainer(
            accelerator="gpu" if training.device.type == "cuda" else "cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        found = Tuner(trainer).scale_batch_size(Module(), mode=mode, steps_per_trial=STEPS)
        return int(found or 0)

    return find


PEERS: dict[str, Callable[[Training], int]] = {
    "doubling_and_bisection": doubling_and_bisection,
    "lightning_power": lightning("power"),
    "lightning_binsearch": lightning("binsearch"),
    "accelerate": accelerate_shrinking,
    "toma": toma_shrinking,
    "torch_max_mem": torch_max_mem_shrinking,
}


def main() -> None:
    """Let a finder find, and say what it found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("target", help="FILE.py:FUNCTION")
    parser.add_argument("memory_limit", type=parse_size, help="on CUDA: of the allocator")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    report: dict[str, Any] = {"batch_size": 0, "error": ""}
    started = time.perf_counter()
    training = Training(options.target, options.device)
    _import_ahead(options.peer)
    limit_memory(options.memory_limit, options.device)
    try:
        report["batch_size"] = PEERS[options.peer](training)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is how the finder ended
        first_line = (str(error).splitlines() or [""])[0]
        report["error"] = f"{type(error).__name__}: {first_line}"
    report |= {"steps": training.steps, "samples": training.samples}
    report["seconds"] = round(time.perf_counter() - started, 1)
    print(json.dumps(report))


def _import_ahead(peer: str) -> None:
    """Import a finder's library before the memory limit is set, so that it does not count."""
    if peer.startswith("lightning"):
        import lightning.pytorch.tuner  # noqa: F401


if __name__ == "__main__":
    main()
