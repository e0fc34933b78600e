"""A prober whose device is simulated."""

from __future__ import annotations

import math
import time

from batchfinder.errors import DeviceError
from batchfinder.probing.devices.allocator.caching import AllocatorSettings
from batchfinder.probing.devices.allocator.expandable import allocator_of
from batchfinder.probing.devices.versions import versions
from batchfinder.probing.options import ProbeOptions
from batchfinder.results.memory_model import Phase
from batchfinder.results.probe import THRASHING_NOTE, Outcome, Probe
from batchfinder.simulation.gpus import Gpu
from batchfinder.simulation.replay import ReplayResult, replay
from batchfinder.simulation.trace.trace import Stage
from batchfinder.simulation.tracing.step_trace import STEPS, StepTraces
from batchfinder.units import format_bytes

NO_ROOM = -1.0

# If traces do not generalize, each size is traced by itself with a real batch in host memory. No
# size is then more than this factor above one that fits.
GROWTH_UNTOLD = 16

STAGES_OF_PHASE = {
    Phase.FORWARD: (Stage.SETUP, Stage.FORWARD),
    Phase.FORWARD_BACKWARD: (Stage.SETUP, Stage.FORWARD, Stage.BACKWARD),
    Phase.OPTIMIZER_STEP: (Stage.OPTIMIZER,),
}


class SimulatedProber:
    """A :class:`~batchfinder.search.prober.Prober` of a simulated GPU.

    Of the options, only ``memory_limit`` and ``headroom`` matter here.
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
        self.may_expand = False
        self.seconds_by_part: dict[str, float] = {}
        self.recordings = None
        self.used_by_others_bytes = 0
        self.versions = versions()
        self._settings = settings or AllocatorSettings()
        self._peaks: dict[int, float] = {}  # bytes alive at once at sizes traced by themselves
        self.capacity_bytes = min(options.memory_limit or gpu.total_bytes, gpu.total_bytes)
        usable = self.capacity_bytes - gpu.overhead_bytes
        if usable <= 0:
            raise DeviceError(
                f"the process overhead of {format_bytes(gpu.overhead_bytes)} leaves nothing of "
                f"{format_bytes(self.capacity_bytes)}. Try more memory, or, in estimate, a lower "
                "--overhead."
            )
        self.budget_bytes = math.floor(usable * (1 - options.headroom))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Problems that the user should act on."""
        return tuple(filter(None, (*self.traces.warnings, self.gpu.assumption)))

    def probe(self, batch_size: int, *, confirm: bool = False) -> Probe:
        """Simulate one batch size; a confirmation is the same run."""
        return self.probe_with_room(batch_size, confirm=confirm)[0]

    def probe_with_room(self, batch_size: int, *, confirm: bool = False) -> tuple[Probe, float]:
        """Simulate one batch size; return its probe and its :attr:`.ReplayResult.room`.

        As on a real device, a size that flushes the allocator's cache in every step does not fit.
        Its room is then about one example too small.
        """
        started = time.perf_counter()
        run = self.replay(batch_size)
        phases = phase_peaks(run)
        # The reserved bytes decide what fits; they peak by the end of the backward pass.
        phases[Phase.FORWARD_BACKWARD] = run.peak_reserved_bytes
        note, room = "", run.room
        if not run.fits:
            note = "out of memory"
        elif run.retries:
            note, room = THRASHING_NOTE, NO_ROOM
        if not self.traces.are_general:
            room = self._room_by_others(batch_size, room)
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

    def _room_by_others(self, batch_size: int, room: float) -> float:
        """Return the room at a size traced by itself: on the line through it and the nearest size.

        A replay that fails stops at its first failure, and its trace does not tell what each
        example adds. Each further size costs a trace.
        """
        trace = self.traces.at(batch_size)
        peak = trace.highest_at(batch_size, list(Stage)).bytes_at(batch_size)
        growth = peak / batch_size
        others = self._peaks.keys() - {batch_size}
        if others:
            near = min(others, key=lambda size: abs(size - batch_size))
            slope = (peak - self._peaks[near]) / (batch_size - near)
            growth = slope if slope > 0 else growth
        self._peaks[batch_size] = peak
        left = (self.budget_bytes - peak) / growth
        fitting = min(max(0.0, left), (GROWTH_UNTOLD - 1) * batch_size)
        return fitting if room >= 0 else min(NO_ROOM, left)

    def replay(self, batch_size: int) -> ReplayResult:
        """Replay the steps at a batch size in a fresh allocator with this GPU's budget."""
        device = allocator_of(self.budget_bytes, self._settings)
        return replay(self.traces.at(batch_size), batch_size, device, self.gpu)

    def close(self) -> None:
        """Do nothing: no resources are held."""


def phase_peaks(run: ReplayResult) -> dict[Phase, int]:
    """Return the most bytes in use in each phase of the memory model."""
    peaks = {
        phase: [run.stage_peak_bytes[stage] for stage in stages if stage in run.stage_peak_bytes]
        for phase, stages in STAGES_OF_PHASE.items()
    }
    return {phase: max(of_stages) for phase, of_stages in peaks.items() if of_stages}
