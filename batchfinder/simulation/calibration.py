"""Corrections of a simulated GPU by one measured run on the real one; kept per machine."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from batchfinder.errors import BatchFinderError, UsageError
from batchfinder.results.cache import cache_folder
from batchfinder.simulation.gpus import Gpu
from batchfinder.units import format_bytes

# Raised while reading foreign or broken JSON.
_NOT_OURS = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError),
    *(OverflowError, RecursionError),  # Infinity; deeply nested lists
)
_MOST_BYTES = 2**63

# Closer to the budget the allocator releases its cache, and its peak no longer shows what the step
# would use. A fraction of the budget.
_AMPLE = 0.8


@dataclass(frozen=True)
class Measurement:
    """One batch size that ran on a real GPU."""

    gpu_name: str
    batch_size: int
    peak_reserved_bytes: int
    outside_bytes: int  # in use outside the allocator; 0 if unknown


def read_measurement(path: Path) -> Measurement:
    """Read the largest size that ran well below the budget, from ``batchfinder find --json``.

    Raises:
        UsageError: the file cannot be read, or it has no size that ran on a GPU.
    """
    hint = f". Try batchfinder find ... --json > {path}"
    try:
        result = json.loads(path.read_text("utf-8"))
        ample = _AMPLE * result["budget_bytes"]
        probes = [
            p for p in result["probes"] if p["outcome"] == "fits" and p["peak_reserved_bytes"]
        ]
        best = max(probes, key=lambda p: (p["peak_reserved_bytes"] <= ample, p["batch_size"]))
        measured = Measurement(
            gpu_name=str(result["device"]).partition(" ")[2],
            batch_size=int(best["batch_size"]),
            peak_reserved_bytes=int(best["peak_reserved_bytes"]),
            outside_bytes=int(best.get("outside_bytes") or 0),
        )
        _, *numbers = dataclasses.astuple(measured)
        is_sensible = min(numbers[:2]) >= 1 and min(numbers) >= 0 and max(numbers) < _MOST_BYTES
        if not measured.gpu_name or not is_sensible:
            raise ValueError
        return measured
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror or error}){hint}") from error
    except _NOT_OURS as error:
        reason = f"has no result of a search on a GPU ({type(error).__name__})"
        raise UsageError(f"{path} {reason}{hint}") from error


@dataclass
class Calibration:
    """Corrections of the overhead of GPUs."""

    path: Path
    # Bytes to add to the overhead, by the GPU's name.
    corrections: dict[str, int] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path | None = None) -> Calibration:
        """Load the corrections of this machine; none if there is no readable file."""
        path = path or cache_folder() / "calibration.json"
        try:
            kept = json.loads(path.read_text("utf-8"))
            corrections = {str(name): int(size) for name, size in kept.items()}
        except _NOT_OURS:
            return cls(path)
        sensible = {k: v for k, v in corrections.items() if abs(v) < _MOST_BYTES}
        return cls(path, sensible)

    def learn(self, gpu_name: str, correction_bytes: int) -> None:
        """Save a correction."""
        self.corrections[gpu_name] = correction_bytes
        self._save()

    def forget(self) -> None:
        """Remove all corrections, and the file."""
        self.corrections.clear()
        self._save()

    def _save(self) -> None:
        try:
            if not self.corrections:
                self.path.unlink(missing_ok=True)
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.corrections, indent=2), "utf-8")
        except OSError as error:
            raise BatchFinderError(
                f"the calibration in {self.path} cannot be changed ({error.strerror}). "
                "Try setting BATCHFINDER_CACHE to a writable folder."
            ) from error

    def applied(self, gpu: Gpu) -> Gpu:
        """Return the GPU with its overhead corrected."""
        correction = self.corrections.get(gpu.name)
        if correction is None:
            return gpu
        size = max(0, gpu.overhead_bytes + correction)
        return dataclasses.replace(gpu, overhead_bytes=size, overhead_source="--calibrate")

    def note(self, gpu: Gpu) -> str:
        """Return a note on the GPU's correction; "" if there is none."""
        correction = self.corrections.get(gpu.name)
        if correction is None:
            return ""
        return (
            f"the overhead of {gpu.name} is corrected by {format_bytes(correction)} ({self.path}). "
            "Try --forget-calibration to remove the correction"
        )
