"""Recordings of what a script requests from CUDA's allocator."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchfinder.launching.hook.requests import MOST_READINGS, Requests
from batchfinder.launching.options import RunOptions
from batchfinder.launching.prober import LaunchProber
from batchfinder.launching.record import LENGTHS_STEPS, Record, budget_left
from batchfinder.launching.template import Template
from batchfinder.launching.verdict import judge
from batchfinder.results.memory_model import Phase
from batchfinder.results.probe import FORESEEN_NOTE, SHORT_LIVED_NOTE, VARIED_NOTE, Outcome, Probe
from batchfinder.results.result import Status
from batchfinder.search.bounds import ALL_SIZES, Bounds
from batchfinder.search.head_start import Guess, HeadStart
from batchfinder.search.plan import Prices
from batchfinder.search.run import run_search
from batchfinder.search.search import search
from batchfinder.units import GIB, MIB


class FakeRecorder:
    """Stands in for PyTorch's history."""

    def __init__(self, *_: Any) -> None:
        self.steps: list[list[int]] = []
        self.validations: list[list[int]] = []
        self.is_on = False

    def Recorder(self, *_: Any) -> FakeRecorder:  # noqa: N802 - a class in the real module
        return self

    def begin(self) -> bool:
        self.is_on = True
        return True

    def end(self) -> None:
        self.is_on = False

    def end_step(self) -> None:
        self.steps.append([512, ~len(self.steps)])

    def end_validation(self) -> None:
        self.validations.append([4096])

    def recording(self) -> dict[str, Any]:
        fields = {"steps": self.steps, "validations": self.validations}
        return {"event": "recording", "pid": 7, "held": [], "streams": [], **fields}


def test_a_process_reports_its_requests_only_when_it_waits() -> None:
    reports: list[dict[str, Any]] = []
    recorder = FakeRecorder()
    requests = Requests(recorder, lambda *_, **facts: reports.append(facts))
    requests.begin_cuda()
    for waits in (False, False, True):
        requests.end_reading(0, waits=waits)
    assert [len(report["steps"]) for report in reports] == [3]
    for _ in range(MOST_READINGS):
        requests.end_reading(0, waits=False)
    assert not recorder.is_on


def test_the_validation_after_the_steps_is_recorded_once() -> None:
    """Without it, a script whose validation limits the size took 8 to 10 launches."""
    record = Record(4, steps=3, headroom=0.05, cpu_budget_bytes=None)
    requests = Requests(FakeRecorder(), lambda *_, **facts: record.add(facts))
    requests.begin_cuda()
    requests.end_validation()  # nothing is recorded yet
    requests.end_reading(0, waits=True)
    record.add(step([4, 8]))
    for _ in range(2):  # a later step, and the end of the script
        requests.end_validation()
    recording = record.trainers[7].recording
    assert recording is not None
    assert (recording.steps, recording.validations) == ([[512, ~0]], [[4096]])


def step(shape: list[int], held: int = 2**20) -> dict[str, Any]:
    """The report of a step, whose model had an input of a shape."""
    memory = {"budget_bytes": 2**30, "reserved": held, "allocated": held, "phases": {}}
    facts = {
        "device": "cuda:0",
        "processes": 1,
        "rank": 0,
        "retries": 0,
        "seconds": 0.1,
        "elements": 8,
    }
    return {"event": "step", "pid": 7, "shapes": [shape], **memory, **facts}


@pytest.mark.parametrize(("outside", "left"), [(300, 900), (50, 1000), (None, 1000)])
def test_what_a_script_uses_outside_the_allocator_is_left_out_of_its_budget(
    outside: int | None, left: int
) -> None:
    report = {"budget_bytes": 1000, "outside_before": 100}
    report |= {} if outside is None else {"outside": outside}  # it ran out of memory at once
    assert budget_left(report, headroom=0.5) == left


def test_workspaces_of_kernels_that_the_first_step_tries_are_no_peak() -> None:
    record = Record(4, steps=3, headroom=0.05, cpu_budget_bytes=None)
    for held in (500, 200, 300):
        peaks = {"allocated": held, "phases": {"forward": held}, "tries_kernels": True}
        record.add(step([4, 8], held) | peaks)
    assert (record.trainers[7].allocated, record.trainers[7].phases[Phase.FORWARD]) == (300, 300)


def test_the_driver_keeps_the_last_recording_of_a_process() -> None:
    record = Record(4, steps=3, headroom=0.05, cpu_budget_bytes=None)
    record.add({"event": "recording", "pid": 7, "held": [], "steps": [[512]], "streams": []})
    record.add(step([4, 8]))
    recording = record.trainers[7].recording
    assert recording is not None
    assert recording.steps == [[512]]


@pytest.mark.parametrize(("sizes", "steps"), [((4, 4, 4, 4), 3), ((4, 3, 4, 3, 4), 5)])
def test_batches_of_different_shapes_need_more_steps(sizes: tuple[int, ...], steps: int) -> None:
    record = Record(4, steps=3, headroom=0.05, cpu_budget_bytes=None)
    for size in sizes:
        if not record.is_over:
            record.add(step([size, 8]))
    assert record.steps == steps


@pytest.mark.parametrize(("start_seconds", "steps"), [(0.0, 5), (2.05, 22), (60.0, LENGTHS_STEPS)])
def test_batches_that_differ_in_length_are_watched_for_as_long_as_the_start_took(
    start_seconds: float, steps: int
) -> None:
    """A step takes 0.1 s. Those that fill that time may flush the cache."""
    record = Record(4, steps=3, headroom=0.05, cpu_budget_bytes=None)
    for number in range(1, 100):
        if not record.is_over:
            record.add(step([4, 8 + number % 2]) | {"retries": number == 9})
            record.start_seconds = start_seconds
    assert record.steps == steps
    assert judge(record, None, "", "").probe.fits


@pytest.mark.parametrize(
    ("flushing", "sizes", "steps", "fits"),
    [
        ({2, 3, 4, 5, 7}, [4] * 10, 9, True),
        ({2, 3, 4, 5, 6, 7, 8, 9}, [4] * 10, 9, False),
        ({2, 3, 5, 7, 9}, [4] * 10, 9, False),
        ({2, 4}, [4, 3, 4, 3, 4], 4, False),
    ],
)
def test_equal_batches_may_flush_the_cache_until_two_steps_did_not(
    flushing: set[int], sizes: list[int], steps: int, fits: bool
) -> None:
    record = Record(4, steps=3, headroom=0.05, cpu_budget_bytes=None)
    for number, size in enumerate(sizes, 1):
        if not record.is_over:
            record.add(step([size, 8]) | {"retries": number in flushing})
    assert record.steps == steps
    assert judge(record, None, "", "").probe.fits is fits


@pytest.mark.parametrize(("flushing", "fits"), [({3, 5}, True), ({2, 3, 4, 5, 6, 7, 9}, False)])
def test_a_batch_longer_than_those_before_may_flush_the_cache(
    flushing: set[int], fits: bool
) -> None:
    """As one of a Whisper did in 60 steps: 15 was answered where 25 trains."""
    record = Record(4, steps=3, headroom=0.05, cpu_budget_bytes=None)
    for number in range(1, 12):
        if not record.is_over:
            record.add(step([4, 8 + number % 2]) | {"retries": number in flushing})
    assert judge(record, None, "", "").probe.fits is fits


@pytest.mark.parametrize(("steps", "fits"), [([1, 1, 1, 1, 1], True), ([1, 2, 3, 4, 5], False)])
def test_accumulated_gradients_may_flush_the_cache_where_they_first_meet_the_states(
    steps: list[int], fits: bool
) -> None:
    record = Record(4, steps=3, headroom=0.05, cpu_budget_bytes=None)
    for number, (ended, size) in enumerate(zip(steps, (4, 3, 4, 3, 4), strict=True), 1):
        record.add(step([size, 8]) | {"steps": ended, "retries": number == 3})
    assert judge(record, None, "", "").probe.fits is fits


@pytest.mark.parametrize(("lengths", "differ"), [([8] * 6, False), ([8, 5, 8, 8, 8, 8], True)])
def test_batches_of_different_lengths_are_told_from_a_smaller_last_one(
    lengths: list[int], differ: bool
) -> None:
    record = Record(4, steps=3, headroom=0.05, cpu_budget_bytes=None)
    for size, length in zip((4, 3, 4, 4, 4, 4), lengths, strict=True):
        record.add(step([size, length], held=2**29))
    assert record.lengths_differ is differ
    assert judge(record, 0, "", "").probe.steps_differ is differ
    verdict = judge(record, None, "", "")
    assert verdict.within(2**29).probe.fits
    refused = verdict.within(2**29 - 1).probe
    assert (refused.outcome, refused.note) == (Outcome.OOM, VARIED_NOTE)


@pytest.mark.parametrize(
    ("launches", "tried"), [(2, [1, 3, 320, 640, 659]), (4, [1, 3, 322, 484, 640, 659])]
)
def test_an_expensive_launch_records_up_to_half_of_the_answer_at_once(
    launches: int, tried: list[int]
) -> None:
    """Small sizes may leave none, as of a script that accumulates over thousands of batches."""
    sizes: list[int] = []

    def run(batch_size: int, confirm: bool) -> Probe:
        sizes.append(batch_size)
        fits = Outcome.FITS if batch_size <= 640 else Outcome.OOM
        peak = {Phase.FORWARD_BACKWARD: 1000 + 10 * batch_size}
        return Probe(batch_size, fits, 1, 0.0, phase_peak_bytes=peak, confirmed=batch_size <= 640)

    found = search(
        run,
        budget_bytes=7450,
        guess=lambda _: Guess(640) if len(sizes) >= launches else None,
        replays=True,
        prices=Prices(confirm=1, launch=20, resolution=0.03),
    )
    assert found.answer is not None
    assert found.answer.batch_size == 640
    assert sizes == tried


def test_recordings_overrule_a_line_through_peaks_that_hardly_grow() -> None:
    sizes: list[int] = []

    def run(batch_size: int, confirm: bool) -> Probe:
        sizes.append(batch_size)
        fits = batch_size <= 20
        peak = {Phase.FORWARD_BACKWARD: max(400 + 10 * batch_size, 100 * batch_size)}
        outcome = Outcome.FITS if fits else Outcome.OOM
        return Probe(batch_size, outcome, 1, 0.0, phase_peak_bytes=peak, confirmed=fits)

    prices = Prices(confirm=1, launch=20, resolution=0.03)
    search(
        run,
        budget_bytes=2050,
        guess=lambda _: Guess(20) if len(sizes) > 1 else None,
        replays=True,
        prices=prices,
    )
    assert sizes == [1, 2, 10, 20, 21]


@pytest.mark.parametrize("launches", [3, 2])
def test_a_size_that_a_replay_refuses_is_shown_launched_or_not(launches: int) -> None:
    command = [sys.executable, str(Path(__file__).with_name("script.py")), "--batch-size"]
    options = RunOptions(device="cpu", memory_limit=4 * GIB)
    prober = LaunchProber(
        Template([*command, "{batch_size}"]), options, ALL_SIZES, Prices(confirm=1)
    )
    head_start = HeadStart(lasts=lambda size: size < 3, foresee=lambda size: size > launches)
    found = run_search(prober, Bounds.of(1, 3), head_start=head_start)
    result = prober.conclude(found)
    assert result.batch_size == 2
    refused = {probe.batch_size: probe.note for probe in result.probes if not probe.fits}
    assert refused == {3: SHORT_LIVED_NOTE if launches == 3 else FORESEEN_NOTE}
    assert len(prober.launched) == launches
    in_time = replace(found, batch_size=1, status=Status.TIME_LIMIT)
    assert prober.conclude(in_time).batch_size == 2


def test_a_reading_in_which_no_model_ran_has_no_other_lengths() -> None:
    """Where a script accumulates, one ends after a backward pass, and one with the optimizer."""
    record = Record(4, steps=3, headroom=0.05, cpu_budget_bytes=None)
    for shapes in ([[4, 8], [4, 8]], [[4, 8]], [], [[4, 8]], []):
        record.add(step([4, 8]) | {"shapes": shapes})
    assert not record.lengths_differ
    record.add(step([4, 5]))
    assert record.lengths_differ


def test_a_step_that_runs_one_model_less_has_no_other_lengths() -> None:
    """A GAN's gradient penalty, every 16 steps, runs the discriminator alone."""
    record = Record(4, steps=3, headroom=0.05, cpu_budget_bytes=None)
    both = [[4, 128], [4, 3, 64, 64]]
    for shapes in (both, both, both[1:], both):
        record.add(step([]) | {"shapes": shapes})
    assert not record.lengths_differ


@pytest.mark.parametrize(
    ("kept_mib", "lengths", "leaks"), [(4, 8, True), (0, 8, False), (4, 9, False)]
)
def test_a_script_that_keeps_memory_of_each_step_is_told_that_it_leaks(
    kept_mib: int, lengths: int, leaks: bool
) -> None:
    """The first step makes the optimizer's states. Longer batches may leave more as well."""
    record = Record(4, steps=3, headroom=0.05, cpu_budget_bytes=None)
    steps = [[50 * MIB, 9 * MIB, ~2], [9 * MIB, kept_mib * MIB, ~3], [9 * MIB, kept_mib * MIB, ~5]]
    recorded = {"held": [7 * MIB], "steps": steps, "streams": []}
    record.add({"event": "recording", "pid": 7, **recorded})
    for length in (8, 8, lengths):
        record.add(step([4, length]))
    assert ("leak" in record.remarks(2**30)) is leaks
