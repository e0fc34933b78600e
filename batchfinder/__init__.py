"""batchfinder: the largest batch size that really trains on your device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchfinder.accumulation import AccumulationPlan, Split
from batchfinder.errors import BatchFinderError
from batchfinder.finder import find_max_batch
from batchfinder.memory_model import MemoryModel, Phase
from batchfinder.result import BatchSizeResult, NextFailure, Outcome, Probe, Status

if TYPE_CHECKING:
    from batchfinder.training.setup import TrainingSetup

__version__ = "0.1.0"

__all__ = [
    "AccumulationPlan",
    "BatchFinderError",
    "BatchSizeResult",
    "MemoryModel",
    "NextFailure",
    "Outcome",
    "Phase",
    "Probe",
    "Split",
    "Status",
    "TrainingSetup",
    "find_max_batch",
]


def __getattr__(name: str) -> Any:
    # The one name that needs torch, whose import takes seconds that the command line would wait.
    if name == "TrainingSetup":
        from batchfinder.training.setup import TrainingSetup

        return TrainingSetup
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
