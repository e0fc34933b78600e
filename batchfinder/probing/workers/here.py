"""A worker in this process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from batchfinder.errors import DeviceError
from batchfinder.probing.attempt import Attempt
from batchfinder.probing.devices.allocator.recorded_step import steps_differ
from batchfinder.probing.devices.baseline import Baseline
from batchfinder.probing.devices.choose_device import choose_device
from batchfinder.probing.devices.collector import older_objects_spared
from batchfinder.probing.devices.device import budget
from batchfinder.probing.devices.versions import versions
from batchfinder.probing.host_batches import check_room_for_copies
from batchfinder.probing.notes import Notes
from batchfinder.probing.place import Place, lowered
from batchfinder.probing.session import ProbeSession
from batchfinder.probing.steadiness import DIFFERING_STEPS
from batchfinder.probing.workers.worker import Order, Ranks, Worker
from batchfinder.results.probe import Outcome, Probe
from batchfinder.training.optimizer import find_optimizer
from batchfinder.training.sample import BatchMaker
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.state.process_settings import generator, host_numbers, undone
from batchfinder.training.state.reach import reachable
from batchfinder.training.state.snapshot import Snapshot, preserved_state


class Here(Worker):
    """A worker in this process; see :class:`~batchfinder.probing.workers.worker.Worker`.

    In the user's own process, the model is on the device and memory is limited to the budget while
    the worker is open. Ending it restores the model, the optimizer and the random generators bit
    for bit, and the old limit. A process that only serves as a worker restores what the next probe
    needs.

    Args:
        setup: the training setup.
        on_step: called after each step.
        is_replaceable: True if this process only serves as a worker and may be ended.
        ranks: the ranks of the process group that it has joined; None if it trains alone.

    Raises:
        SampleError, StepError, DeviceError, UsageError: on start, a part of the setup is unusable.
        DeviceError: an attempt broke the device, and this process cannot be replaced.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        *,
        on_step: Callable[[], None] = lambda: None,
        is_replaceable: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self.is_replaceable = is_replaceable
        self._setup, self._on_step, self._ranks = setup, on_step, ranks
        self.notes = Notes()
        self._opened = ExitStack()
        self._spared = ExitStack()  # closed last
        self._state: Snapshot | None = None
        self._session: ProbeSession | None = None
        self._baseline: Baseline | None = None
        self._is_open = False
        self._was_clean = True
        self._left_memory = False
        self._differs = self._is_shown = False  # whether steps make the same requests

    def start(self, order: Order) -> Place:
        self._options = options = order.options
        self._least_steps = options.confirm_steps
        self._device = choose_device(options.device, self._setup.model)
        gc.collect()  # frees tensors in cycles that an earlier failure left
        # A model that stays on the device until the process ends needs no copy.
        self._restores = not self.is_replaceable or (
            self._device.leaves_no_trace and self._ranks is None
        )
        if isinstance(self._setup.optimizer, str):
            find_optimizer(self._setup.optimizer)  # reports a wrong name at once
        self._batches = BatchMaker.of(self._setup, options.batch_dim)
        memory = self._device.memory()
        self._outside_bytes = memory.used_by_others_bytes + memory.context_bytes
        facts: dict[str, str] = {}
        if self._ranks is not None:
            from batchfinder.probing.workers.group import facts_of, shared

            if self._device.torch_device.type == "cpu":
                memory, options = shared(memory, options, self._ranks.local_world_size)
            facts = facts_of(self._setup, self._batches, self._device)
        self.place = Place(
            device=self._device.name,
            capacity_bytes=memory.capacity_bytes,
            used_by_others_bytes=memory.used_by_others_bytes,
            budget_bytes=options.budget_bytes
            or budget(memory, options.memory_limit, options.headroom),
            is_repeatable=self._device.leaves_no_trace,
            versions=versions(),
            limit_warning=self._device.limit_warning,
            facts=facts,
            batches_vary=self._batches.varies,
            sample_size=self._batches.batch_size,
        )
        return self.place

    def attempt(self, batch_size: int, confirm: bool) -> Attempt:
        started = time.perf_counter()
        # A confirmation starts without the traces of earlier probes in optimizer and allocator. So
        # does any probe after a failed one that left memory: a module may keep the output of that
        # step, and with it the whole graph. Ranks start over together, so not for this reason.
        starts_over = (confirm or self._left_memory) and self._restores
        if starts_over and not self._is_renewed() and self.is_replaceable:
            unfit = Probe(batch_size, Outcome.OOM, steps=0, seconds=0.0, confirmed=confirm)
            return Attempt(unfit, is_believed=False, is_reusable=False)
        if not self._is_open:
            self._set_out()
        self._session = self._session or self._new_session()
        attempt = self._tried(self._session, batch_size, confirm)
        if attempt.probe.fits and self._options.warm_up_batch_size is None:
            self._options = replace(self._options, warm_up_batch_size=batch_size)
            if self._exceeds_lowered_budget(self._session, attempt.probe):
                return self.attempt(batch_size, confirm)
        is_reusable = attempt.is_reusable
        self._left_memory = not is_reusable and self._ranks is None
        if confirm:
            # A later probe needs a warm-up again, because a confirmation has none.
            is_reusable &= self._restores and self._is_renewed()
        return replace(
            attempt,
            is_believed=attempt.is_believed and self._was_clean,
            is_reusable=is_reusable,
            warnings=self.notes.texts,
            restoring_seconds=time.perf_counter() - started - attempt.probe.seconds,
            budget_bytes=self.place.budget_bytes,
        )

    def _tried(self, session: ProbeSession, batch_size: int, confirm: bool) -> Attempt:
        drawn = host_numbers()
        try:
            attempt = session.probe(batch_size, confirm=confirm)
        except Exception:
            self.end()  # another batch starts from scratch
            raise
        finally:
            self.notes.add(*session.warnings)
        if attempt.is_broken and not self.is_replaceable:
            raise self._given_up(attempt.probe)
        if confirm and attempt.probe.fits:
            recorded = attempt.recording
            self._differs |= recorded is not None and steps_differ(recorded)
            self._is_shown = True
        # Two steps may be alike by chance, so confirmations run more steps of a model that skips
        # layers at random. To do so it draws numbers on the host. The first confirmation shows it.
        may_differ = self._differs or (not self._is_shown and drawn != host_numbers())
        # Batches of varying length come in rounds; more steps would repeat them.
        may_differ &= self._device.leaves_no_trace and not session.batches.varies
        least_steps = DIFFERING_STEPS if may_differ else 0
        least_steps = max(least_steps, self._least_steps)
        self._options = replace(self._options, confirm_steps=least_steps)
        return attempt

    def _exceeds_lowered_budget(self, session: ProbeSession, probe: Probe) -> bool:
        """Leave room for what the first steps use outside the allocator.

        Return True if this probe did not, so it has to run again. Ranks cannot do so alone.
        """
        grown_bytes = (probe.outside_bytes or 0) - self._outside_bytes
        budget_bytes = lowered(session.budget_bytes, grown_bytes, self._options.headroom)
        if budget_bytes == session.budget_bytes:
            return False
        session.budget_bytes = budget_bytes
        self.place = replace(self.place, budget_bytes=budget_bytes)
        self._opened.enter_context(self._device.limited_to(budget_bytes))
        return self._ranks is None and (probe.peak_reserved_bytes or 0) > budget_bytes

    def limit_lifted_on_heap(self) -> AbstractContextManager[None]:
        """Lift the memory limit for a block if memory is from a heap, where frees leave holes."""
        if self._device.leaves_no_trace:
            return nullcontext()
        return self._device.limited_to(self.place.capacity_bytes)

    def fingerprint(self) -> dict[str, Any] | None:
        from batchfinder.probing.fingerprint import fingerprint
        from batchfinder.probing.workers.setup_source import files_read

        try:
            return fingerprint(self._setup, files_read)
        except Exception:  # noqa: BLE001 - the user's classes may raise anything
            return None

    def end(self) -> None:
        was_open, self._is_open = self._is_open, False
        with self._spared:
            try:
                if self._session is not None:
                    self._session.clean()
            finally:
                self._session = self._state = None
                self._opened.close()
            if was_open:
                # Only now does nothing hold the optimizer's states or the model's old memory on the
                # device. A wrapper around the model, with its buckets, is part of cycles.
                gc.collect()
                self._device.release_cache()

    def _is_renewed(self) -> bool:
        """Undo what probes changed in model, optimizer and allocator; return True if all is undone.

        Raises:
            DeviceError: not everything was restored, and this process cannot be replaced.
        """
        if self._session is None or self._state is None:
            return self._was_clean
        try:
            self._session.clean()
            self._session = None
            self._state.start_over()
        except DeviceError:
            if not self.is_replaceable:
                raise
            return False
        gc.collect()
        self._device.release_cache()
        self._was_clean = self._baseline is None or self._baseline.is_kept_by(self._device)
        return self._was_clean

    def _set_out(self) -> None:
        """Save everything that probes may change, and limit the memory."""
        with ExitStack() as spared, ExitStack() as opened:
            spared.enter_context(older_objects_spared())
            if self._restores:
                self._state = opened.enter_context(self._preserved())
                # Restore the random generators that make_batch uses too.
                made_by = reachable((self._setup.make_batch,))
                opened.enter_context(undone([put for thing in made_by for put in generator(thing)]))
                # The limit ignores memory that is cached already. Probes need a fresh allocator.
                self._device.release_cache()
            opened.enter_context(self._device.limited_to(self.place.budget_bytes))
            if self._restores:
                self._baseline = Baseline.of(self._device, self.place.budget_bytes)
            self._opened, self._spared = opened.pop_all(), spared.pop_all()
        self._is_open = True

    def _preserved(self) -> AbstractContextManager[Snapshot]:
        setup = self._setup
        optimizer = setup.optimizer if isinstance(setup.optimizer, Optimizer) else None
        check_room_for_copies(setup.model, optimizer)
        # Functions may train more than the model, such as a GAN's discriminator or an EMA's copy.
        touched = (setup.model, setup.loss_fn, setup.step, optimizer)
        moved = [part for part in (setup.model, setup.loss_fn) if isinstance(part, nn.Module)]
        return preserved_state(*touched, device=self._device.torch_device, moved=moved)

    def _new_session(self) -> ProbeSession:
        ranks = self._ranks or Ranks(1, bool)
        make_step = ranks.make_step
        if make_step is not None:
            make_step = partial(make_step, self._batches, self._options.warm_up_batch_size)
        return ProbeSession(
            self._setup,
            self._batches,
            self._device,
            self.place.budget_bytes,
            self._options,
            self._on_step,
            ranks.all_agree,
            make_step,
        )

    def _given_up(self, probe: Probe) -> DeviceError:
        """Restore what can be restored without the device; return an error with advice."""
        self._session = self._state = None
        self._is_open = False
        error = DeviceError(
            f"a batch of {probe.batch_size} broke the device for this process ({probe.note}). "
            "Try batchfinder find in a new process: it tries each size in a process that may break"
        )
        with self._spared:
            try:
                self._opened.close()
            except (DeviceError, RuntimeError) as failure:
                error.__cause__ = failure
        return error
