"""What a search starts from: made in this process, or in a fork beside the steps."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from processes import PATIENCE_SECONDS
from torch import Tensor, nn

from batchfinder.cli.find import ESTIMATE
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.child import serve_fork
from batchfinder.probing.workers.fork import ForkedProcess
from batchfinder.probing.workers.process import WorkerProcess
from batchfinder.probing.workers.setup_source import SetupSource
from batchfinder.probing.workers.worker import EstimateOrder, Order
from batchfinder.search.bounds import ALL_SIZES
from batchfinder.simulation.starting_estimate import starting_estimate
from batchfinder.training.setup import TrainingSetup
from batchfinder.units import GIB

DEVICE = "cuda:0 NVIDIA H200"
BUDGET = 2 * GIB
BOUNDS = ALL_SIZES
TARGET = """
import torch
from torch import nn

def build_model():
    print("a target may say what it likes")
    {statement}
    return nn.Linear(1024, 1024)

def build_sample():
    return torch.randn(2, 1024), torch.randn(2, 1024)
"""


def guess_of(folder: Path, statement: str) -> tuple[int | None, list[str]]:
    target = folder / "own_target.py"
    target.write_text(TARGET.format(statement=statement), encoding="utf-8")
    source = SetupSource(f"{target}:build_model", optimizer="sgd")
    estimate = EstimateOrder(ESTIMATE, BOUNDS)
    order = asdict(Order(ProbeOptions(), estimate=estimate))
    place = {"device": DEVICE, "budget_bytes": BUDGET}
    fork = WorkerProcess(show_output=False, forked=ForkedProcess(partial(serve_fork, None)))
    try:
        fork.send({"id": 1, "source": source.to_dict(), **order, "place": place})
        answer = fork.receive(PATIENCE_SECONDS)
    finally:
        fork.kill()
    return answer["batch_size"], answer["notes"]


def test_a_fork_guesses_the_same(tmp_path: Path) -> None:
    sample = torch.randn(2, 1024), torch.randn(2, 1024)
    setup = TrainingSetup(nn.Linear(1024, 1024), sample, optimizer="sgd")
    expected = starting_estimate(setup, ProbeOptions(), DEVICE, BUDGET, BOUNDS)

    assert guess_of(tmp_path, "pass") == expected
    assert expected[0] is not None


def test_a_model_that_does_more_in_a_large_batch_is_guessed_from_small_ones() -> None:
    made = []

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).unsqueeze(2).expand(-1, -1, 1 << 14).exp()
            return y.relu() if len(x) > 4 else y

    def make_batch(batch_size: int) -> Tensor:
        made.append(batch_size)
        return torch.zeros(batch_size, 8)

    setup = TrainingSetup(
        Model(8, 8), make_batch=make_batch, loss_fn=lambda output, batch: output.mean()
    )
    guess, _ = starting_estimate(setup, ProbeOptions(), DEVICE, BUDGET, BOUNDS)

    assert guess is not None
    assert guess > 64
    assert max(made) <= 16 * guess


def test_a_layer_that_needs_two_examples_is_guessed_from_two() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024))
    setup = TrainingSetup(model, (torch.randn(2, 1024), torch.randn(2, 1024)), optimizer="sgd")
    guess, notes = starting_estimate(setup, ProbeOptions(), DEVICE, BUDGET, BOUNDS)

    assert guess is not None
    assert notes == []


def test_code_that_does_not_load_leaves_no_guess(tmp_path: Path) -> None:
    guess, notes = guess_of(tmp_path, "raise ValueError('no such width')")

    assert guess is None
    assert notes == ["the search started without an estimate: ValueError: no such width"]


def test_what_an_optimizer_has_gathered_makes_no_difference() -> None:
    """As it is after the first probe in this process, where its states may lie on a GPU."""
    model, sample = nn.Linear(1024, 1024), (torch.randn(2, 1024), torch.randn(2, 1024))
    optimizer = torch.optim.AdamW(model.parameters())
    setup = TrainingSetup(model, sample, optimizer=optimizer)
    before = starting_estimate(setup, ProbeOptions(), DEVICE, BUDGET, BOUNDS)
    model(sample[0]).sum().backward()
    optimizer.step()

    after = starting_estimate(setup, ProbeOptions(), DEVICE, BUDGET, BOUNDS)

    assert after == before
    assert len(optimizer.state) == 2
