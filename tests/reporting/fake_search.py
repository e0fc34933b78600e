"""An invented search for the reporting tests."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from typing import Any

from fakes import FakeProber
from rich.console import Console

from batchfinder.reporting.progress import TerminalReporter
from batchfinder.results.accumulation import AccumulationPlan
from batchfinder.results.memory_model import Phase, fit
from batchfinder.results.probe import Outcome, Probe
from batchfinder.results.result import BatchSizeResult, NextFailure, Status
from batchfinder.units import GIB, MIB

BUDGET = int(132.2 * GIB)
OOM_NOTE = (
    "CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total capacity of 139.80 GiB "
    "of which 1.10 GiB is free."
)


def fits(batch_size: int, step_seconds: float, **more: Any) -> Probe:
    peak = int(2.9 * GIB + 126.8 * MIB * batch_size)
    return Probe(
        batch_size,
        Outcome.FITS,
        **{
            "steps": 1,
            "seconds": 2 * step_seconds,
            "step_seconds": step_seconds,
            "phase_peak_bytes": {Phase.FORWARD_BACKWARD: peak, Phase.OPTIMIZER_STEP: 3 * GIB},
            **more,
        },
    )


PROBES = (
    fits(1, 0.041, steps=2),
    fits(16, 0.044),
    fits(1041, 1.02),
    Probe(1043, Outcome.OOM, steps=1, seconds=0.5, note=OOM_NOTE),
    fits(1042, 1.02, steps=3, confirmed=True),
)

RESULT = BatchSizeResult(
    batch_size=1042,
    status=Status.FOUND,
    device="cuda:0 NVIDIA H200",
    budget_bytes=BUDGET,
    probes=PROBES,
    memory_model=fit((p.batch_size, p.phase_peak_bytes) for p in PROBES if p.fits),
    next_failure=NextFailure(1043, Outcome.OOM, OOM_NOTE),
    confirmed_steps=3,
    cost_full_size_steps=5.02,
    seconds=8.42,
    versions={},
)


def result(**changes: Any) -> BatchSizeResult:
    return dataclasses.replace(RESULT, **changes)


class Screen:
    """Two consoles that record their output, as a terminal or as pipes."""

    def __init__(
        self,
        width: int | None = None,
        *,
        encoding: str = "utf-8",
        environment: Mapping[str, str] | None = None,
        colour: bool = False,
        quiet: bool = False,
        verbose: bool = False,
    ) -> None:
        self._files = [
            io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="") for _ in range(2)
        ]
        progress, output = (
            Console(
                file=file,
                width=width,
                force_terminal=width is not None,
                color_system="standard" if colour else None,
                legacy_windows=False,
                _environ={"TERM": "xterm", **(environment or {})},
            )
            for file in self._files
        )
        self.reporter = TerminalReporter(
            quiet=quiet, verbose=verbose, progress=progress, output=output
        )

    @property
    def stderr(self) -> str:
        return self._read(0)

    @property
    def stdout(self) -> str:
        return self._read(1)

    def play(self, *probes: Probe) -> Screen:
        """Show a search, without the live line."""
        with self.reporter as reporter:
            prober = FakeProber(
                BUDGET,
                device=RESULT.device,
                capacity_bytes=int(139.8 * GIB),
                used_by_others_bytes=GIB,
            )
            reporter.start(prober, headroom=0.05)
            for probe in probes or PROBES:
                reporter.probe(probe)
        return self

    def answer(
        self, result: BatchSizeResult = RESULT, plan: AccumulationPlan | None = None
    ) -> Screen:
        self.reporter.answer(result, plan)
        return self

    def _read(self, index: int) -> str:
        file = self._files[index]
        file.flush()
        buffer = file.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode(file.encoding)
