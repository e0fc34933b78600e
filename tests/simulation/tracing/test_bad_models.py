"""Models that are hard or impossible to simulate: never an abort, and one helpful line."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from batchfinder.cli.app import cli

TARGETS = """
import torch
from torch import nn
from batchfinder import TrainingSetup

SAMPLE = torch.randn(2, 8), torch.randn(2, 8)

class Model(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.run = run

    def forward(self, x):
        return self.run(self.inner, x)

def with_optimizer(**options):
    model = nn.Linear(8, 8)
    return TrainingSetup(model, SAMPLE, optimizer=lambda p: torch.optim.AdamW(p, **options))

@torch.library.custom_op("batchfinder_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2

class Sampled(torch.distributions.Distribution):
    pass

class Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

def later(inner, x):
    raise NotImplementedError("comes later")

def attend(inner, x):
    from torch.nn.attention.flex_attention import flex_attention
    q = inner(x).view(1, 1, -1, 8)
    return flex_attention(q, q, q).view(-1, 8)

def jagged(inner, x):
    rows = torch.nested.nested_tensor([inner(x)[:1], inner(x)], layout=torch.jagged)
    return rows.values()

def as_half(inner, x):
    with torch.autocast("cuda", torch.float16):
        y = inner(x)
    assert y.dtype is torch.float16
    return y.float()

def build(kind):
    if kind == "cuda method":
        return nn.Linear(8, 8).cuda(), SAMPLE
    if kind == "cuda device":
        return nn.Linear(8, 8, device="cuda"), SAMPLE
    if kind == "script":
        return nn.Sequential(nn.ReLU(), torch.jit.script(nn.Linear(8, 8))), SAMPLE
    if kind == "quantized":
        scale = torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8)
        model = Model(lambda inner, x: inner(x))
        model.register_buffer("scale", scale)
        return model, SAMPLE
    if kind == "sparse":
        sample = torch.randint(0, 9, (2, 4)), torch.randn(2, 4, 8)
        return nn.Embedding(9, 8, sparse=True), sample
    if kind in ("fused", "capturable"):
        return with_optimizer(**{kind: True})
    run = {
        "cuda in forward": lambda inner, x: inner(x.cuda()),
        "custom operator": lambda inner, x: double(inner(x)),
        "literal": lambda inner, x: inner(x) + torch.tensor([[x[0].max()], [x[1].max()]]).sum(),
        "numpy": lambda inner, x: inner(x) + x.sum().numpy(),
        "item": lambda inner, x: inner(x) if inner(x).sum().item() > 0 else x,
        "mask": lambda inner, x: x[inner(x)[:, 0] > 0],
        "lstsq": lambda inner, x: torch.linalg.lstsq(inner(x), x).solution,
        "pinned": lambda inner, x: inner(x.pin_memory()),
        "on cuda": lambda inner, x: inner(x) + torch.zeros(8, device="cuda"),
        "autocast": as_half,
        "later": later,
        "no backward": lambda inner, x: Forward.apply(inner(x)),
        "no sample": lambda inner, x: inner(x) + Sampled(validate_args=False).rsample(),
        "flex attention": attend,
        "nested": jagged,
        "wrong width": lambda inner, x: inner(x.repeat(1, 2)),
        "wrong type": lambda inner, x: inner(x.double()),
        "int8": lambda inner, x: inner(x) @ torch.ones(8, 8, dtype=torch.int8).to(x.dtype),
    }[kind]
    return Model(run), SAMPLE
"""

WITHOUT_CUDA = pytest.mark.skipif(
    torch.cuda.is_available(), reason="here CUDA is to be had, and nothing is wrong"
)
FLEX_ATTENTION = pytest.mark.skipif(
    find_spec("torch.nn.attention.flex_attention") is None, reason="since PyTorch 2.5"
)
BUILT_WITHOUT_CUDA = pytest.mark.skipif(
    torch.version.cuda is not None, reason="the simulated device stands for any that is asked for"
)


def estimate(tmp_path: Path, kind: str) -> tuple[int, str, str]:
    path = tmp_path / "unsimulated.py"
    path.write_text(TARGETS)
    arguments = [f"{path}:build", "--arg", f"kind={kind}", "--gpu", "t4", "--max-batch-size", "16"]
    done = CliRunner().invoke(cli, ["estimate", *arguments])
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*quantize:UserWarning")
@pytest.mark.parametrize(
    ("kind", "why", "place"),
    [
        pytest.param("cuda method", "the code requests CUDA", True, marks=WITHOUT_CUDA),
        pytest.param("cuda device", "the code requests CUDA", True, marks=WITHOUT_CUDA),
        pytest.param("cuda in forward", "the code requests CUDA", True, marks=BUILT_WITHOUT_CUDA),
        ("custom operator", "a custom operator does not declare its output's shape", True),
        ("literal", "a tensor is made from values of others", True),
        ("numpy", "the values of a tensor are passed to NumPy", True),
        ("item", "the step reads a value of a tensor", True),
        ("mask", "the shape of a result depends on the data", True),
        ("lstsq", "the residuals of torch.linalg.lstsq depend on the rank of its matrix", True),
        ("pinned", "an operator, such as pin_memory,", True),
        pytest.param(
            "flex attention",
            "FlexAttention does not support backward on CPU in",
            True,
            marks=FLEX_ATTENTION,
        ),
        ("nested", "the step uses a nested tensor", True),
        ("sparse", "the step uses a sparse tensor", False),
        ("quantized", "the model holds quantized tensors", False),
        ("script", "1 is compiled by TorchScript", False),
    ],
)
def test_a_step_that_cannot_be_simulated_is_an_error_of_one_line(
    tmp_path: Path, kind: str, why: str, place: bool
) -> None:
    exit_code, stdout, stderr = estimate(tmp_path, kind)

    assert (exit_code, stdout) == (1, "")
    line = stderr.splitlines()[-1]
    assert line.startswith(f"Error: {why}")
    assert "batchfinder find" in line
    assert not place or "unsimulated.py:" in line
    assert "Traceback" not in stderr


@pytest.mark.parametrize("kind", ["fused", "capturable", "on cuda", "autocast", "int8"])
def test_features_that_only_a_gpu_has_are_simulated(tmp_path: Path, kind: str) -> None:
    exit_code, stdout, stderr = estimate(tmp_path, kind)

    assert (exit_code, stderr) == (0, f"estimating {tmp_path}/unsimulated.py:build ...\n")
    assert stdout.splitlines()[1].split()[3:7] == ["16", "16", "..", "16"]


OF_SHAPES = (
    " (raised while the step ran on sample[0] [8, 8], sample[1] [8, 8]. If the sample is one "
    "example, try tensor[None])"
)


@pytest.mark.parametrize("kind", ["wrong width", "wrong type", "later", "no sample"])
def test_an_error_of_the_model_shows_only_the_users_traceback(tmp_path: Path, kind: str) -> None:
    exit_code, stdout, stderr = estimate(tmp_path, kind)

    assert (exit_code, stdout) == (1, "")
    assert "self.run(self.inner, x)" in stderr
    assert "batchfinder/simulation" not in stderr
    told, error = stderr.splitlines()[-2:]
    hint = OF_SHAPES if kind == "wrong width" else ""
    assert error.removesuffix(": ") == f"Error: {told}{hint}"
    assert told.startswith(("RuntimeError: ", "NotImplementedError"))


def test_a_missing_backward_pass_is_the_users_error(tmp_path: Path) -> None:
    exit_code, _, stderr = estimate(tmp_path, "no backward")

    assert exit_code == 1
    assert stderr.splitlines()[-1].startswith("Error: NotImplementedError: You must implement")
