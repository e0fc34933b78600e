"""Probing in the user's own process, leaving everything as it was."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from torch.optim import Optimizer

from batchfinder.probing.attempt import Attempt
from batchfinder.probing.device import budget
from batchfinder.probing.devices import choose_device
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.session import ProbeSession
from batchfinder.probing.versions import versions
from batchfinder.result import Outcome, Probe
from batchfinder.training.sample import BatchMaker, find_sample
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.state import preserved_state

NOT_CLEAN_WARNING = (
    "an earlier probe left holes in this process's memory, so the answer may be too small; "
    "use isolate=True, or batchfinder find, for a fresh process per probe"
)


class InProcessProber:
    """Tries sizes in this process; see :class:`~batchfinder.probing.prober.Prober`.

    While it is open, the model is on the device and memory is limited to the budget. Closing it
    brings back the model, the optimizer and the random generators bit for bit, and the limit.

    Args:
        setup: what to train.
        options: of the search.

    Raises:
        SampleError, StepError, DeviceError, UsageError: as the parts of the setup do.
    """

    def __init__(self, setup: TrainingSetup, options: ProbeOptions) -> None:
        self.setup = setup
        self.options = options
        self.warnings: tuple[str, ...] = ()
        self._device = choose_device(options.device, setup.model)
        self.device = self._device.name
        memory = self._device.memory()
        self.capacity_bytes = memory.capacity_bytes
        self.used_by_others_bytes = memory.used_by_others_bytes
        self.budget_bytes = options.budget_bytes or budget(
            memory, options.memory_limit, options.headroom
        )
        found = find_sample(setup)
        if found.warning:
            self.warn(found.warning)
        self._batches = BatchMaker(
            found.sample, make_batch=setup.make_batch, batch_dim=options.batch_dim
        )
        self.is_repeatable = self._device.leaves_no_trace
        self.versions = versions()
        self._opened = ExitStack()
        self._session: ProbeSession | None = None
        if self._device.limit_warning:
            self.warn(self._device.limit_warning)

    def probe(self, batch_size: int, *, confirm: bool = False) -> Probe:
        if confirm:
            # From scratch: what earlier probes left in the optimizer and the allocator is undone.
            self.close()
        session = self._session or self._open()
        try:
            attempt = session.confirm(batch_size) if confirm else session.probe(batch_size)
        finally:
            for warning in session.warnings:
                self.warn(warning)
        if attempt.probe.fits and self.options.warm_up_batch_size is None:
            self.options = replace(self.options, warm_up_batch_size=batch_size)
        self._judge(attempt)
        return attempt.probe

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.clean()
        self._opened.close()

    def _open(self) -> ProbeSession:
        device = self._device.torch_device
        optimizer = self.setup.optimizer if isinstance(self.setup.optimizer, Optimizer) else None
        # A loss function may be a module, with buffers and random numbers of its own.
        touched = (self.setup.model, self.setup.loss_fn, optimizer)
        with ExitStack() as opened:
            opened.enter_context(preserved_state(*touched, device=device))
            opened.enter_context(self._device.limited_to(self.budget_bytes))
            self._session = self._new_session()
            self._opened = opened.pop_all()
        return self._session

    def _new_session(self) -> ProbeSession:
        return ProbeSession(
            self.setup, self._batches, self._device, self.budget_bytes, self.options
        )

    def _judge(self, attempt: Attempt) -> None:
        if attempt.probe.outcome is Outcome.OOM and not attempt.was_clean:
            self.warn(NOT_CLEAN_WARNING)

    def warn(self, warning: str) -> None:
        """Add a warning to those of the result, once."""
        if warning not in self.warnings:
            self.warnings += (warning,)
