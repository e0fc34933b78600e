"""Run probes of one training step in one process: run a size, read the peaks, clean up."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from tenacity import Retrying, retry_if_result, stop_after_attempt

from batchfinder.probing.attempt import Attempt, Run, to_probe
from batchfinder.probing.devices.allocator.recorded import foreseen
from batchfinder.probing.devices.baseline import Baseline
from batchfinder.probing.devices.device import Device, Peaks
from batchfinder.probing.devices.oom import classify, refuse_if_compiler_ran_out
from batchfinder.probing.devices.oom_table import Tier
from batchfinder.probing.host_batches import make_on_host
from batchfinder.probing.late_gradients import late_gradients_warning
from batchfinder.probing.notes import Notes
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.recording import recording
from batchfinder.probing.steadiness import PeakWatch, left_behind, with_room
from batchfinder.probing.too_small import needs_more_than_one_sample, too_small
from batchfinder.results.memory_model import Phase
from batchfinder.results.probe import IN_VALIDATION, LEAK_WARNING, THRASHING_NOTE, VARIED_NOTE
from batchfinder.training.modes.forward_step import STEP_OF_MODE
from batchfinder.training.parallel import forget_compiled
from batchfinder.training.sample import BatchMaker, move_batch
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.step import TrainingStep

# The optimizer allocates its states in its first step, so only the second one shows the peak.
WARM_UP_STEPS = 2
VALIDATIONS = 2  # run at the end of a confirmation; a step follows each, in the memory it left
SMALL = 2  # batch size to train on for gradients and states: some layers refuse 1


class ProbeSession:
    """Runs probes of one training step, one after the other.

    Args:
        setup: the training setup. The first probe moves it to the device.
        batches: makes batches of any size.
        device: the device of the step. Its memory limit is already set.
        budget_bytes: memory that the steps may use. It may be lowered between probes.
        options: the options of the search.
        on_step: called after each step.
        all_agree: asks all ranks that train together; returns True if each says yes.
        make_step: makes the training step; None to choose it by the mode of the options.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        batches: BatchMaker,
        device: Device,
        budget_bytes: int,
        options: ProbeOptions,
        on_step: Callable[[], None] = lambda: None,
        all_agree: Callable[[bool], bool] = bool,
        make_step: Callable[..., TrainingStep] | None = None,
    ) -> None:
        self.setup, self.batches, self.device = setup, batches, device
        self.on_step, self.all_agree = on_step, all_agree
        self.make_step = make_step or STEP_OF_MODE[options.mode]
        self.budget_bytes, self.options = budget_bytes, options
        self.is_used, self._notes = False, Notes()
        self._made_step: TrainingStep | None = None
        self._baseline: Baseline | None = None

    @property
    def _limit_bytes(self) -> int:
        return with_room(self.budget_bytes) if self.batches.varies else self.budget_bytes

    @property
    def warnings(self) -> list[str]:
        """Warnings about the step and its batches."""
        of_step = self._made_step.warnings if self._made_step else []
        return [*self.batches.warnings, *of_step, *self._notes.texts]

    def clean(self) -> None:
        """Release all memory that the last probe left.

        Never call it while an exception is handled, because its frames hold the tensors. Never call
        it after the device's context broke (https://github.com/pytorch/pytorch/issues/25873).
        """
        if self._made_step is not None:
            self._made_step.release()
        forget_compiled()
        gc.collect()
        self.device.release_cache()

    def is_at_baseline(self) -> bool:
        """Return True if the process holds no more memory than before any large probe."""
        return self._baseline is None or self._baseline.is_kept_by(self.device)

    def probe(self, batch_size: int, *, confirm: bool = False) -> Attempt:
        """Run full steps at a batch size until one has the optimizer's states in place.

        To confirm, run them from scratch until the peak is steady, or is foreseen to be.

        Raises:
            Exception: the user's code raised it, and it does not mean out of memory.
        """
        started = time.perf_counter()
        was_clean = (self.device.leaves_no_trace or not self.is_used) and self.is_at_baseline()
        # A probable failure counts if it repeats. When ``sleep`` runs, the failed frame is free.
        retrying = Retrying(
            retry=retry_if_result(lambda run: run.tier is Tier.PROBABLE),
            # No second attempt with other ranks: they wait in the middle of the step.
            stop=stop_after_attempt(1 if self.options.strategy else 2),
            sleep=lambda _: self.clean(),
            retry_error_callback=lambda state: state.outcome and state.outcome.result(),
        )
        run: Run = retrying(self._run, batch_size, confirm)
        if left_behind(run.in_use_after_steps):
            self._notes.add(LEAK_WARNING)
        if not (is_broken := run.tier is Tier.POISONED):
            self.clean()
        if self._baseline is None and run.failure is None and not confirm:
            self._baseline = Baseline.of(self.device, self.budget_bytes)
        probe = to_probe(run, batch_size, confirm, time.perf_counter() - started)
        if confirm and probe.fits:  # the answer is the largest such size
            self._notes.add(self.setup.warning_of(batch_size))
        is_spoilt = run.failure is not None and not self.device.leaves_no_trace
        is_reusable = not is_broken and not is_spoilt and self.is_at_baseline()
        is_believed = was_clean and not (self.options.strategy and run.tier is Tier.PROBABLE)
        recorded = run.recording(probe, batches_vary=self.batches.varies)
        return Attempt(probe, is_believed, is_reusable, is_broken, recording=recorded)

    def _run(self, batch_size: int, confirm: bool) -> Run:
        handled = sys.exc_info()[1]  # the caller handles it: not an error of the step
        run = Run(tries_kernels=torch.backends.cudnn.benchmark and self.device.leaves_no_trace)
        run.steps_differ = self.batches.varies and self.device.leaves_no_trace
        limit = self.device.limited_to(self._limit_bytes) if run.steps_differ else nullcontext()
        try:
            with torch.inference_mode(False), torch.enable_grad(), limit:
                (self._confirm if confirm else self._probe)(batch_size, run)
                self._step_of_setup.check_loss()
                self._step_of_setup.check_optimizers()
        except Exception as error:
            run.failure = classify(error, handled)
            # No kernel, as of bf16 on a T4: a first size fails, with most of the memory free.
            is_first = self._baseline is None and self.options.warm_up_batch_size is None
            has_room = self.device.kept_bytes() < self.budget_bytes / 2
            is_cuda = self.device.torch_device.type == "cuda"
            if not run.failure or (run.tier is Tier.PROBABLE and is_first and has_room and is_cuda):
                if needs_more_than_one_sample(error, handled):
                    raise too_small(batch_size) from error
                if self.device.torch_device.type == "cpu":
                    refuse_if_compiler_ran_out(error, self.budget_bytes)
                raise
        if run.tier not in (None, Tier.POISONED):
            try:
                self._read_peaks(run)  # waiting for the device may bring another error of the step
            except RuntimeError as error:
                if (shown := classify(error)) is None:
                    raise
                run.failure = shown
        return run

    @property
    def _step_of_setup(self) -> TrainingStep:
        # Made in the first probe: a model too large for the device is an OOM like any other.
        if self._made_step is None:
            self._made_step = self.make_step(
                self.setup,
                self.device.torch_device,
                precision=self.options.precision,
                compiled=self.options.compiled,
                accumulate=self.options.accumulate,
                batch_dim=self.options.batch_dim,
                strategy=self.options.strategy,
                eval_batch_size=self.options.eval_batch_size,
            )
        return self._made_step

    def _probe(self, batch_size: int, run: Run) -> None:
        smallest = self.options.warm_up_batch_size
        needs_warm_up = not self.is_used and self.device.leaves_no_trace
        if needs_warm_up and smallest is not None and smallest < batch_size:
            warm_up = Run()
            self._steps(smallest, WARM_UP_STEPS, warm_up)
            run.samples += warm_up.samples
            self.clean()
            self._baseline = Baseline.of(self.device, self.budget_bytes)
        self._steps(batch_size, 1 if self.is_used and not run.tries_kernels else WARM_UP_STEPS, run)

    def _steps(self, batch_size: int, steps: int, run: Run) -> None:
        next_batch = partial(self._begin(batch_size, is_first=not self.is_used), 0)
        for _ in range(steps):
            peak = self._step(batch_size, next_batch, run)
        if self.device.leaves_no_trace and not self.all_agree(not run.allocation_retries):
            self._step(batch_size, next_batch, run)  # without flushing the allocator's cache
        self._validate(run)
        is_over = self.batches.varies and peak > self._limit_bytes
        run.note = THRASHING_NOTE if run.allocation_retries else VARIED_NOTE if is_over else ""

    def _begin(self, batch_size: int, *, is_first: bool) -> Callable[[int], Any]:
        begin = partial(self._step_of_setup.begin, batch_size, is_first=is_first)
        try:
            begin(lambda: self._loader(SMALL)(0))
        except Exception as error:
            if self.options.smallest <= SMALL or classify(error) is not None:
                raise
            begin(lambda: self._loader(self.options.smallest)(0))  # SMALL is too small
        return self._loader(batch_size)

    def _loader(self, batch_size: int, batches: BatchMaker | None = None) -> Callable[[int], Any]:
        """Return a function that moves the batch of a step, by its number, to the device."""
        device, batches = self.device.torch_device, batches or self.batches
        is_cpu = device.type == "cpu"
        make = batches.make if is_cpu else partial(make_on_host, batches, self.options.smallest)
        if is_cpu or batches.varies:
            return lambda step: move_batch(make(batch_size, step=step), device)
        host_batch = make(batch_size)  # once; each step copies it
        return lambda _: move_batch(host_batch, device)

    def _confirm(self, batch_size: int, run: Run) -> None:
        next_batch = self._begin(batch_size, is_first=True)
        memory_bytes = self.budget_bytes / (1 - self.options.headroom)
        watch = PeakWatch(
            self.budget_bytes,
            least_steps=self.options.confirm_steps,
            peaks_wander=not self.device.leaves_no_trace,
            headroom_bytes=memory_bytes - self.budget_bytes,
            batches_vary=self.batches.varies,
        )
        with recording(self.device.torch_device) as run.recorder:
            recorder = run.recorder
            for _ in range(watch.most_steps):
                peak = self._step(batch_size, partial(next_batch, watch.batch_number), run)
                run.steps_differ |= recorder.end_step()  # by layers skipped at random, for example
                if run.steps_differ:
                    watch.expect_variation(lengths_differ=self.batches.varies)
                watch.note(peak, run.allocation_retries)
                watch = foreseen(recorder.recording, watch, self._limit_bytes)
                if self.all_agree(watch.is_over):  # ranks end together, each judged by itself
                    break
            for _ in range(VALIDATIONS if self._step_of_setup.eval_batch_size else 0):
                self._validate(run)
                self._step(batch_size, partial(next_batch, 0), run)
                recorder.end_validation()
        run.note = watch.objection()
        if self.batches.varies:
            self._notes.add(self.device.shapes_warning(run.in_use_after_steps))
        is_alone = self.options.mode == "train" and not self.options.strategy
        if is_alone and not run.note:
            self._notes.add(late_gradients_warning(self._step_of_setup, run, memory_bytes))

    def _step(self, batch_size: int, next_batch: Callable[[], Any], run: Run) -> int:
        """Run one step and return its peak memory in bytes."""
        step = self._step_of_setup
        self.is_used = True
        run.begin_step(batch_size * step.micro_batches)
        started = time.perf_counter()
        retries = self.device.allocation_retries()
        hooks = [lambda: self._read(Phase.FORWARD, run)] if self.device.leaves_no_trace else []
        self.device.reset_peaks()
        for batch in step.fetch(next_batch):
            step.forward_backward(batch, *hooks)
            hooks = []  # gradients are alive from here on
            del batch  # the step keeps it as long as training would
        peak = self._read(Phase.FORWARD_BACKWARD, run)
        self.device.reset_peaks()
        step.optimizer_step()
        peak = max(peak, self._read(Phase.OPTIMIZER_STEP, run))
        run.allocation_retries = self.device.allocation_retries() - retries
        run.steps_seconds.append(time.perf_counter() - started)
        run.in_use_after_steps.append(self.device.in_use_bytes())
        self.on_step()
        return peak

    def _validate(self, run: Run) -> None:
        """Run the validation that follows a step, if there is one."""
        step = self._step_of_setup
        if step.eval_batch_size:
            next_batch = self._loader(step.eval_batch_size, step.eval_batches)
            run.where = IN_VALIDATION
            self.device.reset_peaks()
            step.validate(lambda: next_batch(0))
            self._read(Phase.VALIDATION, run)
            run.where = ""

    def _read(self, phase: Phase, run: Run) -> int:
        peaks = self._read_peaks(run)
        run.phase_peak_bytes[phase] = max(run.phase_peak_bytes.get(phase, 0), peaks.allocated_bytes)
        return peaks.reserved_bytes

    def _read_peaks(self, run: Run) -> Peaks:
        peaks = self.device.peaks()
        run.allocated_bytes = max(run.allocated_bytes, peaks.allocated_bytes)
        run.reserved_bytes = max(run.reserved_bytes, peaks.reserved_bytes)
        run.outside_bytes = peaks.outside_bytes
        return peaks
