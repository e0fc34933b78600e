"""The key of a remembered answer: every change of the set-up has another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeProber
from torch import nn

from batchfinder.cli.remembering import SearchMemory
from batchfinder.probing.code import digests, files_of_command
from batchfinder.probing.fingerprint import fingerprint
from batchfinder.probing.options import ProbeOptions
from batchfinder.training.setup import TrainingSetup

SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "GLIBC_TUNABLES", "OMP_NUM_THREADS")
OPTIONS: tuple[dict[str, Any], ...] = (
    *({"precision": name} for name in ("bf16", "fp16")),
    *({"headroom": share} for share in (0.0, 0.1, 0.2)),
    *({"memory_limit": 2**power} for power in range(28, 36)),
    *({"confirm_steps": steps} for steps in (4, 8)),
    *({"device": name} for name in ("cpu", "cuda:0", "cuda:1")),
    *({"accumulate": True}, {"compiled": True}, {"batch_dim": 1}),
)


def network(width: int = 8, dropout: float = 0.1, kind: type[nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), kind(), nn.Dropout(dropout), nn.Linear(width, 2))


def frozen() -> nn.Module:
    model = network()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


def setups() -> Iterator[Callable[[], TrainingSetup]]:
    sample = torch.zeros(2, 4)
    for width in (9, 16, 32, 64):
        yield lambda width=width: TrainingSetup(network(width), sample)  # type: ignore[misc]
    for dropout in (0.0, 0.2, 0.3):
        yield lambda p=dropout: TrainingSetup(network(dropout=p), sample)  # type: ignore[misc]
    for kind in (nn.GELU, nn.SiLU, nn.Tanh):
        yield lambda kind=kind: TrainingSetup(network(kind=kind), sample)  # type: ignore[misc]
    yield lambda: TrainingSetup(network().eval(), sample)
    yield lambda: TrainingSetup(network().double(), sample)
    yield lambda: TrainingSetup(network().bfloat16(), sample)
    yield lambda: TrainingSetup(frozen(), sample)
    yield lambda: TrainingSetup(nn.Sequential(network(), nn.Linear(2, 2)), sample)
    for batch in (sample.double(), torch.zeros(2, 5), torch.zeros(3, 4), (sample,), {"x": sample}):
        yield lambda batch=batch: TrainingSetup(network(), batch)  # type: ignore[misc]
    for name in ("sgd", "adam", "rmsprop"):
        yield lambda name=name: TrainingSetup(network(), sample, optimizer=name)  # type: ignore[misc]


def key(facts: dict[str, Any], **options: Any) -> str:
    memory = SearchMemory(lambda: {"options": asdict(ProbeOptions(**options))})
    memory.recall(FakeProber(), lambda: {"setup": facts})
    return memory.key


def test_no_change_of_a_set_up_keeps_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    # These set-ups are all in this file: they must differ without a look at the code.
    monkeypatch.setattr("batchfinder.probing.fingerprint.digests", lambda files: {})
    plain = fingerprint(TrainingSetup(network(), torch.zeros(2, 4)))
    assert plain == fingerprint(TrainingSetup(network(), torch.ones(2, 4)))
    keys = [key(plain), *(key(fingerprint(make())) for make in setups())]
    keys += [key(plain, **options) for options in OPTIONS]
    for name in SETTINGS:
        monkeypatch.setenv(name, "changed:1")
        keys.append(key(plain))
    assert len(keys) > 48
    assert len({*keys}) == len(keys)


def test_files_count_by_content_and_installed_ones_do_not(tmp_path: Path) -> None:
    file = tmp_path / "blocks.py"
    file.write_text("width = 8")
    before = digests([str(file), torch.__file__])
    assert [*before] == [str(file.resolve())]
    file.write_text("width = 9")
    assert digests([str(file)]) != before


def test_the_files_of_a_command_are_named_or_beside_its_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train.py", "model.py", "base.yaml", "parts/blocks.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    code = {"train.py", "model.py", "parts/blocks.py"}
    long = f"print(1)  # {'x' * 300}"  # longer than a file's name may be
    assert {*files_of_command(["python", "-c", long])} == set()
    assert {*files_of_command(["python", "train.py", "--config=base.yaml"])} == code | {"base.yaml"}
    assert {*files_of_command(["python", "-m", "parts.blocks"])} == code
    assert {*files_of_command(["python", str(tmp_path / "parts/blocks.py")])} == {
        str(tmp_path / "parts/blocks.py")
    }
