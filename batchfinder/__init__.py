"""batchfinder: the largest batch size that really trains on your device."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from batchfinder.accumulation import AccumulationPlan, Split
from batchfinder.errors import BatchFinderError
from batchfinder.finder import find_max_batch
from batchfinder.memory_model import MemoryModel, Phase
from batchfinder.result import BatchSizeResult, NextFailure, Outcome, Probe, Status

if TYPE_CHECKING:
    from batchfinder.estimator import estimate_max_batch, estimate_peak_memory
    from batchfinder.simulation.estimate import Estimate, PeakEstimate
    from batchfinder.training.setup import TrainingSetup

__version__ = "0.1.0"

__all__ = [
    "AccumulationPlan",
    "BatchFinderError",
    "BatchSizeResult",
    "Estimate",
    "MemoryModel",
    "NextFailure",
    "Outcome",
    "PeakEstimate",
    "Phase",
    "Probe",
    "Split",
    "Status",
    "TrainingSetup",
    "estimate_max_batch",
    "estimate_peak_memory",
    "find_max_batch",
]


# The names that need torch, whose import takes seconds that the command line would wait.
_NEED_TORCH = {
    "Estimate": "batchfinder.simulation.estimate",
    "PeakEstimate": "batchfinder.simulation.estimate",
    "TrainingSetup": "batchfinder.training.setup",
    "estimate_max_batch": "batchfinder.estimator",
    "estimate_peak_memory": "batchfinder.estimator",
}


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        return getattr(import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
