"""Strategies side by side, on a simulated GPU and on the CPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from studies.test_checkpointing import Stack
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from batchfinder.errors import UsageError
from batchfinder.estimator import estimate_max_batch
from batchfinder.reporting.comparison import comparison_table, marked_rows
from batchfinder.results.accumulation import plan_accumulation
from batchfinder.results.memory_model import MemoryModel, Phase, PhaseModel
from batchfinder.results.probe import Outcome, Probe
from batchfinder.results.result import BatchSizeResult, Status
from batchfinder.studies.compare import compare_strategies
from batchfinder.studies.comparison import Comparison, StrategyRow
from batchfinder.studies.strategies import parse_strategy

SAMPLE = torch.randn(4, 8), torch.randn(4, 1)


def row_of(comparison: Comparison, name: str) -> StrategyRow:
    return next(row for row in comparison.rows if row.strategy.name == name)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    texts = ["bf16", "fp16", "checkpointing", "adamw-fused", "sgd", "checkpointing+sgd", "fsdp"]
    return compare_strategies(
        Stack(), SAMPLE, gpu="t4", strategies=texts, world_size=8, memory_limit="3GiB"
    )


def test_the_first_row_changes_nothing(comparison: Comparison) -> None:
    alone = estimate_max_batch(Stack(), SAMPLE, gpu="t4", memory_limit="3GiB")
    assert comparison.rows[0].strategy.name == "as it is"
    assert comparison.rows[0].batch_size == alone.batch_size
    assert comparison.rows[0].peak_bytes == alone.peak_bytes


@pytest.mark.parametrize(("name", "optimizer"), [("sgd", "momentum"), ("adamw-fused", "fused")])
def test_shared_traces_give_what_traces_of_their_own_give(
    comparison: Comparison, name: str, optimizer: str
) -> None:
    make: Callable[[Any], Any] = {
        "momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
        "fused": lambda p: torch.optim.AdamW(p, fused=True),
    }[optimizer]
    alone = estimate_max_batch(Stack(), SAMPLE, gpu="t4", optimizer=make, memory_limit="3GiB")
    row = row_of(comparison, name)
    assert (row.batch_size, row.peak_bytes) == (alone.batch_size, alone.peak_bytes)
    assert row.terms == alone.explanation.terms


def test_traces_with_another_optimizer_are_not_taken_for_those_without() -> None:
    given: dict[str, Any] = {"gpu": "t4", "memory_limit": "3GiB"}
    both = compare_strategies(Stack(), SAMPLE, strategies=["bf16+sgd", "bf16"], **given)
    alone = compare_strategies(Stack(), SAMPLE, strategies=["bf16"], **given)
    assert row_of(both, "bf16").terms == row_of(alone, "bf16").terms


def test_each_lever_does_what_it_is_for(comparison: Comparison) -> None:
    base = comparison.rows[0]
    assert row_of(comparison, "checkpointing").batch_size > base.batch_size
    states = {row.strategy.name: row.model_state_bytes or 0 for row in comparison.rows}
    assert states["sgd"] < states["as it is"]
    weights = sum(p.numel() * p.element_size() for p in Stack().parameters())
    assert states["as it is"] >= 4 * weights  # with the gradients, wherever the peak is
    assert states["fsdp"] < states["as it is"]
    assert row_of(comparison, "fsdp").world_size == 8
    assert comparison.largest in comparison.rows
    assert comparison.fastest is None


def test_a_notebook_shows_a_line_for_each_row(comparison: Comparison) -> None:
    first, second, *_ = comparison.rows
    shown = repr(comparison).splitlines()
    assert shown[0] == "<Comparison: estimated on T4"
    assert shown[1:3] == [f"  {first}", f"  bf16: batch size {second.batch_size}"]
    assert len(shown) == 1 + len(comparison.rows)


def test_everything_is_json(comparison: Comparison) -> None:
    data = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert comparison.largest is not None
    assert data["largest"] == comparison.largest.strategy.name
    assert data["rows"][3]["blocks"] == "3 x Block (blocks.0 to blocks.2)"
    assert data["rows"][1]["result"]["batch_size"] == data["rows"][1]["batch_size"]


def test_what_is_impossible_says_why_once_below_the_table() -> None:
    model = nn.Linear(8, 1)
    texts = ["checkpointing", "sgd", "bf16+checkpointing"]
    comparison = compare_strategies(model, SAMPLE, gpu="t4", strategies=texts, max_batch_size=64)
    assert "no repeated blocks" in row_of(comparison, "checkpointing").note
    assert row_of(comparison, "sgd").batch_size == 64
    _, _, _, without, _, other, *reasons = comparison_table(comparison, width=100)
    assert without.endswith("impossible")
    assert other.endswith("impossible")
    assert [reason.partition(":")[0] for reason in reasons] == [
        "checkpointing, bf16 + checkpointing"
    ]


def test_checkpointing_that_changes_nothing_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    comparison = compare_strategies(
        model, SAMPLE, gpu="t4", strategies=["checkpointing"], memory_limit="3GiB"
    )
    assert "saves nothing here" in comparison.rows[1].note


class Checkpointed(Stack):
    """A model with checkpointing of its own, under the name that Transformers gives its flag."""

    gradient_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = (
                checkpoint(block, x, use_reentrant=False)
                if self.gradient_checkpointing
                else block(x)
            )
        out: Tensor = self.head(x)
        return out


def test_where_checkpointing_is_on_a_row_tells_what_it_saves() -> None:
    model = Checkpointed().to(torch.bfloat16)
    model.gradient_checkpointing = True
    sample = tuple(each.bfloat16() for each in SAMPLE)
    comparison = compare_strategies(model, sample, gpu="t4", memory_limit="3GiB")
    assert comparison.base == "bf16 parameters, AdamW, checkpointing"
    names = [row.strategy.name for row in comparison.rows]
    assert "checkpointing" not in names
    assert "bf16 + adafactor" in names
    without, base = row_of(comparison, "no-checkpointing"), comparison.rows[0]
    assert (without.per_sample_bytes or 0) > 1.2 * (base.per_sample_bytes or 0)
    assert not without.note
    assert model.gradient_checkpointing


def test_checkpointing_that_is_not_on_cannot_be_turned_off() -> None:
    comparison = compare_strategies(Stack(), SAMPLE, gpu="t4", strategies=["no-checkpointing"])
    assert comparison.rows[1].note == (
        "neither the model nor its Trainer has turned checkpointing on. Try checkpointing."
    )


def test_a_row_says_that_an_older_pytorch_lacks_its_strategy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.utils.checkpoint, "CheckpointPolicy")
    monkeypatch.delattr(torch.optim, "Adafactor")
    strategies = ["selective-checkpointing", "adafactor"]
    _, *rows = compare_strategies(Stack(), SAMPLE, gpu="t4", strategies=strategies).rows
    assert [row.strategy.name for row in rows] == strategies
    assert all("needs PyTorch 2.5 or newer" in row.note for row in rows)


def test_the_users_error_in_the_first_row_is_raised() -> None:
    def loss(output: Tensor, batch: Any) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        compare_strategies(Stack(), SAMPLE, gpu="t4", loss_fn=loss)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either estimate or measure"),
        ({"gpu": "t4", "measure": True}, "either estimate or measure"),
        ({"gpu": "t4", "strategies": ["bf16+fsdp"]}, "bf16 [+] fsdp needs several ranks"),
        ({"gpu": "t4", "world_size": 0}, "the world size must be at least 1"),
        ({"gpu": "t4", "global_batch_size": 0}, "the global batch size must be at least 1"),
        ({"gpu": "t4", "strategies": ["bf17"]}, "did you mean"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compare_strategies(Stack(), SAMPLE, **options)


def test_on_the_device_every_row_is_confirmed_and_timed() -> None:
    comparison = compare_strategies(
        Stack(), SAMPLE, measure=True, device="cpu", max_batch_size=8,
        strategies=["checkpointing", "ddp"], world_size=2, global_batch_size=64,
    )  # fmt: skip
    for row in comparison.rows[:2]:
        assert row.result is not None
        assert row.result.confirmed_steps >= 6
        assert row.samples_per_second
        assert row.split is not None
        assert row.split.gradient_accumulation_steps == 8
    uneven = compare_strategies(
        Stack(), SAMPLE, measure=True, device="cpu", max_batch_size=8, strategies=["sgd"],
        global_batch_size=12,
    )  # fmt: skip
    for row in uneven.rows:
        assert row.result is not None
        sizes = [probe.batch_size for probe in row.result.probes if len(probe.steps_seconds) > 1]
        assert row.split is not None
        assert row.split.batch_size == 6
        assert 6 in sizes, "the fastest at a global batch is timed at its own size"
    assert "torchrun --nproc-per-node 2" in comparison.rows[2].note
    assert comparison.fastest in comparison.rows[:2]


def result_of(*steps: tuple[int, float]) -> BatchSizeResult:
    probes = tuple(
        Probe(n, Outcome.FITS, 3, 9 * s, 3 * n, steps_seconds=(7 * s, s, s), confirmed=True)
        for n, s in steps
    )
    model = MemoryModel({Phase.FORWARD_BACKWARD: PhaseModel(100, 10)})
    size = max(n for n, _ in steps)
    return BatchSizeResult(size, Status.FOUND, "fake", 1000, probes, model, None, 3, 5.0, 1.0, {})


def test_the_fastest_at_a_global_batch_is_not_the_largest() -> None:
    rows = []
    for name, steps in (("base", ((8, 0.8), (16, 1.6))), ("checkpointing", ((8, 1.0), (64, 8.0)))):
        result = result_of(*steps)
        plan = plan_accumulation(64, result.batch_size)
        rows.append(StrategyRow(parse_strategy(name), result, plan=plan))
    comparison = Comparison("fake", 1000, True, tuple(rows), 64)
    assert comparison.largest is rows[1]
    assert comparison.fastest is rows[0]
    assert [row.split_seconds for row in rows] == pytest.approx([6.4, 8.0])
    assert rows[0].samples_per_second == pytest.approx(10)
    assert rows[0].seconds_per_1000_samples == pytest.approx(100)


def test_a_single_step_and_the_second_batch_of_a_step_do_not_count_as_slow() -> None:
    accumulated = Probe(16, Outcome.FITS, 3, 9.0, 96, steps_seconds=(9.0, 3.2, 3.2))
    compiling = Probe(8, Outcome.FITS, 1, 40.0, 16, steps_seconds=(40.0,))
    result = dataclasses.replace(result_of((16, 1.6)), probes=(compiling, accumulated))
    row = StrategyRow(parse_strategy("compile"), result, plan=plan_accumulation(32, 16))
    assert row.samples_per_second == pytest.approx(10)
    assert row.split_seconds == pytest.approx(3.2)


def test_a_fast_rate_is_a_plain_number() -> None:
    row = StrategyRow(parse_strategy("base"), result_of((27, 0.01)))
    assert " 2,700 " in comparison_table(Comparison("fake", 1000, True, (row,)))[2]


def test_the_equation_is_that_of_the_row_marked_as_the_largest() -> None:
    terms = {"parameters": 100}
    states = {"base": 9, "bf16": 9, "bf16+sgd": 3, "sgd": 3}
    rows = [
        StrategyRow(parse_strategy(name), result_of((8, 1.0)), terms, model_state_bytes=held)
        for name, held in states.items()
    ]
    comparison = Comparison("fake", 1000, False, tuple(rows))
    assert marked_rows(comparison) == [rows[0], comparison.largest] == [rows[0], rows[2]]
