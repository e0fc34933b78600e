"""What a process does with a batch size, on a device of which every reading is scripted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.exc import CppCompileError

from batchfinder import Outcome, Phase, TrainingSetup
from batchfinder.errors import BatchTooSmallError, DeviceError
from batchfinder.probing.devices.device import Device, DeviceMemory, Peaks
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.session import ProbeSession
from batchfinder.probing.steadiness import PeakWatch
from batchfinder.results.probe import LEAK_WARNING, THRASHING_NOTE, VARIED_NOTE, Probe
from batchfinder.training.sample import BatchMaker
from batchfinder.units import MIB

CPU = torch.device("cpu")
BUDGET = 10_000
FORWARD_PEAK = 1500
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."
PROBABLY_MEMORY = "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"
POISON = "CUDA error: an illegal memory access was encountered"


@dataclass
class FakeDevice(Device):
    """Tells what it is told to.

    Attributes:
        held: what the process holds at each reading; the last one for ever.
        kept: what its allocator keeps; likewise.
        grown: what each step adds to the peak of the one before; 0 after the last.
        flushing_phases: in how many phases, forward/backward or optimizer step, the allocator
            flushes its cache.
        leak: what each step leaves in use.
    """

    held: list[int] = field(default_factory=lambda: [1000])
    kept: list[int] = field(default_factory=lambda: [1000])
    grown: list[int] = field(default_factory=list)
    flushing_phases: int = 0
    leaves_no_trace: bool = True
    torch_device: torch.device = CPU
    name: str = "fake"
    peak: int = 2000
    forward_peak: int = FORWARD_PEAK
    readings: int = 0
    releases: int = 0
    retries: int = 0
    in_use: int = 0
    leak: int = 0

    def memory(self) -> DeviceMemory:
        return DeviceMemory(BUDGET, 0, 0, 0)

    @contextmanager
    def limited_to(self, budget_bytes: int) -> Iterator[None]:
        yield

    def held_bytes(self) -> int:
        return self.held.pop(0) if len(self.held) > 1 else self.held[0]

    def kept_bytes(self) -> int:
        return self.kept.pop(0) if len(self.kept) > 1 else self.kept[0]

    def in_use_bytes(self) -> int:
        self.in_use += self.leak
        return self.in_use

    def reset_peaks(self) -> None: ...

    def peaks(self) -> Peaks:
        steps, phase = divmod(self.readings, 3 if self.leaves_no_trace else 2)
        self.readings += 1
        if phase == 0 and self.leaves_no_trace:
            return Peaks(self.forward_peak, self.peak)
        is_optimizer_step = phase == (2 if self.leaves_no_trace else 1)
        if not is_optimizer_step and steps and self.grown:
            self.peak += self.grown.pop(0)
        self.retries += 2 * steps + is_optimizer_step < self.flushing_phases
        return Peaks(500 if is_optimizer_step else self.peak, self.peak)

    def allocation_retries(self) -> int:
        return self.retries

    def release_cache(self) -> None:
        self.releases += 1


@dataclass
class AssertingDevice(FakeDevice):
    """Breaks at a reading, as kernels fail long after they were started; refuses all from then on.

    Attributes:
        breaks_at: the number of that reading.
    """

    breaks_at: int = 7
    is_broken: bool = False

    def peaks(self) -> Peaks:
        self.is_broken |= self.readings + 1 == self.breaks_at
        self._refuse_if_broken()
        return super().peaks()

    def release_cache(self) -> None:
        self._refuse_if_broken()
        super().release_cache()

    def _refuse_if_broken(self) -> None:
        if self.is_broken:
            raise RuntimeError(POISON)


class Net(nn.Module):
    """Notes the sizes it gets, and raises the errors listed for a size, one after another."""

    def __init__(self, errors: dict[int, list[Exception]]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.errors = errors
        self.sizes: list[int] = []

    def forward(self, rows: Tensor) -> Tensor:
        self.sizes.append(len(rows))
        if pending := self.errors.get(len(rows)):
            raise pending.pop(0)
        output: Tensor = self.layer(rows).mean()
        return output


def session(
    device: FakeDevice | None = None,
    errors: dict[int, list[Exception]] | None = None,
    optimizer: Any = None,
    on_step: Callable[[], None] = lambda: None,
    all_agree: Callable[[bool], bool] = bool,
    **options: Any,
) -> tuple[ProbeSession, list[int]]:
    """A session, and the list of the sizes that its model gets."""
    model = Net(errors or {})
    sample = torch.ones(2, 4)
    setup = TrainingSetup(model, sample, optimizer=optimizer)
    made = ProbeSession(
        setup,
        BatchMaker(sample),
        device or FakeDevice(),
        BUDGET,
        ProbeOptions(**options),
        on_step,
        all_agree,
    )
    return made, model.sizes


def test_the_first_probe_takes_two_steps_and_later_ones_one() -> None:
    ours, sizes = session()
    first, second = ours.probe(3), ours.probe(5)
    assert sizes == [3, 3, 5]
    assert (first.probe.steps, first.probe.samples) == (2, 6)
    assert (second.probe.steps, second.probe.samples) == (1, 5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_each_size_is_compiled_for_itself_and_so_is_the_training_after_them() -> None:
    compiled: list[int | None] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        sizes = [each.shape[0] for each in inputs if isinstance(each, Tensor)]
        compiled.append(sizes[-1] if all(type(size) is int for size in sizes) else None)
        return graph.forward

    model: Any = torch.compile(nn.Linear(4, 2), backend=backend)
    setup = TrainingSetup(model, loss_fn=lambda output, _: output.mean())
    batches, options = BatchMaker(torch.ones(2, 4)), ProbeOptions()
    ours = ProbeSession(setup, batches, FakeDevice(), BUDGET, options)
    for size in (3, 5, 6):
        assert ours.probe(size, confirm=True).probe.fits
    model(torch.ones(7, 4))
    assert compiled == [3, 5, 6, 7]


def test_a_new_process_is_warmed_up_by_two_small_steps() -> None:
    ours, sizes = session(warm_up_batch_size=2)
    probe = ours.probe(7).probe
    assert sizes == [2, 2, 7]
    assert (probe.steps, probe.samples) == (1, 11)


def test_beside_a_validation_trains_a_small_batch_however_large_the_smallest_size_is() -> None:
    ours, sizes = session(mode="eval", smallest=64)
    assert ours.probe(64).probe.fits
    assert sizes[:2] == [2, 2]
    assert {*sizes[2:]} == {64}


def test_code_that_takes_no_small_batch_trains_on_the_smallest_size_instead() -> None:
    ours, sizes = session(errors={2: [ValueError("not divisible")] * 9}, mode="eval", smallest=64)
    assert ours.probe(80).probe.fits
    assert sizes[:3] == [2, 64, 64]
    assert {*sizes[3:]} == {80}


def test_a_training_that_runs_out_of_memory_on_a_small_batch_is_out_of_memory() -> None:
    ours, sizes = session(errors={2: [RuntimeError(OUT_OF_MEMORY)]}, mode="eval", smallest=64)
    assert ours.probe(64).probe.outcome is Outcome.OOM
    assert sizes == [2]


def test_accumulation_runs_two_micro_batches_a_step() -> None:
    ours, sizes = session(accumulate=True)
    probe = ours.probe(3).probe
    assert sizes == [3] * 4
    assert (probe.steps, probe.samples) == (2, 12)


def test_each_phase_has_a_peak_of_its_own() -> None:
    probe = session()[0].probe(3).probe
    assert probe.phase_peak_bytes == {
        Phase.FORWARD: FORWARD_PEAK,
        Phase.FORWARD_BACKWARD: 2000,
        Phase.OPTIMIZER_STEP: 500,
    }
    assert (probe.peak_allocated_bytes, probe.peak_reserved_bytes) == (2000, 2000)
    assert (probe.outcome, probe.note, probe.confirmed) == (Outcome.FITS, "", False)


@pytest.mark.parametrize(
    ("forward_peak", "headroom", "warns"),
    [(BUDGET - 39, 0.0, True), (BUDGET - 40, 0.0, False), (BUDGET - 39, 0.05, False)],
)
def test_gradients_that_a_loop_may_clear_late_are_told_if_they_exceed_the_memory(
    forward_peak: int, headroom: float, warns: bool
) -> None:
    """The ten parameters have 40 bytes of gradients, which the headroom has room for."""
    device = FakeDevice(peak=BUDGET, forward_peak=forward_peak)
    ours, _ = session(device, headroom=headroom)
    assert ours.probe(3, confirm=True).probe.fits
    warning = (
        "a loop that calls zero_grad() between forward and backward pass holds 40 B of old "
        "gradients meanwhile, and may run out of memory at the answer. "
        "Try calling it after optimizer.step()"
    )
    assert ours.warnings == [warning] * warns


@pytest.mark.parametrize("confirm", [False, True])
def test_where_the_first_step_tries_kernels_only_later_steps_show_the_peak(
    confirm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    probes, _ = session(FakeDevice(peak=5000, grown=[-3000]))
    probe = probes.probe(3, confirm=confirm).probe
    assert probe.peak_allocated_bytes == max(probe.phase_peak_bytes.values()) == 2000
    assert probe.steps == (3 if confirm else 2)
    if not confirm:
        assert probes.probe(4).probe.steps == 2


def test_every_step_is_told_as_it_ends() -> None:
    steps = []
    ours, _ = session(on_step=lambda: steps.append(1))
    ours.probe(3)
    ours.probe(3, confirm=True)
    assert len(steps) == 2 + 3


def test_a_confirmation_takes_the_steps_asked_for_if_the_peak_is_steady() -> None:
    ours, sizes = session(confirm_steps=5)
    attempt = ours.probe(4, confirm=True)
    assert sizes == [4] * 5
    assert attempt.probe.fits
    assert attempt.probe.confirmed
    assert attempt.probe.steps == 5


def test_more_steps_may_be_asked_for_than_a_confirmation_takes_by_itself() -> None:
    attempt = session(confirm_steps=12)[0].probe(4, confirm=True)
    assert (attempt.probe.outcome, attempt.probe.steps) == (Outcome.FITS, 12)


def test_a_confirmation_goes_on_until_the_peak_has_not_grown_for_two_steps() -> None:
    attempt = session(FakeDevice(grown=[100, 0, 100]))[0].probe(4, confirm=True)
    assert (attempt.probe.outcome, attempt.probe.steps) == (Outcome.FITS, 6)
    assert attempt.probe.peak_reserved_bytes == 2200


def test_a_peak_that_does_not_stop_growing_is_refused() -> None:
    attempt = session(FakeDevice(grown=[100] * 20))[0].probe(4, confirm=True)
    assert (attempt.probe.outcome, attempt.probe.steps) == (Outcome.OOM, 10)
    assert attempt.probe.note == "memory still grew after 10 steps"


def test_a_rank_that_waits_for_others_to_settle_is_judged_as_if_it_were_alone() -> None:
    said: list[bool] = []

    def others_do_not_settle(yes: bool) -> bool:
        said.append(yes)
        return False

    device = FakeDevice(grown=[0, 0, 0, 100, 0, 0, 0, 0, 100])
    attempt = session(device, all_agree=others_do_not_settle)[0].probe(4, confirm=True)
    assert (attempt.probe.outcome, attempt.probe.steps) == (Outcome.FITS, 10)
    assert said == [False] * 2 + [True] * 8
    assert attempt.probe.peak_reserved_bytes == 2200


def test_a_growth_within_the_noise_of_the_readings_is_none() -> None:
    attempt = session(FakeDevice(grown=[10] * 20))[0].probe(4, confirm=True)
    assert (attempt.probe.outcome, attempt.probe.steps) == (Outcome.FITS, 3)


def test_a_size_that_runs_only_by_flushing_the_cache_is_refused() -> None:
    ours = session(FakeDevice(flushing_phases=100))[0]
    for probe in (ours.probe(4, confirm=True).probe, ours.probe(5).probe):
        assert (probe.outcome, probe.is_thrashing) == (Outcome.OOM, True)
        assert probe.note == "runs only by flushing the allocator's cache after its first steps"
    assert probe.steps == 2


@pytest.mark.parametrize(
    ("flushes", "is_thrashing"),
    [
        ([0, 0, 0], False),
        ([1, 0, 0], False),  # where the optimizer's states find their place
        ([0, 1, 0, 0], False),
        ([0, 1, 1], True),
        ([1, 1, 0, 0], False),
        ([1, 1, 0, 1], True),
        ([0, 0, 1], True),
    ],
)
def test_only_the_first_two_steps_of_a_confirmation_may_flush_the_cache(
    flushes: list[int], is_thrashing: bool
) -> None:
    watch = PeakWatch(budget_bytes=1000, least_steps=3, peaks_wander=False)

    for flushed in flushes:
        assert not watch.is_over
        watch.note(900, flushed)

    assert watch.is_over
    assert (watch.objection() == THRASHING_NOTE) is is_thrashing


def test_where_a_process_keeps_traces_six_steps_show_how_much_peaks_differ() -> None:
    attempt = session(FakeDevice(leaves_no_trace=False))[0].probe(4, confirm=True)
    assert (attempt.probe.outcome, attempt.probe.steps) == (Outcome.FITS, 6)


@pytest.mark.parametrize(("last_flush", "fits"), [(4, True), (8, True), (9, False)])
def test_a_longer_batch_may_flush_the_cache_in_later_steps(last_flush: int, fits: bool) -> None:
    """A Whisper got 19 where 26 trains: a batch longer than those before flushes it at times."""
    watch = PeakWatch(1000, least_steps=3, peaks_wander=False, batches_vary=True)
    while not watch.is_over and len(watch.peaks) < watch.most_steps:
        watch.expect_variation(lengths_differ=True)  # as steps of other lengths make other requests
        watch.note(900, len(watch.peaks) < last_flush)
    assert (not watch.objection()) is fits


@pytest.mark.parametrize("lengths_differ", [(False, True), (True, False)])
def test_the_order_in_which_batches_vary_decides_nothing(lengths_differ: tuple[bool, bool]) -> None:
    watch = PeakWatch(1000, least_steps=3, peaks_wander=False)
    for flushed in range(4):
        watch.note(900, flushed)
    for each in lengths_differ:
        watch.expect_variation(lengths_differ=each)
    assert not watch.is_refused


@pytest.mark.parametrize(("peak", "fits"), [(9400, True), (9600, False)])
def test_where_batches_vary_each_step_leaves_room_for_other_orders(peak: int, fits: bool) -> None:
    def make_batch(batch_size: int, step: int) -> Tensor:
        return torch.ones(batch_size, 4)

    def probe(confirm: bool) -> Probe:
        device = FakeDevice(leaves_no_trace=False, peak=peak)
        setup, batches = TrainingSetup(Net({})), BatchMaker(None, make_batch=make_batch)
        ours = ProbeSession(setup, batches, device, BUDGET, ProbeOptions())
        return ours.probe(4, confirm=confirm).probe

    first, confirmation = probe(confirm=False), probe(confirm=True)
    assert first.fits is confirmation.fits is fits
    if not fits:
        assert first.note == VARIED_NOTE
        assert confirmation.steps == 1  # no later step makes up for it


def test_a_peak_that_differs_from_step_to_step_must_leave_room_for_more() -> None:
    device = FakeDevice(leaves_no_trace=False, peak=BUDGET - 100, grown=[-500, 0, 0, 0, 600])
    probe = session(device)[0].probe(4, confirm=True).probe
    assert (probe.outcome, probe.steps) == (Outcome.OOM, 6)
    # 9400 four times and 10000 once: 9 standard deviations above the mean are 11938, of which
    # 526 may be headroom.
    why = (
        "its peak memory differs from step to step, and would pass the budget by 1.4 KiB in some "
        "steps"
    )
    assert probe.note == why
    device = FakeDevice(leaves_no_trace=False, peak=BUDGET - 900, grown=[-500, 0, 0, 0, 250])
    assert session(device)[0].probe(4, confirm=True).probe.fits


def test_near_the_limit_a_confirmation_takes_more_steps() -> None:
    # 9200 and once 9580: seven readings allow 4.6 deviations above the mean, five only 5.8.
    for peak, steps in ((BUDGET - 300, 8), (BUDGET - 5100, 6)):
        device = FakeDevice(leaves_no_trace=False, peak=peak, grown=[-500, 0, 0, 0, 380, -380])
        probe = session(device)[0].probe(4, confirm=True).probe
        assert (probe.outcome, probe.steps) == (Outcome.FITS, steps)


def test_without_headroom_peaks_that_differ_must_leave_more_room() -> None:
    def confirm(headroom: float) -> Probe:
        device = FakeDevice(
            leaves_no_trace=False, peak=BUDGET - 300, grown=[-500, *[0, 300, -300] * 4]
        )
        return session(device, headroom=headroom)[0].probe(4, confirm=True).probe

    # 9200 three times and 9500 once: 11.5 standard deviations above the mean are 10993. The same
    # spread in 13 readings would allow 5.7, up to 10127.
    assert confirm(headroom=0.05).fits
    assert not confirm(headroom=0).fits
    assert "would pass the budget by 993 B" in confirm(headroom=0).note


def test_that_peaks_differ_too_much_is_seen_before_a_confirmation_would_end() -> None:
    device = FakeDevice(leaves_no_trace=False, peak=BUDGET - 100, grown=[-500, 0, 500])
    probe = session(device)[0].probe(4, confirm=True).probe
    assert (probe.outcome, probe.steps) == (Outcome.OOM, 5)


def test_of_peaks_that_wander_only_a_trend_is_taken_for_growth() -> None:
    for grown, steps in (([0, 0, 100, -50, 100], 6), ([0, 0, 100, 100, 100, -50], 7)):
        device = FakeDevice(leaves_no_trace=False, grown=grown)
        probe = session(device)[0].probe(4, confirm=True).probe
        assert (probe.outcome, probe.steps) == (Outcome.FITS, steps)
    device = FakeDevice(leaves_no_trace=False, grown=[100] * 14)
    probe = session(device)[0].probe(4, confirm=True).probe
    assert (probe.outcome, probe.note) == (Outcome.OOM, "memory still grew after 14 steps")


def test_a_size_that_flushes_the_cache_once_fits() -> None:
    device = FakeDevice(flushing_phases=4)
    ours = session(device)[0]
    first, second = ours.probe(4).probe, ours.probe(5).probe
    assert (first.outcome, first.steps, first.allocation_retries) == (Outcome.FITS, 3, 0)
    assert (second.outcome, second.steps, second.allocation_retries) == (Outcome.FITS, 1, 0)


def test_out_of_memory_is_an_outcome_with_what_was_held_by_then() -> None:
    device = FakeDevice()
    ours, sizes = session(device, {9: [RuntimeError(OUT_OF_MEMORY)]})
    ours.probe(3)
    attempt = ours.probe(9)
    assert (attempt.probe.outcome, attempt.probe.note) == (Outcome.OOM, OUT_OF_MEMORY)
    assert attempt.probe.peak_allocated_bytes == FORWARD_PEAK
    assert (attempt.is_believed, attempt.is_reusable) == (True, True)
    assert sizes == [3, 3, 9]


def test_a_failure_that_is_only_probably_memory_is_repeated_after_cleaning_up() -> None:
    device = FakeDevice()
    ours, sizes = session(device, {3: [RuntimeError(PROBABLY_MEMORY)]})
    attempt = ours.probe(3)
    assert attempt.probe.fits
    assert sizes == [3, 3]
    assert device.releases == 2


def test_a_failure_that_is_only_probably_memory_is_believed_the_second_time() -> None:
    ours, sizes = session(errors={3: [RuntimeError(PROBABLY_MEMORY)] * 2})
    assert ours.probe(3).probe.outcome is Outcome.OOM
    assert sizes == [3, 3]


def test_a_broken_context_bounds_the_size_and_ends_the_process() -> None:
    ours, sizes = session(errors={9: [RuntimeError(POISON)]})
    ours.probe(3)
    attempt = ours.probe(9)
    assert (attempt.probe.outcome, attempt.probe.note) == (Outcome.FAILED, POISON)
    assert not attempt.is_reusable
    assert sizes == [3, 3, 9]


def test_a_context_that_broke_unnoticed_is_asked_for_nothing_more() -> None:
    ours, sizes = session(AssertingDevice())
    assert ours.probe(3).is_reusable
    attempt = ours.probe(9)
    assert (attempt.probe.outcome, attempt.probe.note) == (Outcome.FAILED, POISON)
    assert (attempt.is_reusable, attempt.is_broken) == (False, True)
    assert sizes == [3, 3, 9]


def test_what_waiting_for_the_device_shows_says_more_than_a_library() -> None:
    ours, sizes = session(AssertingDevice(), {9: [RuntimeError(PROBABLY_MEMORY)]})
    ours.probe(3)
    attempt = ours.probe(9)
    assert (attempt.probe.outcome, attempt.probe.note) == (Outcome.FAILED, POISON)
    assert attempt.is_broken
    assert sizes == [3, 3, 9]


def test_where_an_out_of_memory_spoils_the_process_it_is_not_clean() -> None:
    device = FakeDevice(leaves_no_trace=False)
    attempt = session(device, {9: [RuntimeError(OUT_OF_MEMORY)]})[0].probe(9)
    assert not attempt.is_reusable


def test_a_process_that_holds_more_than_at_first_is_not_clean() -> None:
    device = FakeDevice(held=[1000, 1020, 1020, 1021])
    ours, _ = session(device)
    first, second, third = ours.probe(3), ours.probe(4), ours.probe(5)
    assert (first.is_believed, first.is_reusable) == (True, True)
    assert (second.is_believed, second.is_reusable) == (True, False)
    assert not third.is_believed


def test_a_process_whose_allocator_keeps_more_than_holes_is_not_clean() -> None:
    """As the pools of CUDA graphs are kept, which no tensor shows."""
    device = FakeDevice(kept=[1000, 1000, *3 * [1000 + 60 * MIB], 1000 + 70 * MIB])
    ours, _ = session(device)
    first, second, third = ours.probe(3), ours.probe(4), ours.probe(5)
    assert (first.is_reusable, second.is_reusable, third.is_believed) == (True, True, True)
    assert not third.is_reusable


def test_what_makes_no_difference_to_the_budget_spoils_no_process() -> None:
    ours, _ = session(FakeDevice(held=[100, 110, 110, 111]))
    first, second, third = ours.probe(3), ours.probe(4), ours.probe(5)
    assert (first.is_reusable, second.is_reusable, third.is_believed) == (True, False, False)


def test_where_a_probe_leaves_traces_only_the_first_one_finds_a_clean_process() -> None:
    ours, _ = session(FakeDevice(leaves_no_trace=False))
    first, second = ours.probe(3), ours.probe(4)
    assert (first.is_believed, first.is_reusable, second.is_believed) == (True, True, False)


@pytest.mark.parametrize("error", [ValueError("bad width"), RuntimeError("shapes differ")])
def test_the_users_own_error_comes_out_as_it_is(error: Exception) -> None:
    ours, sizes = session(errors={3: [error]})
    with pytest.raises(type(error)) as raised:
        ours.probe(3)
    assert raised.value is error
    assert sizes == [3]


def test_a_compiler_that_runs_out_of_memory_says_nothing_of_the_size() -> None:
    output = "cc1plus: out of memory allocating 48 bytes after a total of 109899776 bytes"
    compiling = RuntimeError("InductorError: C++ compile error")
    compiling.__context__ = CppCompileError(["g++", "x.cpp"], output)
    ours, sizes = session(errors={3: [compiling]})
    with pytest.raises(
        DeviceError, match=r"C\+\+ compiler ran out of memory.*larger memory limit$"
    ):
        ours.probe(3)
    assert sizes == [3]


@pytest.mark.parametrize(
    "output",
    [
        "x.cpp:1:1: error: 'x' does not name a type",
        "g++: internal compiler error: Segmentation fault signal terminated program cc1plus",
    ],
)
def test_code_that_does_not_compile_is_the_users_own_error(output: str) -> None:
    compiling = CppCompileError(["g++", "x.cpp"], output)
    ours, _ = session(errors={3: [compiling]})
    with pytest.raises(CppCompileError):
        ours.probe(3)


def test_a_layer_that_needs_more_than_one_example() -> None:
    message = "Expected more than 1 value per channel when training, got input size [1, 4]"
    ours, _ = session(errors={1: [ValueError(message)]})
    with pytest.raises(BatchTooSmallError, match="needs more than 1 example"):
        ours.probe(1)


def test_a_batch_of_two_that_is_too_small_is_named() -> None:
    message = "Expected more than 1 value per channel when training, got input size [1, 4]"
    ours, _ = session(errors={2: [ValueError(message)]})
    with pytest.raises(
        BatchTooSmallError, match=r"more than 2 examples .*Try batch sizes of 3 or more"
    ):
        ours.probe(2)


def test_what_the_user_was_handling_before_is_no_failure_of_the_step() -> None:
    """A size is looked for where training has run out of memory."""
    ours, _ = session(errors={3: [ValueError("wrong shape")], 4: [RuntimeError(OUT_OF_MEMORY)]})
    try:
        raise RuntimeError(OUT_OF_MEMORY)
    except RuntimeError:
        with pytest.raises(ValueError, match="wrong shape"):
            ours.probe(3)
        assert ours.probe(4).probe.outcome is Outcome.OOM


def test_an_error_for_whose_text_there_is_no_memory_is_out_of_memory() -> None:
    class UnreadableError(RuntimeError):
        def __str__(self) -> str:
            raise MemoryError

    ours, _ = session(errors={3: [UnreadableError()]})
    assert ours.probe(3).probe.outcome is Outcome.OOM


def test_an_optimizer_for_which_there_is_no_room_is_out_of_memory_too() -> None:
    def factory(parameters: Any) -> torch.optim.Optimizer:
        raise RuntimeError(OUT_OF_MEMORY)

    attempt = session(optimizer=factory)[0].probe(3)
    assert attempt.probe.outcome is Outcome.OOM


def test_a_probe_leaves_no_gradient_and_an_empty_cache_behind() -> None:
    device = FakeDevice()
    ours, _ = session(device)
    ours.probe(3)
    assert all(p.grad is None for p in ours.setup.model.parameters())
    assert device.releases == 1


def test_warnings_of_the_step_are_told() -> None:
    ours, _ = session()
    assert ours.warnings == []
    with torch.no_grad():
        for parameter in ours.setup.model.parameters():
            parameter.fill_(float("nan"))
    ours.probe(3)
    (warning,) = ours.warnings
    assert warning.startswith("the loss is nan on the sample")


def test_what_each_step_leaves_behind_is_told_once() -> None:
    ours, _ = session(FakeDevice(leak=3 * MIB))
    ours.probe(5)
    assert not ours.warnings
    ours.probe(5, confirm=True)
    ours.probe(4, confirm=True)
    assert ours.warnings == [LEAK_WARNING]


def test_a_confirmation_trains_on_batches_of_several_shapes_the_longest_first_and_last() -> None:
    seen: list[int] = []

    def make_batch(batch_size: int, step: int) -> torch.Tensor:
        seen.append(step)
        return torch.ones(batch_size, 4)

    ours, _ = session()
    ours.batches = BatchMaker(make_batch=make_batch)
    ours.probe(2, confirm=True)
    assert seen == [0, 1, 2, 3, 0]
    seen.clear()
    ours.probe(2)
    assert set(seen) == {0}
