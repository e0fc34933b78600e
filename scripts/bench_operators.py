"""What an operator and its gradient keep and take: the simulation against PyTorch's own allocator.

    scripts/counting_cuda/run.sh python scripts/bench_operators.py [--precision bf16]
    python scripts/bench_operators.py                       # on a GPU

Each operator works on the output of a parameter, 64 MiB of fp32, in a training step of its own; the
step's peak in bytes allocated is compared. Left out is what the counting runtime cannot run: prod,
which PyTorch compiles on its first use, and Fourier transforms. Prints the rows that differ by more
than 1 %, and writes all to scripts/results/operators_PRECISION.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own name for it
from bench_case import RESULTS, markdown_table, save
from torch import Tensor, nn

from batchfinder import estimate_peak_memory, find_max_batch
from batchfinder.probing.versions import versions

BATCH, ROWS, COLUMNS = 8, 512, 4096
SHOWN = 0.01  # of the peak; what is further off is printed
Operator = Callable[[Tensor, Tensor, Tensor], Tensor]  # of values, indices and targets


class Values(nn.Module):
    """A parameter, and what operators take beside it."""

    indices: Tensor
    targets: Tensor

    def __init__(self) -> None:
        super().__init__()
        shape = BATCH, ROWS, COLUMNS
        self.weight = nn.Parameter(torch.rand(shape))
        self.register_buffer("targets", torch.rand(shape))
        self.register_buffer("indices", torch.randint(0, COLUMNS, shape))

    def forward(self, _: Tensor) -> Tensor:
        """The values, of which a gradient is wanted."""
        return self.weight * 2


def images(values: Tensor) -> Tensor:
    """Each row as a picture."""
    return values.view(-1, ROWS, 64, 64)


def heads(values: Tensor) -> Tensor:
    """Each row as the eight heads of attention."""
    return values.view(-1, ROWS, 8, COLUMNS // 8).transpose(1, 2)


def every_other(values: Tensor) -> Tensor:
    """The numbers of half of the columns."""
    return torch.arange(0, COLUMNS, 2, device=values.device)


OPERATORS: dict[str, Operator] = {
    "abs": lambda y, i, t: y.abs(),
    "add": lambda y, i, t: y + t,
    "amax": lambda y, i, t: y.amax(-1),
    "avg_pool2d": lambda y, i, t: F.avg_pool2d(images(y), 2),
    "binary_cross_entropy": lambda y, i, t: F.binary_cross_entropy(y.sigmoid(), t),
    "binary_cross_entropy_with_logits": lambda y, i, t: F.binary_cross_entropy_with_logits(y, t),
    "binary_cross_entropy_with_logits, unreduced": lambda y, i, t: (
        F.binary_cross_entropy_with_logits(y, t, reduction="none")
    ),
    "bmm": lambda y, i, t: y @ t.transpose(1, 2),
    "cdist": lambda y, i, t: torch.cdist(y, t),
    "clamp": lambda y, i, t: y.clamp(0, 1),
    "cosine_similarity": lambda y, i, t: F.cosine_similarity(y, t, dim=-1),
    "cross_entropy": lambda y, i, t: F.cross_entropy(y.flatten(0, 1), i[..., 0].flatten()),
    "cross_entropy, label smoothing": lambda y, i, t: F.cross_entropy(
        y.flatten(0, 1), i[..., 0].flatten(), label_smoothing=0.1
    ),
    "cross_entropy, probabilities": lambda y, i, t: F.cross_entropy(
        y.flatten(0, 1), t.flatten(0, 1)
    ),
    "cumsum": lambda y, i, t: y.cumsum(-1),
    "div": lambda y, i, t: y / (t + 1),
    "einsum": lambda y, i, t: torch.einsum("bij,bkj->bik", y, t),
    "elu": lambda y, i, t: F.elu(y),
    "exp": lambda y, i, t: y.exp(),
    "flip": lambda y, i, t: y.flip(-1),
    "fold": lambda y, i, t: F.fold(F.unfold(images(y), 2, stride=2), (64, 64), 2, stride=2),
    "gather": lambda y, i, t: y.gather(-1, i),
    "gather, one of each row": lambda y, i, t: y.gather(-1, i[..., :1]),
    "gelu": lambda y, i, t: F.gelu(y),
    "glu": lambda y, i, t: F.glu(y, -1),
    "hinge_embedding_loss": lambda y, i, t: F.hinge_embedding_loss(y, t),
    "huber_loss": lambda y, i, t: F.huber_loss(y, t),
    "index": lambda y, i, t: y[:, :, every_other(y)],
    "index_add": lambda y, i, t: t.index_add(2, torch.arange(COLUMNS, device=y.device), y),
    "index_select": lambda y, i, t: y.index_select(2, every_other(y)),
    "interpolate": lambda y, i, t: F.interpolate(images(y), scale_factor=2, mode="bilinear"),
    "kl_div": lambda y, i, t: F.kl_div(F.log_softmax(y, -1), t),
    "l1_loss": lambda y, i, t: F.l1_loss(y, t),
    "layer_norm": lambda y, i, t: F.layer_norm(y, (COLUMNS,)),
    "logsumexp": lambda y, i, t: y.logsumexp(-1),
    "masked_fill": lambda y, i, t: y.masked_fill(t > 0.5, 0.0),
    "max": lambda y, i, t: y.max(),
    "max of each row": lambda y, i, t: y.max(-1)[0],
    "max_pool2d": lambda y, i, t: F.max_pool2d(images(y), 2),
    "mish": lambda y, i, t: F.mish(y),
    "mse_loss": lambda y, i, t: F.mse_loss(y, t),
    "mul": lambda y, i, t: y * t,
    "norm": lambda y, i, t: y.norm(dim=-1),
    "norm, p = 1": lambda y, i, t: y.norm(p=1, dim=-1),
    "norm, p = 3": lambda y, i, t: y.norm(p=3, dim=-1),
    "normalize": lambda y, i, t: F.normalize(y, dim=-1),
    "pad": lambda y, i, t: F.pad(y, (1, 1)),
    "pad, reflected": lambda y, i, t: F.pad(y, (1, 1), mode="reflect"),
    "pixel_shuffle": lambda y, i, t: F.pixel_shuffle(images(y), 2),
    "pow": lambda y, i, t: y.pow(3),
    "prelu": lambda y, i, t: F.prelu(y, torch.full((1,), 0.2, device=y.device)),
    "repeat_interleave": lambda y, i, t: y.repeat_interleave(2, 1),
    "rms_norm": lambda y, i, t: F.rms_norm(y, (COLUMNS,)),
    "roll": lambda y, i, t: y.roll(1, -1),
    "scaled_dot_product_attention": lambda y, i, t: F.scaled_dot_product_attention(
        heads(y), heads(t), heads(t)
    ),
    "scatter": lambda y, i, t: t.scatter(-1, i, y),
    "scatter_add": lambda y, i, t: t.scatter_add(-1, i, y),
    "silu": lambda y, i, t: F.silu(y),
    "sin": lambda y, i, t: y.sin(),
    "smooth_l1_loss": lambda y, i, t: F.smooth_l1_loss(y, t),
    "soft_margin_loss": lambda y, i, t: F.soft_margin_loss(y, t),
    "softmax": lambda y, i, t: y.softmax(-1),
    "softplus": lambda y, i, t: F.softplus(y),
    "sort": lambda y, i, t: y.sort(-1)[0],
    "stack": lambda y, i, t: torch.stack([y, t]),
    "std": lambda y, i, t: y.std(-1),
    "take_along_dim": lambda y, i, t: y.take_along_dim(i[..., :2], -1),
    "topk": lambda y, i, t: y.topk(4, -1)[0],
    "tril": lambda y, i, t: y.tril(),
    "triplet_margin_loss": lambda y, i, t: F.triplet_margin_loss(y, t, y * 2),
    "unfold": lambda y, i, t: F.unfold(images(y), 3),
    "var": lambda y, i, t: y.var(-1),
    "where": lambda y, i, t: torch.where(t > 0.5, y, t),
}
ONLY_FP32 = ("binary_cross_entropy",)  # PyTorch refuses it under autocast


def main() -> None:
    """Compare every operator, and end with those that differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--operator", choices=OPERATORS, action="append")
    options = parser.parse_args()
    torch.backends.cudnn.enabled = False  # what the counting runtime has not
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # cuBLAS keeps its workspace
    names = options.operator or [
        name for name in OPERATORS if options.precision == "fp32" or name not in ONLY_FP32
    ]
    rows = {name: compare(OPERATORS[name], options.precision) for name in names}
    if not options.operator:
        results = {"versions": versions(), "operators": rows}
        save(RESULTS / f"operators_{options.precision}.json", results)
    off = {name: row for name, row in rows.items() if abs(row["difference"]) > SHOWN}
    table = [
        (
            name,
            f"{row['measured_mib']:.1f}",
            f"{row['simulated_mib']:.1f}",
            f"{row['difference']:+.1%}",
        )
        for name, row in off.items()
    ]
    print(markdown_table(("operator", "measured MiB", "simulated MiB", "difference"), table))
    print(f"{len(rows) - len(off)} of {len(rows)} operators within {SHOWN:.0%}")


def compare(operator: Operator, precision: str) -> dict[str, Any]:
    """The peak of a training step with an operator, in MiB, as measured and as simulated."""

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return operator(model(batch), model.indices, model.targets).float().mean()

    model, sample = Values(), torch.zeros(BATCH, 4)
    result = find_max_batch(
        model, sample, step=step, optimizer="sgd", device="cuda", precision=precision,
        min_batch_size=BATCH, max_batch_size=BATCH,
    )  # fmt: skip
    estimate = estimate_peak_memory(
        model, sample, step=step, optimizer="sgd", gpu="h100", precision=precision,
        batch_size=BATCH,
    )  # fmt: skip
    measured = result.probes[-1].peak_allocated_bytes
    if not result.batch_size or measured is None:
        sys.exit(f"the step did not run: {result.probes[-1].note}")
    simulated = estimate.peak_allocated_bytes
    return {
        "measured_mib": round(measured / 2**20, 3),
        "simulated_mib": round(simulated / 2**20, 3),
        "difference": round(simulated / measured - 1, 5),
    }


if __name__ == "__main__":
    main()
