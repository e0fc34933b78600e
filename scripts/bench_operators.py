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
from typing import Any

import torch
from bench_case import RESULTS, markdown_table, save
from peak_comparison import compared, in_a_fork
from torch import Tensor, nn
from training_operators import BATCH, COLUMNS, ONLY_FP32, OPERATORS, ROWS

from batchfinder import TrainingSetup
from batchfinder.probing.devices.versions import versions

SHOWN = 0.01  # of the peak; what is further off is printed


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


def main() -> None:
    """Compare every operator, and end with those that differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--operator", choices=OPERATORS, action="append")
    options = parser.parse_args()
    torch.backends.cudnn.enabled = False  # what the counting runtime has not
    names = options.operator or [
        name for name in OPERATORS if options.precision == "fp32" or name not in ONLY_FP32
    ]
    rows = {name: in_a_fork(compare, name, options.precision) for name in names}
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


def compare(name: str, precision: str) -> dict[str, Any]:
    """The peak of a training step with an operator, in MiB, as measured and as simulated."""
    operator = OPERATORS[name]

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return operator(model(batch), model.indices, model.targets).float().mean()

    setup = TrainingSetup(Values(), torch.zeros(BATCH, 4), step=step, optimizer="sgd")
    return compared(setup, precision, BATCH)


if __name__ == "__main__":
    main()
