"""What a simulated step computes once for all must not be there for a real one."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from batchfinder.errors import StepError
from batchfinder.probing.options import ProbeOptions
from batchfinder.simulation.step_trace import StepTraces
from batchfinder.training.setup import TrainingSetup

TABLES: dict[int, Tensor] = {}
ROWS = 10


def positions(rows: int) -> Tensor:
    return torch.arange(rows)[:, None] / rows * torch.ones(4)


def looked_up(rows: int) -> Tensor:
    if rows not in TABLES:
        TABLES[rows] = positions(rows)
    return TABLES[rows]


always = functools.cache(positions)
lately = functools.lru_cache(maxsize=8)(lambda rows, *, scale: {"table": positions(rows) * scale})


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


CACHES = pytest.mark.parametrize(
    ("table", "cache"),
    [(always, always), (lambda rows: lately(rows, scale=1.0)["table"], lately)],
    ids=["unbounded", "bounded"],
)


@CACHES
def test_what_was_cached_without_data_is_forgotten(
    table: Callable[[int], Tensor], cache: functools._lru_cache_wrapper[object]
) -> None:
    cache.cache_clear()
    TABLES.clear()
    model = Positioned(table)

    trace = traces(model)
    trace.at(8)

    assert trace.are_general
    assert cache.cache_info().currsize == 0
    assert TABLES == {}
    assert model(torch.randn(2, ROWS, 4)).isfinite().all()


@CACHES
def test_so_it_is_where_the_step_is_refused(
    table: Callable[[int], Tensor], cache: functools._lru_cache_wrapper[object]
) -> None:
    cache.cache_clear()

    with pytest.raises(StepError, match="a value of a tensor is read"):
        traces(Positioned(table, reads=True)).at(8)

    assert cache.cache_info().currsize == 0


def test_what_was_cached_before_stays() -> None:
    always.cache_clear()
    cached, TABLES[ROWS] = always(ROWS), positions(ROWS)
    table = TABLES[ROWS]

    traces(Positioned(always)).at(8)

    assert always(ROWS) is cached
    assert TABLES[ROWS] is table
