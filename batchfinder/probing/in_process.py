"""Probing in the user's own process, leaving everything as it was."""

from __future__ import annotations

from contextlib import ExitStack

from torch.optim import Optimizer

from batchfinder.probing.device import budget
from batchfinder.probing.devices import choose_device
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.session import Attempt, ProbeSession
from batchfinder.probing.versions import versions
from batchfinder.result import Outcome, Probe
from batchfinder.training.sample import BatchMaker
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.state import preserved_state
from batchfinder.training.step import TrainingStep

NOT_CLEAN_WARNING = (
    "an earlier out-of-memory left holes in this process's memory, so the answer may be too small; "
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
        self.memory = self._device.memory()
        self.budget_bytes = options.budget_bytes or budget(
            self.memory, options.memory_limit, options.headroom
        )
        self._batches = BatchMaker(
            setup.sample, make_batch=setup.make_batch, batch_dim=options.batch_dim
        )
        self.versions = versions()
        self._opened = ExitStack()
        self._session: ProbeSession | None = None
        self._a_confirmation_failed = False
        if self._device.limit_warning:
            self.warn(self._device.limit_warning)

    def probe(self, batch_size: int, *, confirm: bool = False) -> Probe:
        if confirm:
            # From scratch: what earlier probes left in the optimizer and the allocator is undone.
            self.close()
        session = self._session or self._open(confirm)
        try:
            attempt = session.confirm(batch_size) if confirm else session.probe(batch_size)
        finally:
            for warning in session.step.warnings:
                self.warn(warning)
        if confirm:
            self.close()  # a probe has the limit of probes
            self._a_confirmation_failed |= not attempt.probe.fits
        self._judge(attempt)
        return attempt.probe

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.clean()
        self._opened.close()

    def _open(self, confirm: bool) -> ProbeSession:
        limit_bytes = self.budget_bytes
        if confirm and not self._a_confirmation_failed:
            limit_bytes = self._device.first_confirmation_limit(limit_bytes, self.options.headroom)
        device = self._device.torch_device
        optimizer = self.setup.optimizer if isinstance(self.setup.optimizer, Optimizer) else None
        with ExitStack() as opened:
            opened.enter_context(preserved_state(self.setup.model, optimizer, device=device))
            opened.enter_context(self._device.limited_to(limit_bytes))
            step = TrainingStep(
                self.setup,
                device,
                precision=self.options.precision,
                compiled=self.options.compiled,
                batch_dim=self.options.batch_dim,
            )
            self._session = ProbeSession(
                step, self._batches, self._device, self.budget_bytes, self.options
            )
            self._opened = opened.pop_all()
        return self._session

    def _judge(self, attempt: Attempt) -> None:
        if attempt.probe.outcome is Outcome.OOM and not attempt.was_clean:
            self.warn(NOT_CLEAN_WARNING)

    def warn(self, warning: str) -> None:
        """Add a warning to those of the result, once."""
        if warning not in self.warnings:
            self.warnings += (warning,)
