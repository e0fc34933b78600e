from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from batchfinder.errors import UsageError
from batchfinder.training.target import load_target
from batchfinder.training.user_traceback import add_hint, error_line, mark, user_traceback


def shown(target: str) -> str:
    try:
        load_target(target)
    except Exception as error:  # noqa: BLE001 - the user's code raises whatever it likes
        return user_traceback(error)
    raise AssertionError("nothing was raised")


@pytest.fixture(autouse=True)
def _clean_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


@pytest.mark.parametrize(
    "text",
    [
        "def inner():\n    return 1 / 0\n\ninner()\n",
        "def build(:\n    pass\n",
        "import tb_helper_that_breaks\n",
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise LookupError('x') from e\n",
    ],
)
def test_import_errors_read_as_python_prints_them(text: str, tmp_path: Path) -> None:
    Path("tb_helper_that_breaks.py").write_text("def f(:\n    pass\n")
    script = tmp_path / "tb_train.py"
    script.write_text(text)
    ran = subprocess.run(
        [sys.executable, "-B", str(script)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert shown("tb_train.py:build") == ran.stderr


def test_errors_of_a_call_start_at_the_function() -> None:
    Path("tb_call.py").write_text("def build():\n    return 1 / 0\n")
    lines = shown("tb_call.py:build").splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith('tb_call.py", line 2, in build')
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_modules_start_at_the_module() -> None:
    Path("tb_module.py").write_text("def inner():\n    raise LookupError('x')\ninner()\n")
    lines = shown("tb_module:build").splitlines()
    assert lines[1].endswith('tb_module.py", line 3, in <module>')


def test_errors_of_our_own_are_one_line() -> None:
    with pytest.raises(UsageError) as info:
        load_target("absent_tb.py:build")
    assert user_traceback(info.value) == f"batchfinder.errors.UsageError: {info.value}\n"


def test_tracebacks_without_our_frames_stay_whole() -> None:
    def inner() -> float:
        return 1 / 0

    with pytest.raises(ZeroDivisionError) as info:
        inner()
    text = user_traceback(info.value)
    assert "in test_tracebacks_without_our_frames_stay_whole" in text
    assert "in inner" in text


def test_error_that_was_never_raised() -> None:
    assert user_traceback(ValueError("x")) == "ValueError: x\n"


def test_calls_of_modules_are_left_out_but_not_the_forward() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    with pytest.raises(RuntimeError) as info:
        model(torch.randn(1, 3))
    text = user_traceback(info.value)
    assert "_call_impl" not in text
    assert "container.py" in text
    assert "linear.py" in text


@pytest.mark.parametrize(
    "text",
    [
        "Expected all tensors to be on the same device, but found at least two devices!",
        "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be",
    ],
)
def test_two_devices_are_explained(text: str) -> None:
    message = error_line(RuntimeError(f"{text}\nmore"))
    assert message.startswith(
        f"RuntimeError: {text.rstrip('!')}. The model and the batch are moved"
    )
    assert "Try device=inputs.device" in message


class LeavesOneOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)  # type: ignore[no-any-return]


def test_options_of_the_wrapper_are_given_by_the_target() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        wrapped, x = DistributedDataParallel(LeavesOneOut()), torch.ones(3, 4)
        wrapped(x).sum().backward()
        with pytest.raises(RuntimeError, match="prior iteration") as info:
            wrapped(x)
        message = error_line(info.value)
        assert message.startswith("RuntimeError: Expected to have finished reduction. Try a target")
        assert "DistributedDataParallel(model, find_unused_parameters=True)" in message
        with_options = DistributedDataParallel(LeavesOneOut(), find_unused_parameters=True)
        for _ in range(2):
            with_options(x).sum().backward()
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before")
def test_python_shows_hints_below_an_error() -> None:
    plain, hinted = RuntimeError("out of luck"), RuntimeError("not to be on the same device!")
    mark(hinted, "the step ran")
    for error in (plain, hinted):
        add_hint(error)
    assert "batchfinder" not in user_traceback(plain)
    assert (
        user_traceback(hinted)
        .splitlines()[1]
        .startswith("batchfinder: raised while the step ran. The model and the batch are moved")
    )


def test_other_messages_are_as_they_are() -> None:
    assert error_line(StopIteration()) == "StopIteration"
    assert error_line(RuntimeError("Input type (float) and bias type (c10::Half)!\n2")) == (
        "RuntimeError: Input type (float) and bias type (c10::Half)!"
    )
