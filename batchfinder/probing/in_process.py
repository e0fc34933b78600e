"""Probing in the user's own process, leaving everything as it was."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from torch.optim import Optimizer

from batchfinder.errors import BatchTooSmallError, DeviceError
from batchfinder.probing.attempt import Attempt
from batchfinder.probing.devices.baseline import Baseline
from batchfinder.probing.devices.choose import choose_device
from batchfinder.probing.devices.collector import older_objects_spared
from batchfinder.probing.devices.device import budget
from batchfinder.probing.devices.versions import versions
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.session import ProbeSession
from batchfinder.results.result import Outcome, Probe
from batchfinder.training.sample import BatchMaker
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.state.process_settings import generator, undone
from batchfinder.training.state.reach import reachable
from batchfinder.training.state.snapshot import Snapshot, preserved_state

NOT_CLEAN_WARNING = (
    "an earlier probe left memory in use, or holes in it, so the answer may be too small; "
    "use isolate=True, or batchfinder find, for a fresh process per probe"
)


class InProcessProber:
    """Tries sizes in this process; see :class:`~batchfinder.search.prober.Prober`.

    While it is open, the model is on the device and memory is limited to the budget. Closing it
    brings back the model, the optimizer and the random generators bit for bit, and the limit.

    Args:
        setup: what to train.
        options: of the search.
        on_step: called as each step ends.

    Raises:
        SampleError, StepError, DeviceError, UsageError: as the parts of the setup do.
        DeviceError: on a probe that broke the device for this process, a device-side assert, say.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        options: ProbeOptions,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.setup = setup
        self._on_step = on_step
        self.options = options
        self.warnings: tuple[str, ...] = ()
        self._device = choose_device(options.device, setup.model)
        self.device = self._device.name
        gc.collect()  # tensors in cycles that an earlier failure left are nobody's any more
        memory = self._device.memory()
        self.capacity_bytes = memory.capacity_bytes
        self.used_by_others_bytes = memory.used_by_others_bytes
        self.budget_bytes = options.budget_bytes or budget(
            memory, options.memory_limit, options.headroom
        )
        self._batches = BatchMaker(
            setup.sample, make_batch=setup.make_batch, batch_dim=options.batch_dim
        )
        self.is_repeatable = self._device.leaves_no_trace
        self.versions = versions()
        self._opened = ExitStack()
        self._spared = ExitStack()  # closed after all else
        self._state: Snapshot | None = None
        self._session: ProbeSession | None = None
        self._baseline: Baseline | None = None
        self._was_clean = True
        if self._device.limit_warning:
            self.warn(self._device.limit_warning)

    def probe(self, batch_size: int, *, confirm: bool = False) -> Probe:
        if confirm:
            # From scratch: what earlier probes left in the optimizer and the allocator is undone.
            self.start_over()
        attempt = self.attempt(batch_size, confirm)
        if attempt.is_broken:
            raise self._given_up(attempt.probe)
        if confirm:
            # A probe needs the warm-up that a confirmation goes without.
            self.start_over()
        if attempt.probe.outcome is Outcome.OOM and not attempt.was_clean:
            self.warn(NOT_CLEAN_WARNING)
        return attempt.probe

    def attempt(self, batch_size: int, confirm: bool) -> Attempt:
        """Try a size, and say of this process whether it is fit for more.

        Starting over before a confirmation, and after it, is the caller's.

        Raises:
            BatchTooSmallError: a layer needs more than one example.
            DeviceError: the limit cannot be set, or keeps a compiler from its work.
            Exception: what the user's code raised, unless that means out of memory.
        """
        session = self._session or self._open()
        try:
            attempt = session.confirm(batch_size) if confirm else session.probe(batch_size)
        except BatchTooSmallError:
            self.close()  # a larger batch is tried from scratch
            raise
        finally:
            for warning in session.warnings:
                self.warn(warning)
        if attempt.probe.fits and self.options.warm_up_batch_size is None:
            self.options = replace(self.options, warm_up_batch_size=batch_size)
        return replace(attempt, was_clean=attempt.was_clean and self._was_clean)

    def close(self) -> None:
        was_open = self._state is not None
        with self._spared:
            try:
                if self._session is not None:
                    self._session.clean()
            finally:
                self._session = self._state = None
                self._opened.close()
            if was_open:
                # Only now nothing holds the optimizer's states any more, nor a model that has left
                # the device; a wrapper around the model, with its buckets, lies in cycles.
                gc.collect()
                self._device.release_cache()

    def start_over(self) -> bool:
        """Undo what probes left in the model, the optimizer and the allocator.

        Returns:
            Whether the device holds no more than before the first of them.

        Raises:
            DeviceError: not all could be put back.
        """
        if self._session is None or self._state is None:
            return self._was_clean
        self._session.clean()
        self._session = None
        gc.collect()  # for the user's gradients to find room, which come back
        self._state.start_over()
        gc.collect()
        self._device.release_cache()
        self._was_clean = self._baseline is None or self._baseline.is_kept_by(self._device)
        return self._was_clean

    def _open(self) -> ProbeSession:
        """A session from scratch."""
        if self._state is None:
            self._set_out()
        self._session = self._new_session()
        return self._session

    def _set_out(self) -> None:
        """Note all that probes may change, and limit the memory."""
        device = self._device.torch_device
        optimizer = self.setup.optimizer if isinstance(self.setup.optimizer, Optimizer) else None
        # Functions may train more than the model: the discriminator of a GAN, the copy of an EMA.
        touched = (self.setup.model, self.setup.loss_fn, self.setup.step, optimizer)
        with ExitStack() as spared, ExitStack() as opened:
            spared.enter_context(older_objects_spared())
            state = opened.enter_context(preserved_state(*touched, device=device))
            # Nor does making batches change more than its random numbers, which others draw from.
            made_by = reachable((self.setup.make_batch,))
            opened.enter_context(undone([put for thing in made_by for put in generator(thing)]))
            # What is cached lies outside the limit, and where probes find it no fresh allocator.
            self._device.release_cache()
            opened.enter_context(self._device.limited_to(self.budget_bytes))
            self._baseline = Baseline.of(self._device, self.budget_bytes)
            self._opened, self._spared = opened.pop_all(), spared.pop_all()
        self._state = state

    def _new_session(self) -> ProbeSession:
        return ProbeSession(
            self.setup,
            self._batches,
            self._device,
            self.budget_bytes,
            self.options,
            self._on_step,
        )

    def _given_up(self, probe: Probe) -> DeviceError:
        """Put back what can be put back without the device, and say what to do."""
        self._session = self._state = None
        error = DeviceError(
            f"a batch of {probe.batch_size} broke the device for this process ({probe.note}); "
            "start the process again, with isolate=True, or use batchfinder find: they try each "
            "size in a process that may break"
        )
        with self._spared:
            try:
                self._opened.close()
            except (DeviceError, RuntimeError) as failure:
                error.__cause__ = failure
        return error

    def warn(self, warning: str) -> None:
        """Add a warning to those of the result, once."""
        if warning not in self.warnings:
            self.warnings += (warning,)
