"""The plot of the memory over one step."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from batchfinder import estimate_max_batch
from batchfinder.errors import UsageError
from batchfinder.reporting.plot import check_plot, plot_timelines

HAS_MATPLOTLIB = find_spec("matplotlib") is not None


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs the plot extra")
@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_a_picture_is_drawn(tmp_path: Path, name: str, start: bytes) -> None:
    sample = torch.randn(2, 64), torch.randn(2, 64)
    estimates = [
        estimate_max_batch(torch.nn.Linear(64, 64), sample, gpu=gpu, max_batch_size=64)
        for gpu in ("t4", "h100")
    ]
    file = tmp_path / name
    check_plot(str(file))

    plot_timelines(estimates, str(file))

    assert file.read_bytes().startswith(start)


@pytest.mark.skipif(HAS_MATPLOTLIB, reason="the plot extra is installed")
def test_a_missing_matplotlib_is_an_error_with_the_command_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pip install matplotlib"):
        check_plot(str(tmp_path / "a.png"))


def test_an_invalid_plot_path_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must end in \.png, \.pdf or \.svg"):
        check_plot(str(tmp_path / "a.doc"))
    with pytest.raises(UsageError, match="there is no folder"):
        check_plot(str(tmp_path / "none" / "a.png"))
