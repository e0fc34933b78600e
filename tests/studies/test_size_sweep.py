"""Many example sizes in few probes, without a device and on the CPU."""

from __future__ import annotations

import dataclasses
import math
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeProber
from torch import nn

from batchfinder.errors import BatchFinderWarning, SampleError, UsageError, UserCodeError
from batchfinder.estimator import estimate_max_batch
from batchfinder.probing.options import ProbeOptions
from batchfinder.reporting.sweeps import paste_lines
from batchfinder.results.probe import Outcome, Probe
from batchfinder.search.bounds import ALL_SIZES, Bounds
from batchfinder.search.run import run_search
from batchfinder.studies.size_sweep import SizeSweep
from batchfinder.studies.sweep import sweep_max_batch
from batchfinder.studies.sweep_result import Sweep, SweepRow
from batchfinder.studies.sweep_values import combinations, mixed_percent
from batchfinder.training.setup import TrainingSetup

LENGTHS = (128, 256, 384, 512, 768, 1024, 1536, 2048)
BUDGET = 24 * 2**30


def prober(x: float, **changes: Any) -> FakeProber:
    """A device on which an example has a linear and a quadratic part, as in a transformer."""
    each = 40_000 * x + 40 * x * x
    options = {"budget_bytes": BUDGET, "fixed_bytes": 2**30, "bytes_per_sample": each}
    return FakeProber(**{**options, **changes})


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"fragmentation": 0.04},
        {"noise": 0.004, "seed": 3},
        {"confirm_extra": 0.01},
        {"is_repeatable": False, "noise": 0.01, "seed": 1},
    ],
    ids=str,
)
def test_eight_lengths_take_few_probes_and_end_where_a_search_of_their_own_does(
    kind: dict[str, Any],
) -> None:
    finder = SizeSweep(ALL_SIZES)
    counts = []
    for x in (2048, 128, 512, 256, 384, 1024, 768, 1536):
        device = prober(x, **kind)
        answer = finder.find(device, x)
        counts.append(len(answer.probes))
        assert answer.batch_size in device.confirmed
        alone = run_search(prober(x, **kind)).batch_size
        # Where readings differ from run to run, so do the answers of two searches.
        least = min(math.floor(alone * (0.95 if device.is_repeatable else 0.9)), alone - 1)
        assert least <= answer.batch_size, (x, answer.batch_size, alone)
        assert answer.batch_size <= math.ceil(alone * 1.05) + 1
    # The first is a search like any other, which may be long where memory is fragmented.
    assert min(counts[0], 6) + sum(counts[1:]) <= 20


@pytest.mark.parametrize("lost", [0.1, 0.15, 0.2, 0.25, 0.3])
def test_where_more_memory_is_lost_than_elsewhere_the_answer_is_as_close(lost: float) -> None:
    finder = SizeSweep(ALL_SIZES)
    finder.find(prober(2048), 2048)
    kind = {"fragmentation": lost, "bytes_per_sample": 480_000_000}
    answer = finder.find(prober(1024, **kind), 1024).batch_size
    assert answer >= 0.95 * run_search(prober(1024, **kind)).batch_size


def test_a_size_that_tells_nothing_has_a_search_of_its_own() -> None:
    finder = SizeSweep(ALL_SIZES)
    for each in (10, 30):
        alone = run_search(FakeProber(bytes_per_sample=each)).batch_size
        assert finder.find(FakeProber(bytes_per_sample=each), None).batch_size == alone


def test_bounds_hold_and_nothing_may_fit() -> None:
    finder = SizeSweep(Bounds.of(8, 64, 8))
    assert finder.find(prober(128), 128).batch_size == 64
    assert finder.find(prober(2048), 2048).batch_size % 8 == 0
    device = prober(2**17)
    assert finder.find(device, 2**17).batch_size == 0
    assert all(size % 8 == 0 and 8 <= size <= 64 for size in device.sizes)


def build(seq_len: int, depth: int = 1) -> tuple[nn.Module, Any]:
    if seq_len > 4096:
        raise ValueError(f"at most 4096 positions, not {seq_len}")
    layers = [nn.Linear(16, 16) for _ in range(depth)]
    return nn.Sequential(*layers), (torch.randn(2, seq_len, 16), torch.randn(2, seq_len, 16))


def test_estimates_are_those_of_each_value() -> None:
    sweep = sweep_max_batch(build, {"seq_len": [64, 256]}, gpu="t4", memory_limit="3GiB")
    for row in sweep.rows:
        alone = estimate_max_batch(*build(row.values["seq_len"]), gpu="t4", memory_limit="3GiB")
        assert row.batch_size == alone.batch_size
        assert row.elements == 2 * 16 * row.values["seq_len"]
    assert sweep.max_tokens == min(row.batch_size * (row.length or 0) for row in sweep.rows)
    data = sweep.to_dict()
    assert [row["seq_len"] for row in data["rows"]] == [64, 256]
    assert not sweep.is_measured


def test_on_the_device_every_size_is_confirmed_in_the_order_given() -> None:
    sweep = sweep_max_batch(build, {"seq_len": [8, 4]}, device="cpu", max_batch_size=4)
    assert [row.values["seq_len"] for row in sweep.rows] == [8, 4]
    assert all(row.batch_size == 4 and row.confirmed_steps >= 6 for row in sweep.rows)


@pytest.mark.parametrize("failing", [8, 0])
def test_the_model_of_a_value_is_gone_before_the_next_one_is_built(failing: int) -> None:
    models: list[weakref.ref[nn.Module]] = []
    alive = []

    def build(length: int) -> Any:
        alive.append(sum(model() is not None for model in models))
        model, sample = nn.Linear(4, 4), torch.randn(2, length, 3 if length == failing else 4)
        models.append(weakref.ref(model))
        return model, (sample, sample)

    sweep_max_batch(build, {"length": [2, 4, 8]}, device="cpu", max_batch_size=2)
    assert alive == [0, 0, 0, 0]  # the last model trains on all lengths in turn


def test_a_value_that_the_target_rejects_says_why_and_the_others_go_on() -> None:
    over = {"seq_len": [64, 8192], "depth": [1, 2]}
    sweep = sweep_max_batch(build, over, gpu="t4", max_batch_size=8)
    assert [row.batch_size for row in sweep.rows] == [8, 8, 0, 0]
    assert sweep.rows[2].note == "ValueError: at most 4096 positions, not 8192"
    assert sweep.max_tokens is None
    assert sweep.buckets == {}


def test_if_every_value_is_rejected_the_first_error_is_raised() -> None:
    with pytest.raises(ValueError, match="not 8192"):
        sweep_max_batch(build, {"seq_len": [8192, 9000]}, gpu="t4")


def test_if_no_value_trains_on_the_device_the_first_error_is_raised() -> None:
    def build(width: int) -> Any:
        return torch.nn.Linear(8, width), torch.randn(2, 4)

    with pytest.raises(UserCodeError, match="mat1 and mat2 shapes cannot be multiplied"):
        sweep_max_batch(build, {"width": [2, 3]}, device="cpu", max_batch_size=4)


def test_make_batch_may_take_the_argument() -> None:
    def make_batch(batch_size: int, *, length: int) -> Any:
        return torch.randn(batch_size, length, 16), torch.randn(batch_size, length, 16)

    sweep = sweep_max_batch(
        nn.Linear(16, 16), {"length": [32, 64]}, make_batch=make_batch, gpu="t4", max_batch_size=16
    )
    assert [row.elements for row in sweep.rows] == [1024, 2048]
    with pytest.raises(UsageError, match="takes no argument lenght; did you mean length"):
        sweep_max_batch(nn.Linear(1, 1), {"lenght": [1]}, make_batch=make_batch, gpu="t4")
    with pytest.raises(UsageError, match="nothing takes the argument length"):
        sweep_max_batch(nn.Linear(1, 1), {"length": [1]}, gpu="t4")


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({}, "over one or two arguments, not 0"),
        ({"a": [1], "b": [1], "c": [1]}, "not 3"),
        ({"a": []}, "a has no values"),
        ({"a": "512"}, "a needs a list of values, not '512'"),
        ({"a": 512}, "a needs a list of values, not 512"),
        ({"a": [1, 1]}, "a has a value twice"),
        ({"batch_size": [1, 2]}, "a sweep finds the batch_size"),
    ],
)
def test_values_that_make_no_sweep_are_refused(over: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        combinations(over)


@pytest.mark.parametrize("values", [np.arange(2, 4), [np.int64(2), torch.tensor(3)]])
def test_numbers_of_arrays_become_plain_ones(values: Any) -> None:
    assert repr(combinations({"a": values})) == "[{'a': 2}, {'a': 3}]"


def swept(*rows: tuple[int, int], elements: int = 2) -> Sweep:
    found = [
        SweepRow(
            {"seq_len": n}, size, (Probe(size, Outcome.FITS, 3, 1.0, confirmed=True),), elements * n
        )
        for n, size in rows
    ]
    return Sweep(("seq_len",), "fake", 1000, True, tuple(found))


def test_a_notebook_shows_a_line_for_each_value() -> None:
    sweep = swept((512, 96), (1024, 0))
    lines = "  seq_len=512: batch size 96", "  seq_len=1024: nothing fits"
    assert repr(sweep) == "\n".join(["<Sweep: measured on fake", *lines]) + ">"


def test_a_budget_of_tokens_is_safe_for_all_lengths() -> None:
    sweep = swept((512, 96), (1024, 44), (2048, 19))
    assert sweep.max_tokens == 19 * 2048
    assert all(sweep.max_tokens // length <= size for length, size in sweep.buckets.items())
    assert sweep.buckets == {512: 96, 1024: 44, 2048: 19}
    assert str(sweep.buckets) == "{512: 96, 1024: 44, 2048: 19}", "to paste"
    assert swept((512, 96), (1024, 0)).max_tokens is None
    for one in (swept((512, 96)), swept((512, 96), (1024, 0))):  # may be no length but a width
        assert (one.max_tokens, one.buckets) == (None, {})


def test_lines_to_paste_hold_where_a_training_mixes_the_lengths() -> None:
    alone = swept((512, 96), (2048, 19))
    assert paste_lines(alone)[0].startswith("# For each length alone.")
    mixed = dataclasses.replace(alone, mixed_percent=80)
    assert mixed.buckets == {512: 76, 2048: 15}
    assert mixed.max_tokens == 15 * 2048
    assert paste_lines(mixed)[0].startswith(f"max_tokens = {15 * 2048}  #")
    assert paste_lines(mixed)[0].endswith("at any length from 512 to 2048")
    assert paste_lines(dataclasses.replace(alone, mixed_percent=0)) == []


def test_on_the_device_steps_of_all_lengths_are_tried_in_turn(tmp_path: Path) -> None:
    log = tmp_path / "lengths"  # in a file, because what a model can reach is restored

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with log.open("a") as file:
                file.write(f"{x.shape[1]} ")
            return super().forward(x)

    def make_batch(batch_size: int, *, length: int) -> Any:
        return torch.randn(batch_size, length, 16), torch.randn(batch_size, length, 16)

    over = {"length": [4, 8]}
    sweep = sweep_max_batch(
        Watched(16, 16), over, make_batch=make_batch, device="cpu", max_batch_size=4
    )
    assert sweep.mixed_percent == 100
    assert "8 4 8 4 8 4" in log.read_text()


def test_a_model_made_for_one_length_has_no_training_that_mixes_them() -> None:
    def build(seq_len: int) -> Any:
        return nn.Linear(seq_len, seq_len), torch.randn(2, seq_len)

    with pytest.warns(BatchFinderWarning, match="in turn, by the model of the longest, failed"):
        sweep = sweep_max_batch(build, {"seq_len": [4, 8]}, device="cpu", max_batch_size=4)
    assert (sweep.mixed_percent, sweep.max_tokens) == (None, 16)
    assert "mat1 and mat2 shapes cannot be multiplied" in sweep.warnings[-1]


def test_an_error_that_is_no_step_of_the_user_is_not_swallowed_where_lengths_mix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> Any:
        raise LookupError("a fault of this package")

    monkeypatch.setattr("batchfinder.studies.sweep_values.choose_prober", fail)
    setup = TrainingSetup(nn.Linear(4, 4), torch.zeros(2, 4))
    with pytest.raises(LookupError, match="a fault of this package"):
        mixed_percent(lambda: setup, [], ProbeOptions(device="cpu"))


def test_a_length_that_does_not_fit_says_why_there_is_no_budget_of_tokens() -> None:
    sweep = swept((512, 96), (1024, 44), (2048, 0))
    assert sweep.why_no_max_tokens == (
        "there is no max_tokens for all lengths, as nothing trains at seq_len=2048"
    )
    assert swept((512, 96), (1024, 44)).why_no_max_tokens == ""
    depths = dataclasses.replace(sweep, over=("depth",), rows=tuple(
        dataclasses.replace(row, elements=8.0) for row in sweep.rows
    ))  # fmt: skip
    assert (depths.why_no_max_tokens, depths.buckets) == ("", {})  # a depth is no length


def test_an_error_of_the_target_itself_is_raised_at_the_first_value() -> None:
    rows: list[SweepRow] = []
    with pytest.raises(SampleError, match="there is no example batch"):
        sweep_max_batch(
            lambda width: nn.Linear(width, width), {"width": [2, 4]}, gpu="t4", on_row=rows.append
        )
    assert rows == []


def test_a_label_for_each_text_leaves_a_budget_of_tokens() -> None:
    rows = [SweepRow({"words": n}, 1024 // n, (), n + 1.0) for n in (32, 64, 128)]
    assert Sweep(("words",), "fake", 1000, True, tuple(rows)).max_tokens == 1024


def test_images_by_their_side_have_no_budget_of_tokens() -> None:
    rows = [SweepRow({"side": n}, 8, (), 3.0 * n * n) for n in (32, 64)]
    assert Sweep(("side",), "fake", 1000, True, tuple(rows)).max_tokens is None
