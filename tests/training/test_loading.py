from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchfinder.errors import SampleError, UsageError
from batchfinder.training.loading import load_setup
from batchfinder.training.sample import BatchMaker

TARGETS = Path(__file__).parents[1] / "targets"
MODELS = TARGETS / "models.py"
SAMPLE = f"{MODELS}:build_nothing"


@pytest.mark.parametrize(
    ("function", "sample", "spec", "notes"),
    [
        ("build_small", None, None, []),
        (
            "build_small",
            None,
            "float32[9]",
            ["--input is ignored, as the target brings batches of its own; leave one of them out"],
        ),
        (
            "build_small",
            SAMPLE,
            None,
            ["--sample is ignored, as the target brings batches of its own; leave one of them out"],
        ),
        ("build_without_sample", None, "float32[4]", []),
        ("build_without_sample", f"{MODELS}:build_small", None, []),
        (
            "build_without_sample",
            f"{MODELS}:build_small",
            "float32[4]",
            ["--input is ignored, as --sample comes first; leave one of them out"],
        ),
    ],
)
def test_what_is_given_and_not_used_is_told(
    function: str, sample: str | None, spec: str | None, notes: list[str]
) -> None:
    setup, warnings = load_setup(f"{MODELS}:{function}", {}, sample=sample, input_spec=spec)
    assert warnings == notes
    assert setup.sample is not None


def test_what_is_given_comes_before_build_sample_beside_the_target(tmp_path: Path) -> None:
    train = tmp_path / "loading_train.py"
    train.write_text(
        "import torch\n"
        "def build(): return torch.nn.Linear(3, 1)\n"
        "def build_sample(): return torch.ones(7, 3)\n"
        "def other(): return torch.ones(5, 3)\n"
    )
    target = f"{train}:build"
    assert load_setup(target, {})[0].sample.shape == (7, 3)
    assert load_setup(target, {}, sample=f"{train}:other")[0].sample.shape == (5, 3)
    assert load_setup(target, {}, input_spec="float32[4]")[0].sample.shape == (2, 4)


def test_the_first_of_its_sources_brings_the_sample(tmp_path: Path) -> None:
    file = tmp_path / "loading_sources.py"
    file.write_text(
        "import torch\n"
        "from batchfinder import TrainingSetup\n"
        "def hinted():\n"
        "    model = torch.nn.Linear(4, 2)\n"
        "    model.example_input_array = torch.full((1, 4), 4.0)\n"
        "    return model\n"
        "def own():\n    return hinted(), torch.full((1, 4), 1.0)\n"
        "def made():\n"
        "    return TrainingSetup(hinted(), make_batch=lambda n: torch.zeros(n, 4))\n"
        "def sample():\n    return torch.full((1, 4), 2.0)\n"
    )
    every: dict[str, Any] = {"sample": f"{file}:sample", "input_spec": "float32[4]"}
    assert load_setup(f"{file}:own", {}, **every)[0].sample[0, 0] == 1
    assert load_setup(f"{file}:made", {}, **every)[0].sample is None
    assert load_setup(f"{file}:hinted", {}, **every)[0].sample[0, 0] == 2
    shaped, warnings = load_setup(f"{file}:hinted", {}, input_spec="float32[4]")
    assert shaped.sample.shape == (2, 4)
    assert warnings == []
    assert load_setup(f"{file}:hinted", {})[0].sample[0, 0] == 4


def test_a_sample_function_gets_the_arguments_that_it_accepts(tmp_path: Path) -> None:
    file = tmp_path / "loading_arguments.py"
    file.write_text(
        "import torch\n"
        "def build(depth=1):\n    return torch.nn.Linear(5, depth)\n"
        "def sample(seq_len):\n    return torch.zeros(2, seq_len)\n"
    )
    given = {"seq_len": 5, "depth": 2}
    setup, _ = load_setup(f"{file}:build", given, sample=f"{file}:sample")
    assert setup.sample.shape == (2, 5)
    with pytest.raises(UsageError, match="sample needs seq_len; give it by --arg seq_len=VALUE"):
        load_setup(f"{file}:build", {"depth": 2}, sample=f"{file}:sample")


def test_a_sample_function_that_returns_none() -> None:
    with pytest.raises(SampleError, match="build_nothing returned None"):
        load_setup(f"{MODELS}:build_without_sample", {}, sample=SAMPLE)


@pytest.mark.parametrize("spec", ["float32[", ""])
def test_a_mistake_in_the_shapes_is_an_error_even_if_they_have_no_effect(spec: str) -> None:
    with pytest.raises(UsageError, match="--input"):
        load_setup(f"{MODELS}:build_small", {}, input_spec=spec)


@pytest.mark.parametrize("option", ["sample", "loader"])
def test_a_sample_or_loader_of_its_own_gets_its_arguments(tmp_path: Path, option: str) -> None:
    file = tmp_path / f"with_own_{option}.py"
    file.write_text(
        "import torch\n"
        "def build():\n    return torch.nn.Linear(3, 2)\n"
        "def sample(length=1):\n    return torch.ones(4, length, 3)\n"
        "def loader(length=1):\n    return [torch.ones(length, 3)] * 4\n"
    )
    named: dict[str, Any] = {option: f"{file}:{option}"}
    setup, _ = load_setup(f"{file}:build", {"length": 5}, **named)
    assert BatchMaker.of(setup, 0).make(4).shape == (4, 5, 3)
    with pytest.raises(UsageError, match="takes no argument lenght; did you mean length"):
        load_setup(f"{file}:build", {"lenght": 5}, **named)
