"""Which modules of a model are its blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from batchfinder.training.parallel import is_wrapped, repeated_blocks, unwrapped


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


class Pair(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


class Halves(nn.Module):
    def __init__(self, half: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.down, self.up = half(), half()


class Model(nn.Module):
    """Embeddings beside each other, a list of blocks, and a head."""

    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 4)
        self.positions = nn.Embedding(9, 4)
        blocks = [Block() for _ in range(3)]
        self.head = nn.Linear(4, 9, bias=False)
        if is_tied:
            blocks.append(Block())
            self.extra = blocks[3].mlp[0]
        self.blocks = nn.ModuleList(blocks)


def names(model: nn.Module) -> list[str]:
    found = repeated_blocks(model)
    return [name for name, module in model.named_modules() if any(module is b for b in found)]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Model(), ["blocks.0", "blocks.1", "blocks.2"]),
        (nn.Linear(4, 4), []),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), ["0", "2"]),
        (
            nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block())),
            ["0.0", "0.1", "1"],
        ),
        (nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))), ["0", "1"]),
        (nn.ModuleList(nn.ReLU() for _ in range(3)), []),
        (nn.ModuleList(nn.Sequential(*Pair()) for _ in range(2)), ["0", "1"]),
        (nn.ModuleList(nn.ModuleList(Pair()) for _ in range(2)), ["0.0", "0.2", "1.0", "1.2"]),
        (Halves(Pair), ["down", "up"]),
        (Halves(lambda: nn.Sequential(*Pair())), ["down.0", "down.2", "up.0", "up.2"]),
    ],
)
def test_blocks_are_the_outermost_repeated_modules(model: nn.Module, expected: list[str]) -> None:
    assert names(model) == expected


def test_a_block_that_shares_a_parameter_with_the_rest_is_left_to_the_rest() -> None:
    assert names(Model(is_tied=True)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_plain_model_is_not_wrapped() -> None:
    model = Model()
    assert not is_wrapped(model)
    assert unwrapped(model) is model
