"""batchfinder: the largest batch size that really trains on your device."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchfinder.accumulation import AccumulationPlan, Split
    from batchfinder.errors import BatchFinderError
    from batchfinder.estimator import estimate_max_batch, estimate_peak_memory
    from batchfinder.finder import find_max_batch
    from batchfinder.memory_model import MemoryModel, Phase
    from batchfinder.result import BatchSizeResult, NextFailure, Outcome, Probe, Status
    from batchfinder.simulation.estimate import Estimate, PeakEstimate
    from batchfinder.simulation.gpus import Gpu, find_gpu
    from batchfinder.training.setup import TrainingSetup
    from batchfinder.warning import BatchFinderWarning

__version__ = "0.1.0"

__all__ = [
    "AccumulationPlan",
    "BatchFinderError",
    "BatchFinderWarning",
    "BatchSizeResult",
    "Estimate",
    "Gpu",
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
    "find_gpu",
    "find_max_batch",
]

# Each name is imported on first use: for some that takes PyTorch, which the command line would
# wait seconds for, and a Ctrl-C meanwhile would end in a traceback.
_MODULES = {
    "AccumulationPlan": "accumulation",
    "BatchFinderError": "errors",
    "BatchFinderWarning": "warning",
    "BatchSizeResult": "result",
    "Estimate": "simulation.estimate",
    "Gpu": "simulation.gpus",
    "MemoryModel": "memory_model",
    "NextFailure": "result",
    "Outcome": "result",
    "PeakEstimate": "simulation.estimate",
    "Phase": "memory_model",
    "Probe": "result",
    "Split": "accumulation",
    "Status": "result",
    "TrainingSetup": "training.setup",
    "estimate_max_batch": "estimator",
    "estimate_peak_memory": "estimator",
    "find_gpu": "simulation.gpus",
    "find_max_batch": "finder",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"batchfinder.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
