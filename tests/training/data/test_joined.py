"""Batches of examples that a collator joins, as the nodes of graphs, instead of padding them."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from batchfinder import TrainingSetup
from batchfinder.training.complete_setup import completed
from batchfinder.training.data.drawn import DRAWN_BATCHES

LENGTHS = [1 + place % 5 for place in range(40)]
LENGTHS[17] = 9
GRAPHS: Any = [[0] * length for length in LENGTHS]


def joined(graphs: list[list[int]]) -> tuple[Tensor, list[int]]:
    return torch.tensor([*chain(*graphs)]), [len(graph) for graph in graphs]


def lengths(loader: Any, batch_size: int) -> list[list[int]]:
    """Return the lengths in the batch of each step."""
    setup, _ = completed(TrainingSetup(nn.Identity(), loader=loader))
    assert setup.make_batch is not None
    return [setup.make_batch(batch_size, step)[1] for step in range(DRAWN_BATCHES)]


def test_drawn_at_random_they_begin_with_the_longest_and_the_largest_of_many_draws() -> None:
    loader = DataLoader(GRAPHS, 4, shuffle=True, collate_fn=joined)
    for size in (1, 8, 30):
        first, *others = lengths(loader, size)
        assert len(first) == size
        assert first[0] == max(LENGTHS)
        assert sum(first) >= max(map(sum, others))
    assert sum(first) < 1.5 * 30 * sum(LENGTHS) / len(LENGTHS)


def test_others_may_put_the_longest_together() -> None:
    in_order = DataLoader(GRAPHS, 4, collate_fn=joined)
    for loader in (in_order, (GRAPHS, joined)):
        assert lengths(loader, 30)[0] == [max(LENGTHS)] * 30


@pytest.mark.parametrize("text", ["", "of varying length "])
def test_the_collator_shows_how_long_examples_are_that_are_only_names(text: str) -> None:
    def loaded(records: list[dict[str, Any]]) -> tuple[Tensor, list[int]]:
        return joined([GRAPHS[record["name"]] for record in records])

    records: Any = [{"name": place, "text": text * (place % 3)} for place in range(len(GRAPHS))]
    loader = DataLoader(records, 4, shuffle=True, collate_fn=loaded)
    assert lengths(loader, 8) == lengths(DataLoader(GRAPHS, 4, shuffle=True, collate_fn=joined), 8)
