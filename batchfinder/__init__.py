"""Find the largest batch size that really trains on your device.

The public names are imported lazily. README.md in this folder is the map of the code.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchfinder.errors import BatchFinderError as BatchFinderError
    from batchfinder.errors import BatchFinderWarning as BatchFinderWarning
    from batchfinder.estimator import estimate_max_batch as estimate_max_batch
    from batchfinder.estimator import estimate_peak_memory as estimate_peak_memory
    from batchfinder.finder import find_max_batch as find_max_batch
    from batchfinder.integrations.oom_guard import OOMGuard as OOMGuard
    from batchfinder.integrations.transformers import set_max_batch as set_max_batch
    from batchfinder.integrations.watch import watch_memory as watch_memory
    from batchfinder.results.accumulation import AccumulationPlan as AccumulationPlan
    from batchfinder.results.accumulation import Split as Split
    from batchfinder.results.memory_model import MemoryModel as MemoryModel
    from batchfinder.results.memory_model import Phase as Phase
    from batchfinder.results.noise_scale import NoiseScale as NoiseScale
    from batchfinder.results.probe import Outcome as Outcome
    from batchfinder.results.probe import Probe as Probe
    from batchfinder.results.result import BatchSizeResult as BatchSizeResult
    from batchfinder.results.result import NextFailure as NextFailure
    from batchfinder.results.result import Status as Status
    from batchfinder.simulation.estimate import Estimate as Estimate
    from batchfinder.simulation.estimate import PeakEstimate as PeakEstimate
    from batchfinder.simulation.gpus import Gpu as Gpu
    from batchfinder.simulation.gpus import find_gpu as find_gpu
    from batchfinder.studies.compare import compare_strategies as compare_strategies
    from batchfinder.studies.comparison import Comparison as Comparison
    from batchfinder.studies.noise_scale import noise_scale as noise_scale
    from batchfinder.studies.sweep import sweep_max_batch as sweep_max_batch
    from batchfinder.studies.sweep_result import Sweep as Sweep
    from batchfinder.studies.worst_batch import worst_batch as worst_batch
    from batchfinder.training.setup import TrainingSetup as TrainingSetup

# Names are imported on first use. Some of them need PyTorch, which takes seconds to import: the
# command line would have to wait, and Ctrl-C during the import would end in a traceback.
_MODULES = {
    "AccumulationPlan": "results.accumulation",
    "BatchFinderError": "errors",
    "BatchFinderWarning": "errors",
    "BatchSizeResult": "results.result",
    "Comparison": "studies.comparison",
    "Estimate": "simulation.estimate",
    "Gpu": "simulation.gpus",
    "MemoryModel": "results.memory_model",
    "NextFailure": "results.result",
    "NoiseScale": "results.noise_scale",
    "OOMGuard": "integrations.oom_guard",
    "Outcome": "results.probe",
    "PeakEstimate": "simulation.estimate",
    "Phase": "results.memory_model",
    "Probe": "results.probe",
    "Split": "results.accumulation",
    "Status": "results.result",
    "Sweep": "studies.sweep_result",
    "TrainingSetup": "training.setup",
    "compare_strategies": "studies.compare",
    "estimate_max_batch": "estimator",
    "estimate_peak_memory": "estimator",
    "find_gpu": "simulation.gpus",
    "find_max_batch": "finder",
    "noise_scale": "studies.noise_scale",
    "set_max_batch": "integrations.transformers",
    "sweep_max_batch": "studies.sweep",
    "watch_memory": "integrations.watch",
    "worst_batch": "studies.worst_batch",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("batchfinder.results.version").VERSION
    if name in _MODULES:
        return getattr(import_module(f"batchfinder.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
