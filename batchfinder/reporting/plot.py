"""A plot of the memory over one training step; needs matplotlib (the ``plot`` extra)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchfinder.errors import UsageError
from batchfinder.units import GIB

if TYPE_CHECKING:
    from batchfinder.simulation.estimate import Estimate

# Dark, light and medium, so that the stages differ in gray too.
_STAGE_COLORS = {
    "setup": "#bbbbbb",
    "forward": "#2f5d8a",
    "backward": "#9cc3e6",
    "optimizer step": "#e0913a",
}
_FORMATS = (".png", ".pdf", ".svg")


def check_plot(file: str) -> None:
    """Check that a plot can be written, before the work that it will show.

    Raises:
        UsageError: matplotlib is missing, or the file cannot be written there.
    """
    path = Path(file)
    if path.suffix.lower() not in _FORMATS:
        *others, last = _FORMATS
        raise UsageError(f"--plot {file}: the name must end in {', '.join(others)} or {last}")
    if not path.absolute().parent.is_dir():
        folder = path.absolute().parent
        raise UsageError(f"--plot {file}: there is no folder {folder}. Try mkdir -p {folder}")
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib. Try pip install matplotlib")


def plot_timelines(estimates: Sequence[Estimate], file: str) -> None:
    """Plot the memory of each estimate's last step, one panel each.

    Args:
        estimates: the estimates to plot.
        file: output path; its suffix sets the format.

    Raises:
        UsageError: the file cannot be written.
    """
    # A plain import would fail type checking where this optional dependency is missing.
    figure = import_module("matplotlib.figure").Figure(
        figsize=(8, 1 + 2.6 * len(estimates)), layout="constrained"
    )
    panels = figure.subplots(len(estimates), 1, squeeze=False)[:, 0]
    for panel, estimate in zip(panels, estimates, strict=True):
        _draw(panel, estimate)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        raise UsageError(f"--plot {file}: {error.strerror or error}") from error


def _draw(panel: Any, estimate: Estimate) -> None:
    explanation = estimate.explanation
    held = [moment.allocated_bytes / GIB for moment in explanation.timeline]
    for stage, color in _STAGE_COLORS.items():
        at = [i for i, moment in enumerate(explanation.timeline) if moment.stage.value == stage]
        if at:
            panel.bar(at, [held[i] for i in at], width=1.0, color=color, label=stage)
    limit = estimate.result.budget_bytes / GIB
    panel.axhline(limit, color="#b03030", linewidth=1, linestyle="--", label="budget")
    panel.set_title(f"{estimate.gpu.name}, batch size {explanation.batch_size}", loc="left")
    panel.set_ylabel("GiB held by tensors")
    panel.set_xlabel("one training step, by its allocations")
    panel.set_xlim(-0.5, len(held) - 0.5)
    panel.set_ylim(0, 1.1 * max(limit, *held, 0.001))
    panel.set_xticks([])
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
