"""One function for each reader of outside text, for fuzzing.

For any text, a function returns or raises a ``BatchFinderError``. Anything else is a bug: the user
would see a traceback.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from click.testing import CliRunner
from fakes import FakeProber

from batchfinder.cli.app import cli
from batchfinder.cli.request import parse_arguments
from batchfinder.cli.run import parse_settings
from batchfinder.errors import BatchFinderError
from batchfinder.launching.template import Template
from batchfinder.reporting.page.page import page_of, read_results
from batchfinder.simulation.calibration import Calibration, read_measurement
from batchfinder.simulation.gpus import find_gpu
from batchfinder.training.data import input_spec
from batchfinder.training.target import load_function
from batchfinder.units import format_bytes, parse_bytes, parse_headroom


def read_size(text: str) -> None:
    """Read a memory size and format it again."""
    format_bytes(parse_bytes(text))


def read_input_spec(text: str) -> None:
    """Read ``--input``; tensors of over a million numbers are refused, because they are slow."""
    with patch.object(input_spec, "MOST_NUMBERS", 2**20):
        input_spec.parse_input_spec(text)


def read_target(text: str) -> None:
    """Read a target, unless it names an existing module, which fuzzing must not run."""
    place = text.rpartition(":")[0]
    name = place.split(".")[0]
    if name in sys.modules or (name.isidentifier() and importlib.util.find_spec(name)):
        return
    load_function(text)


def read_result(text: str) -> None:
    """Read the file of ``--calibrate`` and the GPU that it names."""
    with _file(text) as path:
        find_gpu(read_measurement(path).gpu_name)


def read_calibration(text: str) -> None:
    """Read, apply and describe the saved corrections."""
    with _file(text) as path:
        calibration = Calibration.load(path)
    gpu = find_gpu("rtx3090")
    calibration.applied(gpu)
    calibration.note(gpu)


def read_template(text: str) -> None:
    """Read a command of ``run`` without running it, and write the one to paste."""
    words = text.split()
    settings = parse_settings([word for word in words if word.startswith("NAME")])
    template = Template([word for word in words if not word.startswith("NAME")], settings)
    template.command(8)


def read_report(text: str) -> None:
    """Make the page of the results in a file."""
    with _file(text) as path:
        page_of(read_results([str(path)]))


def run_find(text: str) -> None:
    """Run ``find`` on a fake device, with options separated by blanks."""
    _run("find", "train.py:build", *text.split())


def run_estimate(text: str) -> None:
    """Run ``estimate`` with a target that does not exist."""
    _run("estimate", "no such file.py:build", "--gpu", "t4", *text.split())


def run_study(text: str) -> None:
    """Run the command that the first word names, with a target that does not exist."""
    command, _, rest = text.partition(" ")
    if command in ("sweep", "compare", "check"):
        _run(command, "no such file.py:build", *rest.split())


READERS: dict[str, Callable[[str], object]] = {
    "size": read_size,
    "percentage": parse_headroom,
    "arguments": lambda text: json.dumps(parse_arguments([text]), default=repr),
    "input": read_input_spec,
    "target": read_target,
    "gpu": find_gpu,
    "result": read_result,
    "calibration": read_calibration,
    "template": read_template,
    "report": read_report,
    "find": run_find,
    "estimate": run_estimate,
    "study": run_study,
}


def read(kind: str, text: str) -> None:
    """Read a text.

    Raises:
        Exception: a bug in batchfinder.
    """
    with contextlib.suppress(BatchFinderError):
        READERS[kind](text)


def _run(*arguments: str) -> None:
    def make_prober(*_: Any) -> FakeProber:
        return FakeProber()

    done = CliRunner().invoke(cli, arguments, obj=make_prober)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code in (0, 1, 2, 3), done.output


@contextlib.contextmanager
def _file(text: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.json"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        yield path
