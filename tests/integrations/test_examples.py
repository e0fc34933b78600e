"""The scripts of scripts/examples, run as a user runs them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def output_of(command: list[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def needs(package: str) -> list[pytest.MarkDecorator]:
    is_missing = importlib.util.find_spec(package) is None
    return [pytest.mark.skipif(is_missing, reason=f"needs {package}")]


TRAINED = {
    "fit_plain.py": "batch size 512:",
    "fit_ddp.py": "batch size 256 per rank:",
    "fit_lightning.py": "batch size 512:",  # all its examples
    "fit_trainer.py": "batch size 64 x 1:",
    "fit_accelerate.py": "batch size 256:",
}


def script(name: str, launcher: list[str] = PYTHON) -> list[str]:
    return [*launcher, f"scripts/examples/{name}"]


EXAMPLES = [
    "fit_plain.py",
    pytest.param("fit_ddp.py", marks=pytest.mark.slow),
    pytest.param("fit_lightning.py", marks=needs("lightning")),
    pytest.param("fit_trainer.py", marks=needs("transformers")),
    pytest.param("fit_accelerate.py", marks=needs("accelerate")),
]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_finds_its_batch_size_and_trains(name: str) -> None:
    launcher = TORCHRUN if name == "fit_ddp.py" else PYTHON
    assert f"trained with {TRAINED[name]}" in output_of(script(name, launcher))


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("fit_lightning.py", marks=needs("lightning"))])
def test_lightning_s_ranks_find_one_size(name: str) -> None:
    assert "trained with batch size 256:" in output_of(script(name, TORCHRUN))  # of 256


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_run_finds_it_from_outside(name: str) -> None:
    launcher = TORCHRUN if name == "fit_ddp.py" else PYTHON
    command = script(name, launcher)
    said = output_of(
        [
            *(*PYTHON, "-m", "batchfinder", "run", "--max-batch-size", "8", "--steps", "1", "--"),
            *(*command, "--batch-size", "{batch_size}"),
        ]
    )
    assert "--batch-size 8" in said
