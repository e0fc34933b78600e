"""From a question to an answer: on paper, on the CPU's real memory, in this process and others."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeProber
from hypothesis import given
from processes import idle_bytes
from strategies import fake_probers, search_bounds
from targets.models import build_small
from torch import nn
from warm import run_warm, start_command

from batchfinder import (
    BatchFinderWarning,
    BatchSizeResult,
    Outcome,
    Phase,
    Probe,
    Status,
    TrainingSetup,
    estimate_max_batch,
    find_max_batch,
)
from batchfinder.errors import BatchTooSmallError, UsageError, UserCodeError, WorkerError
from batchfinder.probing.options import ProbeOptions
from batchfinder.reporting.answer import details
from batchfinder.results.probe import FORESEEN_NOTE, IN_VALIDATION, LEAK_WARNING, SHORT_LIVED_NOTE
from batchfinder.results.result import NextFailure
from batchfinder.search.bounds import Bounds
from batchfinder.search.conclusion import conclude, memory_model_of, stopped_early
from batchfinder.search.head_start import Guess, HeadStart
from batchfinder.search.run import run_search
from batchfinder.simulation.starting_estimate import starting_estimate

TARGETS = Path(__file__).parent / "targets"
MIB = 2**20


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1024, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y * 2 if y.sum().item() > 0 else y


# On paper.


def test_the_answer_comes_with_its_evidence() -> None:
    prober = FakeProber(warnings=("look out",))
    result = run_search(prober)
    assert (result.batch_size, result.status) == (90, Status.FOUND)
    assert [probe.batch_size for probe in result.probes] == prober.sizes
    assert result.probes[-1].confirmed
    assert result.confirmed_steps == 3
    assert result.next_failure is not None
    assert (result.next_failure.batch_size, result.next_failure.outcome) == (91, Outcome.OOM)
    assert result.memory_model is not None
    assert (result.memory_model.fixed_bytes, result.memory_model.per_sample_bytes) == (100, 10)
    assert (result.device, result.budget_bytes) == (prober.device, prober.budget_bytes)
    assert result.warnings == ("look out",)
    samples = sum(probe.samples for probe in result.probes)
    assert result.cost_full_size_steps == round(samples / 90, 2)


def test_where_readings_repeat_the_answer_is_exact_on_any_device() -> None:
    result = run_search(FakeProber(budget_bytes=10_000, is_repeatable=False))
    assert (result.batch_size, result.next_failure and result.next_failure.batch_size) == (990, 991)
    assert (result.warnings, result.notes) == ((), ())


def test_memory_outside_the_allocator_is_a_note() -> None:
    prober = FakeProber(budget_bytes=10_000)
    probe = prober.probe
    prober.probe = lambda *args, **options: dataclasses.replace(  # type: ignore[method-assign]
        probe(*args, **options), outside_bytes=300 * 2**20
    )
    result = run_search(prober)
    (note,) = result.notes
    assert note.startswith("outside PyTorch's allocator, 300.0 MiB of the device were in use")


def test_sizes_that_cannot_be_told_apart_are_named() -> None:
    result = run_search(FakeProber(budget_bytes=10_000, is_repeatable=False, noise=0.02))
    assert result.next_failure is not None
    answer, failure = result.batch_size, result.next_failure.batch_size
    assert failure - answer > 1
    assert (result.warnings, result.notes) == (
        (),
        (
            f"sizes between {answer} and {failure} fit in some runs only: memory varies from run "
            "to run on this device",
        ),
    )


def test_where_the_allocator_is_fragmented_the_sizes_left_out_are_named() -> None:
    result = run_search(FakeProber(budget_bytes=10_000, reserved_extra=0.02))
    assert result.next_failure is not None
    assert result.next_failure.batch_size - result.batch_size > 1
    (note,) = result.notes
    assert note.startswith(
        f"sizes between {result.batch_size} and {result.next_failure.batch_size} were not tried: "
        "the allocator's memory is fragmented there"
    )


@pytest.mark.parametrize("records", [True, False])
def test_memory_left_free_for_steps_that_differ_is_named(records: bool) -> None:
    """Replays leave it free. On the CPU and on several ranks there are none."""
    prober = FakeProber(budget_bytes=10_000, recordings={} if records else None)
    probe = prober.probe
    prober.probe = lambda *args, **options: dataclasses.replace(  # type: ignore[method-assign]
        probe(*args, **options), steps_differ=True
    )
    notes = [note for note in run_search(prober).notes if "request different memory" in note]
    assert len(notes) == records


def guess_if(guess: Guess | None) -> Callable[[int], Guess | None]:
    """The guess, if it is as large as asked for."""
    return lambda at_least: guess if guess and guess.size >= at_least else None


@pytest.mark.parametrize(
    ("device", "setting", "guess", "is_told"),
    [
        ("cuda:0 Paper", "", Guess(930), True),
        ("cuda:0 Paper", "", Guess(800), False),
        ("cuda:0 Paper", "", None, False),
        ("cuda:0 Paper", "max_split_size_mb:64, expandable_segments:True", Guess(930), False),
        ("cpu", "", Guess(930), False),
    ],
)
def test_expandable_segments_are_named_if_a_replay_shows_that_they_fit_more(
    device: str, setting: str, guess: Guess | None, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    prober = FakeProber(budget_bytes=10_000, reserved_extra=0.2, fragmentation=0.2, device=device)

    result = run_search(prober, head_start=HeadStart(expand=guess_if(guess)))

    hints = [warning for warning in result.warnings if "expandable_segments:True" in warning]
    assert [hint.partition(",")[0] for hint in hints] == is_told * [
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True would fit a batch of about 925"
    ]


def test_expandable_segments_are_not_named_if_the_validation_limits() -> None:
    """The replay of a script's steps said that twice the size would fit."""
    device = "cuda:0 Paper"
    prober = FakeProber(budget_bytes=10_000, reserved_extra=0.2, device=device, place=IN_VALIDATION)
    result = run_search(prober, head_start=HeadStart(expand=guess_if(Guess(2000))))
    assert result.next_failure
    assert result.next_failure.is_in_validation
    assert not result.warnings


@pytest.mark.parametrize(("multiple_of", "told"), [(20, ["920"]), (256, [])])
def test_only_a_size_that_may_be_tried_is_told_of(multiple_of: int, told: list[str]) -> None:
    prober = FakeProber(
        budget_bytes=10_000, reserved_extra=0.2, fragmentation=0.2, device="cuda:0 Paper"
    )
    head_start = HeadStart(expand=guess_if(Guess(930)))
    bounds = Bounds.of(multiple_of=multiple_of)
    result = run_search(prober, bounds=bounds, head_start=head_start)
    assert re.findall(r"about (\d+), as a replay", " ".join(result.warnings)) == told


@pytest.mark.parametrize(("size", "told"), [(910, []), (930, ["893"])])
def test_an_unsure_guess_under_expandable_segments_has_to_be_higher(
    size: int, told: list[str]
) -> None:
    prober = FakeProber(
        budget_bytes=10_000, reserved_extra=0.2, fragmentation=0.2, device="cuda:0 Paper"
    )
    guess = Guess(size, deviation=0.04)
    result = run_search(prober, head_start=HeadStart(expand=guess_if(guess)))
    assert 893 > 1.12 * result.batch_size > 0.96 * 910
    assert re.findall(r"about (\d+), as a replay", " ".join(result.warnings)) == told


def test_expandable_segments_are_named_if_an_example_is_a_fifth_of_the_budget() -> None:
    prober = FakeProber(
        budget_bytes=6000,
        bytes_per_sample=1000,
        fragmentation=0.1,
        reserved_extra=0.01,
        device="cuda:0 Paper",
    )
    result = run_search(prober, head_start=HeadStart(expand=guess_if(Guess(6))))
    assert result.batch_size == 5
    assert [warning for warning in result.warnings if "batch of about 6" in warning]


@pytest.mark.parametrize(
    ("grown_mib", "headroom_mib", "is_warned"),
    [(0, 400, False), (300, 400, False), (390, 400, True), (390, 0, False)],
)
def test_a_device_without_the_free_memory_that_was_meant_is_warned_of(
    grown_mib: int, headroom_mib: int, is_warned: bool
) -> None:
    """Libraries and kernels take more memory outside of the allocator after the first size."""
    capacity, context = 8192 * MIB, 450 * MIB
    prober = FakeProber(
        budget_bytes=capacity - context - headroom_mib * MIB,
        fixed_bytes=0,
        bytes_per_sample=MIB,
        capacity_bytes=capacity,
    )
    probe = prober.probe
    prober.probe = lambda size, **options: dataclasses.replace(  # type: ignore[method-assign]
        probe(size, **options), outside_bytes=context + (size > 1) * grown_mib * MIB
    )
    warnings = run_search(prober).warnings
    assert any("Try a larger headroom" in each for each in warnings) is is_warned


def test_a_budget_that_the_first_size_lowers_costs_no_more() -> None:
    prober, alike = FakeProber(10_000), FakeProber(8_000)
    probe = prober.probe

    def lowering(batch_size: int, *, confirm: bool = False) -> Probe:
        prober.budget_bytes = 8_000
        return probe(batch_size, confirm=confirm)

    prober.probe = lowering  # type: ignore[method-assign]
    result = run_search(prober)
    assert (result.batch_size, result.budget_bytes) == (790, 8_000)
    assert result.probes == run_search(alike).probes


def test_a_device_that_other_programs_fill_is_told_nothing_of_expandable_segments() -> None:
    """As where another program takes half of the device, or each step leaves something behind."""
    prober = FakeProber(budget_bytes=10_000, fragmentation=0.5, device="cuda:0 Paper")
    result = run_search(prober, head_start=HeadStart(expand=guess_if(Guess(930))))
    assert not [warning for warning in result.warnings if "expandable" in warning]


@pytest.mark.parametrize(
    ("device", "confirm_extra", "variable", "is_told"),
    [
        ("cpu", 0.1, "", True),
        ("cpu", 0.0, "", False),
        ("cpu", 0.1, "GLIBC_TUNABLES", False),
        ("cpu", 0.1, "LD_PRELOAD", False),
        ("cuda:0 Paper", 0.1, "", False),
    ],
)
def test_where_the_heap_wastes_much_a_setting_of_it_is_named(
    device: str,
    confirm_extra: float,
    variable: str,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "something")
    prober = FakeProber(confirm_extra=confirm_extra, device=device, is_repeatable=False)

    result = run_search(prober)

    hints = [note for note in result.notes if "GLIBC_TUNABLES=" in note]
    assert [hint.partition(",")[0] for hint in hints] == is_told * [
        "tensors leave holes in the heap"
    ]
    failed = min(probe.batch_size for probe in result.probes if not probe.fits)
    assert all(f"a size well above {failed} may train too" in hint for hint in hints)


def test_where_each_step_leaves_memory_behind_the_heap_is_not_blamed() -> None:
    prober = FakeProber(
        confirm_extra=0.1, device="cpu", is_repeatable=False, warnings=(LEAK_WARNING,)
    )
    result = run_search(prober)
    assert not [note for note in result.notes if "GLIBC_TUNABLES=" in note]


def head_start(model: nn.Module) -> HeadStart:
    sample = torch.randn(2, 1024), torch.randn(2, 1024)
    setup, options = TrainingSetup(model, sample, optimizer="sgd"), ProbeOptions()
    return HeadStart(partial(starting_estimate, setup, options))


def test_the_search_starts_from_the_estimate_and_says_how_good_it_was() -> None:
    # Each example takes more on paper than the inputs and outputs that are simulated.
    prober = FakeProber(budget_bytes=100 * MIB, fixed_bytes=9 * MIB, bytes_per_sample=13 * 1024)

    result = run_search(prober, head_start=head_start(nn.Linear(1024, 1024)))

    assert result.estimated_batch_size == prober.sizes[2]
    assert result.batch_size == 7168
    assert result.to_dict()["estimated_batch_size"] == result.estimated_batch_size
    assert details(result)[-1].startswith(f"The estimate, {prober.sizes[2]}, was ")


@pytest.mark.parametrize(
    ("device", "model", "why"),
    [
        ("cpu", nn.Linear(1024, 1024), "there is none for the CPU"),
        ("fake:0 Paper", Reads(), "the step reads a value of a tensor"),
    ],
)
def test_without_an_estimate_the_search_says_why(device: str, model: nn.Module, why: str) -> None:
    result = run_search(FakeProber(device=device), head_start=head_start(model))

    assert (result.batch_size, result.estimated_batch_size) == (90, None)
    assert why in result.warnings[0]


def test_a_replay_of_recorded_steps_knows_more_than_an_estimate() -> None:
    prober = FakeProber()

    def replay(_: Probe | None) -> Guess | None:
        return Guess(90) if len(prober.confirmed) > 1 else None

    start = HeadStart(lambda *_: (70, []), replay)
    result = run_search(prober, head_start=start)

    assert (result.batch_size, result.estimated_batch_size) == (90, 70)
    assert 70 not in prober.sizes
    assert sorted(prober.sizes)[-2:] == [90, 91]


def no_estimate(*_: object) -> tuple[int | None, list[str]]:
    raise RuntimeError("the user's code does not run without data")


@pytest.mark.parametrize("size", [88, 90, None])
def test_what_two_small_confirmations_tell_is_confirmed_next(size: int | None) -> None:
    prober = FakeProber()
    start = HeadStart(replay=lambda _: Guess(size) if size else None)

    result = run_search(prober, head_start=start)

    assert (result.batch_size, result.estimated_batch_size) == (90, None)
    assert prober.confirmed[0] < prober.confirmed[1] < 90 / 4
    assert size in (None, prober.confirmed[2])
    if size == 90:
        assert prober.sizes[3:] == [90, 91]


def test_a_size_of_which_the_requests_do_not_last_is_refused() -> None:
    prober = FakeProber()
    start = HeadStart(replay=lambda _: Guess(85), lasts=lambda size: size <= 80)

    result = run_search(prober, head_start=start)

    assert result.batch_size == 80
    assert result.next_failure is not None
    assert result.next_failure.reason == SHORT_LIVED_NOTE


def test_a_guess_that_a_failure_refutes_is_not_searched_around() -> None:
    """Memory grows with the square of the batch, which two small sizes do not show."""
    prober = FakeProber(budget_bytes=100_000, curve=lambda n: 100 + 300 * n + 20 * n * n)
    start = HeadStart(replay=lambda failed: None if failed else Guess(140, deviation=0.04))

    result = run_search(prober, head_start=start)

    assert result.batch_size == 63
    assert 140 in prober.sizes
    assert not [size for size in prober.sizes if 0.9 * 140 < size < 140]


def test_a_replay_that_runs_out_far_from_the_limit_is_no_error_to_check() -> None:
    """Its steps may leave much of the budget, and later steps of other lengths need it."""
    start = HeadStart(replay=lambda _: Guess(700), lasts=lambda size: size <= 600)

    result = run_search(FakeProber(budget_bytes=10_000, reserved_extra=0.02), head_start=start)

    assert result.next_failure is not None
    assert result.next_failure.reason == SHORT_LIVED_NOTE
    assert result.next_failure.batch_size - result.batch_size > 1
    assert result.warnings == ()


def test_a_failure_that_a_replay_foresees_does_not_run() -> None:
    prober = FakeProber()
    start = HeadStart(
        replay=lambda _: Guess(80), lasts=lambda size: size <= 80, foresee=lambda size: size > 80
    )

    result = run_search(prober, head_start=start)

    assert (result.batch_size, max(prober.sizes)) == (80, 80)
    assert result.next_failure == NextFailure(81, Outcome.OOM, FORESEEN_NOTE)
    assert result.probes[-1].steps == 0
    assert result.warnings == ()


@pytest.mark.parametrize(("largest_probe", "per_sample"), [(64, 20), (600, 10)])
def test_lines_come_from_probes_unless_all_were_small(
    largest_probe: int, per_sample: float
) -> None:
    """What an example adds shows less in small sizes, where the allocator rounds."""

    def fitted(size: int, peak: int, *, confirmed: bool = False) -> Probe:
        peaks = {Phase.FORWARD_BACKWARD: peak}
        return Probe(
            size, Outcome.FITS, 1, 0.0, phase_peak_bytes=peaks, confirmed=confirmed, samples=size
        )

    probes = [fitted(1, 10), fitted(largest_probe, 10 * largest_probe)]
    probes.append(fitted(1000, 20_000, confirmed=True))

    result = conclude(FakeProber(), probes, stopped_early(probes, Status.FOUND), seconds=1.0)

    assert result.memory_model is not None
    assert result.memory_model.per_sample_bytes == pytest.approx(per_sample, rel=0.05)


@dataclasses.dataclass
class NormalizingProber(FakeProber):
    """Needs two examples, and notes what is being handled while it runs."""

    handled: list[BaseException | None] = dataclasses.field(default_factory=list)

    def probe(self, batch_size: int, *, confirm: bool = False) -> Probe:
        self.handled.append(sys.exc_info()[1])
        if batch_size == 1:
            raise BatchTooSmallError("a layer needs more than 1 example")
        return super().probe(batch_size, confirm=confirm)


def test_a_search_from_two_examples_is_not_chained_to_the_failure_of_one() -> None:
    prober = NormalizingProber()
    assert run_search(prober).batch_size == 90
    assert set(prober.handled) == {None}
    with pytest.raises(BatchTooSmallError, match="more than 1 example"):
        run_search(NormalizingProber(), Bounds.of(1, 1))


@given(fake_probers(), search_bounds())
def test_the_result_is_the_size_that_was_confirmed(prober: FakeProber, bounds: Bounds) -> None:
    """Not a probe above it that ran, where only confirmations tell."""
    result = run_search(prober, bounds)
    if result.status is not Status.NOTHING_FITS:
        confirmed = [p for p in result.probes if p.confirmed and p.fits]
        assert (result.batch_size, result.confirmed_steps) in [
            (p.batch_size, p.steps) for p in confirmed
        ]


def test_a_probe_that_ran_above_the_confirmed_size_is_not_the_answer() -> None:
    prober = FakeProber(budget_bytes=10**9, is_repeatable=False)
    prober.curve = lambda size: 1e8 + 9e8 * (size / 647.5) * (0.7 + 0.3 * size / 647.5)
    prober.noise, prober.confirm_extra, prober.seed = 0.01, 0.02, 687
    result = run_search(prober)
    assert result.batch_size in prober.confirmed
    assert result.confirmed_steps == 3


def test_no_estimate_is_made_where_the_smallest_size_fails() -> None:
    start = HeadStart(no_estimate)

    result = run_search(FakeProber(fixed_bytes=2000), head_start=start)

    assert result.status is Status.NOTHING_FITS


def test_what_fits_whatever_the_size_is_capped() -> None:
    result = run_search(FakeProber(), Bounds.of(1, 32))
    assert (result.batch_size, result.status, result.next_failure) == (32, Status.CAPPED, None)


def test_nothing_fits() -> None:
    result = run_search(FakeProber(fixed_bytes=2000))
    assert (result.batch_size, result.status) == (0, Status.NOTHING_FITS)
    assert result.next_failure is not None
    assert result.next_failure.batch_size == 1
    assert (result.confirmed_steps, result.cost_full_size_steps) == (0, 0)


def test_a_failure_that_did_not_come_again_bounds_nothing() -> None:
    result = run_search(FakeProber(chance_failures={1}))
    assert (result.batch_size, result.status) == (90, Status.FOUND)
    assert result.next_failure is not None
    assert result.next_failure.batch_size == 91
    assert result.memory_model is not None
    assert result.memory_model.per_sample_bytes == 10


def test_lines_do_not_come_from_confirmations_of_nearly_the_same_size() -> None:
    """Where readings vary from run to run, the larger of two close sizes may need less."""
    peaks = {1: 407, 4: 414, 187: 640, 235: 918, 238: 885}
    probes = [
        Probe(size, Outcome.FITS, 1, 1.0, confirmed=size > 187,
              phase_peak_bytes={Phase.FORWARD_BACKWARD: peak})
        for size, peak in peaks.items()
    ]  # fmt: skip

    model = memory_model_of(probes, is_repeatable=False)

    assert model is not None
    assert 1.5 < model.per_sample_bytes < 3.0


def test_where_verdicts_do_not_repeat_the_model_knows_the_confirmations_too() -> None:
    prober = FakeProber(budget_bytes=10_000, is_repeatable=False, confirm_extra=0.1)
    result = run_search(prober)
    assert result.memory_model is not None
    peak = max(prober.peaks(result.batch_size, confirm=True).values())
    assert result.memory_model.peak_bytes(result.batch_size) == pytest.approx(peak, rel=0.05)


def test_a_failure_for_no_want_of_memory_bounds_the_size_too() -> None:
    faults = dict.fromkeys(range(41, 500), Outcome.FAILED)
    result = run_search(FakeProber(faults=faults))
    assert result.batch_size == 40
    assert result.next_failure is not None
    assert (result.next_failure.batch_size, result.next_failure.outcome) == (41, Outcome.FAILED)


def test_sizes_that_are_refused_below_the_answer_are_named() -> None:
    powers = {2**power for power in range(12)}
    prober = FakeProber(faults=dict.fromkeys({*range(2000)} - powers, Outcome.FAILED))
    result = run_search(prober)
    assert result.batch_size in powers
    refused = [str(probe.batch_size) for probe in result.probes if probe.outcome is Outcome.FAILED]
    (warning,) = result.warnings
    assert warning.startswith(f"batches of {' and '.join(sorted(refused, key=int))} failed for")
    assert warning.endswith("only powers of two were tried: failed on paper")


def test_a_failure_for_no_want_of_memory_at_the_smallest_size_is_an_error() -> None:
    with pytest.raises(WorkerError, match="not even a batch of 4 runs: failed on paper"):
        run_search(FakeProber(faults={4: Outcome.FAILED}), Bounds.of(4))


def test_where_one_example_is_too_few_the_search_starts_at_two() -> None:
    prober = FakeProber(faults={1: BatchTooSmallError("needs 2")})
    result = run_search(prober)
    assert result.batch_size == 90
    assert prober.sizes[:2] == [1, 2]


def test_where_one_example_is_too_few_but_no_more_are_allowed() -> None:
    with pytest.raises(BatchTooSmallError):
        run_search(FakeProber(faults={1: BatchTooSmallError("needs 2")}), Bounds.of(1, 1))


def test_a_confirmation_that_fails_is_no_answer() -> None:
    result = run_search(FakeProber(confirm_extra=0.1))
    assert result.batch_size == 80
    assert result.probes[-1].confirmed
    assert result.next_failure is not None
    assert result.next_failure.batch_size == 81


@pytest.mark.parametrize(("smallest", "largest"), [(0, None), (1, 0), (9, 8)])
def test_bounds_that_make_no_sense(smallest: int, largest: int | None) -> None:
    prober = FakeProber()
    with pytest.raises(UsageError):
        run_search(prober, Bounds.of(smallest, largest))
    assert prober.sizes == []


# On the CPU's own memory.


def survives(function: str, batch_size: int, limit_bytes: int) -> bool:
    """Whether a plain loop in a fresh process trains 20 steps at a size."""
    arguments = ("models", function, str(batch_size), str(limit_bytes), "20")
    done = subprocess.run(
        [sys.executable, TARGETS / "plain_loop.py", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 or "can't allocate memory" in done.stderr, done.stderr
    return done.returncode == 0


FINDING = f"""
import sys; sys.path.append({str(TARGETS)!r})
from models import build_reserving
from batchfinder import find_max_batch
print(find_max_batch(*build_reserving(), device="cpu", memory_limit=int(sys.argv[1])).to_json())
"""


def test_the_answer_trains_in_a_fresh_process_and_a_fifth_more_does_not() -> None:
    limit_bytes = idle_bytes() + 310 * MIB
    # In a process of its own, as it would be forked from this one with all that the tests hold.
    result = json.loads(run_warm(FINDING, str(limit_bytes)))
    assert result["status"] == "found"
    assert result["budget_bytes"] == math.floor(limit_bytes * 0.95)
    assert result["next_failure"]["outcome"] == "oom"
    assert "can't allocate memory" in result["next_failure"]["reason"]
    peaks = [p["peak_allocated_bytes"] for p in result["probes"] if p["outcome"] == "fits"]
    assert peaks
    assert all(peak <= result["budget_bytes"] for peak in peaks)
    assert survives("build_reserving", result["batch_size"], limit_bytes)
    assert not survives("build_reserving", math.ceil(1.2 * result["batch_size"]), limit_bytes)


# The arguments of the function.


def step_in_float64(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    assert torch.ones(1).dtype is torch.float64
    loss: torch.Tensor = model(batch).sum()
    return loss


def search_small(**options: Any) -> BatchSizeResult:
    model, sample = build_small()
    return find_max_batch(model, sample, device="cpu", max_batch_size=5, **options)


def test_a_sample_that_the_model_carries_is_used_and_that_is_said() -> None:
    model = nn.Linear(4, 2)
    model.example_input_array = torch.ones(2, 4)
    with pytest.warns(BatchFinderWarning, match="no sample was given") as of_find:
        found = find_max_batch(model, device="cpu", max_batch_size=3)
    with pytest.warns(BatchFinderWarning, match="no sample was given") as of_estimate:
        estimated = estimate_max_batch(model, gpu="t4", max_batch_size=3)
    assert {warning.filename for warning in [*of_find, *of_estimate]} == {__file__}
    for result in (found, estimated.result):
        assert result.batch_size == 3
        assert any("no sample was given" in warning for warning in result.warnings)


def test_the_result_is_a_frozen_number_with_a_plan() -> None:
    told: list[Probe] = []
    result = search_small(on_probe=told.append)
    assert int(result) == result.batch_size == 5
    assert tuple(told) == result.probes
    assert result.warnings == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.batch_size = 6  # type: ignore[misc]
    plan = result.accumulation_plan(20)
    assert "5 per device x 4 accumulation steps" in str(plan)


def test_the_models_own_weights_stay_as_they_are() -> None:
    model, sample = build_small()
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    find_max_batch(model, sample, optimizer=optimizer, device="cpu", max_batch_size=2)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert len(optimizer.state) == 0


def test_an_optimizer_of_the_users_trains_their_model_in_the_worker() -> None:
    model = nn.Linear(2**20, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    result = find_max_batch(
        model, torch.ones(1, 2**20), optimizer=optimizer, device="cpu", max_batch_size=1
    )
    (probe,) = result.probes
    # The states, and the temporaries of the step, beyond weights and gradients of 16 MiB each.
    peaks = probe.phase_peak_bytes
    assert peaks[Phase.OPTIMIZER_STEP] > peaks[Phase.FORWARD_BACKWARD] - 16 * MIB
    assert len(optimizer.state) == 0


def test_a_setup_in_place_of_its_parts() -> None:
    model, sample = build_small()
    result = find_max_batch(TrainingSetup(model, sample), device="cpu", max_batch_size=1)
    assert result.batch_size == 1


def test_a_setup_and_parts_beside_it() -> None:
    model, sample = build_small()
    with pytest.raises(UsageError, match="give the sample and functions in the TrainingSetup"):
        find_max_batch(TrainingSetup(model, sample), loss_fn=lambda output, batch: output.sum())


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("model", r"the model is an object of type str; it must be a torch.nn.Module$"),
        (nn.Linear, "the model is the class Linear, .* Try to call it"),
        (build_small, "Try to call it"),
        (build_small(), r"the model is a tuple \(.* Try model, sample = build_model\(\)"),
    ],
)
def test_what_is_no_model(model: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find_max_batch(model, torch.ones(1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"headroom": 1.5}, "headroom is a fraction"),
        ({"headroom": "10%"}, "headroom is a fraction"),
        ({"precision": "fp64"}, "precision is fp32, bf16 or fp16"),
        ({"confirm_steps": 0}, "confirm_steps must be at least 1"),
        ({"multiple_of": 8}, "no multiple of 8 lies between"),
        ({"memory_limit": "lots"}, "'lots' is not a memory size"),
    ],
)
def test_arguments_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        search_small(**options)


def test_the_error_of_a_model_in_a_worker_comes_with_its_traceback() -> None:
    with pytest.raises(UserCodeError, match="shapes cannot be multiplied") as raised:
        find_max_batch(nn.Linear(4, 2), torch.ones(1, 5), device="cpu")
    assert "RuntimeError" in raised.value.user_traceback
    assert len(raised.traceback) == 2  # this function, and the one that was called


def test_what_is_in_the_path_of_modules_and_no_text_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("somewhere")])
    assert find_max_batch(nn.Linear(4, 2), torch.ones(2, 4), device="cpu", max_batch_size=2)


def test_a_model_from_a_script_or_from_a_module_beside_it_is_found_by_the_workers(
    tmp_path: Path,
) -> None:
    """What stands in ``__main__`` is not there in another process: forks of the script try it."""
    (tmp_path / "nets.py").write_text("import torch\nclass Net(torch.nn.Linear):\n    pass\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, nets\n"
        "from batchfinder import find_max_batch\n"
        "class Net(torch.nn.Linear):\n"
        "    pass\n"
        "result = find_max_batch(Net(4, 2), torch.ones(2, 4), device='cpu',\n"
        "                        loss_fn=lambda output, _: print('here') or output.sum(),\n"
        "                        max_batch_size=3)\n"
        "print(result.batch_size, result.warnings)\n"
        "print(int(find_max_batch(nets.Net(4, 2), torch.ones(2, 4), device='cpu',\n"
        "                         max_batch_size=1)))\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.stdout == "3 ()\n1\n", done.stderr


def test_a_compiled_model_is_searched_for_on_the_device_there_is() -> None:
    sample = torch.ones(2, 4), torch.tensor([0, 1])
    model: Any = torch.compile(nn.Linear(4, 2), backend="eager")
    assert find_max_batch(model, sample, max_batch_size=2).batch_size == 2


def test_a_search_may_be_made_where_gradients_are_off() -> None:
    sample = torch.ones(2, 4), torch.tensor([0, 1])
    with torch.no_grad():
        assert find_max_batch(nn.Linear(4, 2), sample, device="cpu", max_batch_size=2)
        assert not torch.is_grad_enabled()


def test_a_file_that_searches_when_it_is_imported_does_not_start_search_after_search(
    tmp_path: Path,
) -> None:
    (tmp_path / "unguarded.py").write_text(
        "import torch\n"
        "from batchfinder import find_max_batch\n"
        "class Net(torch.nn.Linear):\n"
        "    pass\n"
        "def build_model():\n"
        "    return Net(4, 2), torch.ones(2, 4)\n"
        "result = find_max_batch(*build_model(), device='cpu', max_batch_size=1)\n"
    )
    process = start_command("find", "unguarded.py:build_model", folder=tmp_path)
    assert "Try moving that under if __name__ == '__main__'" in process.communicate()[1]
    assert process.wait() == 2
