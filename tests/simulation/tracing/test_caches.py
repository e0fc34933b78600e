"""Tensors that a simulated step caches must not reach a real step."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.utils import parametrize

from batchfinder.errors import StepError
from batchfinder.probing.options import ProbeOptions
from batchfinder.simulation.tracing.step_trace import StepTraces
from batchfinder.training.setup import TrainingSetup

TABLES: dict[int, Tensor] = {}
ROWS = 10


def positions(rows: int) -> Tensor:
    return torch.arange(rows)[:, None] / rows * torch.ones(4)


def looked_up(rows: int) -> Tensor:
    if rows not in TABLES:
        TABLES[rows] = positions(rows)
    return TABLES[rows]


def scaled(rows: int, *, scale: float) -> dict[str, Tensor]:
    return {"table": positions(rows) * scale}


always = functools.cache(positions)
lately = functools.lru_cache(maxsize=8)(scaled)


class Positioned(nn.Module):
    def __init__(self, table: Callable[[int], Tensor], *, reads: bool = False) -> None:
        super().__init__()
        self.layer, self.table, self.reads = nn.Linear(4, 4), table, reads

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(inputs + self.table(inputs.shape[1]))
        if self.reads and output.mean() > 1:
            return output + 1
        return output + looked_up(inputs.shape[1])


def traces(model: nn.Module) -> StepTraces:
    sample = torch.randn(2, ROWS, 4), torch.randn(2, ROWS, 4)
    return StepTraces(TrainingSetup(model, sample), ProbeOptions(), (8, 0))


@pytest.fixture(autouse=True)
def _caches_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make new caches: those of the import are frozen, and the collector does not see them."""
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "always", functools.cache(positions))
    monkeypatch.setattr(here, "lately", functools.lru_cache(maxsize=8)(scaled))
    monkeypatch.setattr(here, "TABLES", {})


CACHES = pytest.mark.parametrize(
    ("table", "cache"),
    [
        (lambda rows: always(rows), lambda: always),
        (lambda rows: lately(rows, scale=1.0)["table"], lambda: lately),
    ],
    ids=["unbounded", "bounded"],
)


@CACHES
def test_tensors_without_data_are_removed_from_caches(
    table: Callable[[int], Tensor], cache: Callable[[], functools._lru_cache_wrapper[object]]
) -> None:
    model = Positioned(table)

    trace = traces(model)
    trace.at(8)

    assert trace.are_general
    assert cache().cache_info().currsize == 0
    assert TABLES == {}
    assert model(torch.randn(2, ROWS, 4)).isfinite().all()


def test_fake_tensors_of_no_mode_do_not_matter() -> None:
    left = torch.Tensor._make_subclass(FakeTensor, torch.empty(2, device="meta"))

    test_tensors_without_data_are_removed_from_caches(lambda rows: always(rows), lambda: always)

    assert not hasattr(left, "fake_mode")


@CACHES
def test_caches_are_cleared_after_a_refused_step_too(
    table: Callable[[int], Tensor], cache: Callable[[], functools._lru_cache_wrapper[object]]
) -> None:
    with pytest.raises(StepError, match="the step reads a value of a tensor"):
        traces(Positioned(table, reads=True)).at(8)

    assert cache().cache_info().currsize == 0


LIBRARY = """
import torch
from torch import nn

MASK = TABLE = None
TABLES = {}
ROWS = []

def positions(rows):
    global MASK, TABLE, SEEN
    if MASK is None:
        MASK = torch.ones(rows, 4)
    if TABLE is None:
        TABLE = (torch.ones(rows, 4), rows)
    if rows not in TABLES:
        TABLES[rows] = {"table": torch.ones(rows, 4)}
        ROWS.append(MASK)
        SEEN = MASK
    return MASK + TABLE[0] + TABLES[rows]["table"] + SEEN

class Positioned(nn.Linear):
    bias_of_all = None

    def forward(self, inputs):
        if self.bias_of_all is None:
            Positioned.bias_of_all = torch.ones(4)
        return super().forward(inputs + positions(inputs.shape[1])) + self.bias_of_all
"""


def test_variables_and_classes_of_libraries_are_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "cached_positions.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    library: Any = importlib.import_module("cached_positions")
    model = library.Positioned(4, 4)

    trace = traces(model)
    trace.at(8)

    assert trace.are_general
    assert library.MASK is library.TABLE is library.Positioned.bias_of_all is None
    assert library.ROWS == []
    assert not hasattr(library, "SEEN")
    assert library.TABLES == {}
    assert model(torch.randn(2, ROWS, 4)).isfinite().all()


def test_modules_that_load_lazily_stay_unloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "loaded_late.py").write_text("raise RuntimeError('loaded')")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    spec = importlib.util.find_spec("loaded_late")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "loaded_late", module)
    spec.loader.exec_module(module)

    trace = traces(Positioned(always))
    trace.at(8)

    assert trace.are_general


def test_earlier_cache_entries_stay() -> None:
    cached, TABLES[ROWS] = always(ROWS), positions(ROWS)
    table = TABLES[ROWS]

    traces(Positioned(always)).at(8)

    assert always(ROWS) is cached
    assert TABLES[ROWS] is table


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        for layer in self.layers:
            parametrize.register_parametrization(layer, "weight", Doubled())

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            with parametrize.cached():  # which binds a new dictionary afterward
                inputs = layer(inputs)
        return inputs


def test_a_cache_that_its_library_drops_frees_its_tensors_in_the_first_trace_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parametrize, "_cache", {})
    found = traces(Parametrized())
    found.at(4)
    assert found.are_general
    assert not found.warnings
    assert not vars(parametrize)["_cache"]
