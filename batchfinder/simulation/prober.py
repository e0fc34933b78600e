"""A prober whose device is on paper."""

from __future__ import annotations

import math
import time

from batchfinder.errors import DeviceError
from batchfinder.probing.devices.versions import versions
from batchfinder.probing.options import ProbeOptions
from batchfinder.results.memory_model import Phase
from batchfinder.results.result import THRASHING_NOTE, Outcome, Probe
from batchfinder.simulation.allocator.caching import AllocatorSettings, CachingAllocator
from batchfinder.simulation.allocator.expandable import ExpandableAllocator
from batchfinder.simulation.gpus import Gpu
from batchfinder.simulation.replay import Replay, replay
from batchfinder.simulation.trace.trace import Stage
from batchfinder.simulation.tracing.step_trace import STEPS, StepTraces
from batchfinder.units import format_bytes

NO_ROOM = -1.0

# Where no trace tells the others, each size is traced by itself, and a batch of it made for that:
# no size is more than so many times one that fits.
GROWTH_UNTOLD = 16

STAGES_OF_PHASE = {
    Phase.FORWARD: (Stage.SETUP, Stage.FORWARD),
    Phase.FORWARD_BACKWARD: (Stage.SETUP, Stage.FORWARD, Stage.BACKWARD),
    Phase.OPTIMIZER_STEP: (Stage.OPTIMIZER,),
}


class SimulatedProber:
    """Tries sizes on a simulated GPU; see :class:`~batchfinder.search.prober.Prober`.

    Args:
        traces: of the steps to run.
        gpu: where they would run.
        options: of the search; of these, ``memory_limit`` and ``headroom`` count here.
        settings: of the caching allocator.

    Raises:
        DeviceError: the limit leaves nothing to train in.
    """

    def __init__(
        self,
        traces: StepTraces,
        gpu: Gpu,
        options: ProbeOptions,
        settings: AllocatorSettings | None = None,
    ) -> None:
        self.traces = traces
        self.gpu = gpu
        self.device = f"{gpu.name} (simulated)"
        self.is_repeatable = True
        self.used_by_others_bytes = 0
        self.versions = versions()
        self._settings = settings or AllocatorSettings()
        self.capacity_bytes = min(options.memory_limit or gpu.total_bytes, gpu.total_bytes)
        usable = self.capacity_bytes - gpu.overhead_bytes
        if usable <= 0:
            raise DeviceError(
                f"{format_bytes(self.capacity_bytes)} is not more than the overhead of a process, "
                f"{format_bytes(gpu.overhead_bytes)}; raise the memory or lower the overhead"
            )
        self.budget_bytes = math.floor(usable * (1 - options.headroom))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know."""
        return tuple(self.traces.warnings)

    def probe(self, batch_size: int, *, confirm: bool = False) -> Probe:
        """Run one batch size on paper; a confirmation is the same run."""
        return self.probe_with_room(batch_size, confirm=confirm)[0]

    def probe_with_room(self, batch_size: int, *, confirm: bool = False) -> tuple[Probe, float]:
        """A probe, and the :attr:`~batchfinder.simulation.replay.Replay.room` that it showed.

        A size that runs only by flushing the allocator's cache in every step is refused, as it is
        on a device: it has about one example too many.
        """
        started = time.perf_counter()
        run = self.replay(batch_size)
        phases = phase_peaks(run)
        # What is reserved decides; it is all taken by the end of the backward pass.
        phases[Phase.FORWARD_BACKWARD] = run.peak_reserved_bytes
        note, room = "", run.room
        if not run.fits:
            note = "out of memory"
        elif run.retries:
            note, room = THRASHING_NOTE, NO_ROOM
        if not self.traces.are_general:
            room = min(room, (GROWTH_UNTOLD - 1) * batch_size)
        probe = Probe(
            batch_size,
            Outcome.OOM if note else Outcome.FITS,
            steps=STEPS,
            samples=batch_size * STEPS,
            seconds=time.perf_counter() - started,
            peak_allocated_bytes=run.peak_allocated_bytes,
            peak_reserved_bytes=run.peak_reserved_bytes,
            phase_peak_bytes=phases,
            allocation_retries=run.retries if run.fits else 0,
            confirmed=confirm,
            note=note,
        )
        return probe, room

    def replay(self, batch_size: int) -> Replay:
        """The steps at a batch size, in a fresh allocator of this GPU's budget."""
        allocator = ExpandableAllocator if self._settings.expandable_segments else CachingAllocator
        trace = self.traces.at(batch_size)
        device = allocator(self.budget_bytes, self._settings)
        return replay(trace, batch_size, device, self.gpu)

    def close(self) -> None:
        """Nothing is held."""


def phase_peaks(run: Replay) -> dict[Phase, int]:
    """Most bytes in use in each phase of the memory model."""
    peaks = {
        phase: [run.stage_peak_bytes[stage] for stage in stages if stage in run.stage_peak_bytes]
        for phase, stages in STAGES_OF_PHASE.items()
    }
    return {phase: max(of_stages) for phase, of_stages in peaks.items() if of_stages}
