"""Strategies as text, and which of them get a row."""

from __future__ import annotations

import pytest

from batchfinder.errors import UsageError
from batchfinder.studies.strategies import Strategy, parse_strategy, usual_strategies


@pytest.mark.parametrize(
    "text", ["bf16 + checkpointing + sgd", "pure-bf16", "adamw-8bit + fsdp", "accumulate + compile"]
)
def test_a_strategy_is_written_as_it_is_read(text: str) -> None:
    assert parse_strategy(text).name == text


def test_base_changes_nothing() -> None:
    assert parse_strategy("base") == Strategy()
    assert Strategy().name == "as it is"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("checkpoint", "there is no strategy 'checkpoint'; did you mean checkpointing"),
        ("xyz", "Try fp32, bf16"),
        ("bf16+fp16", "sets the precision twice. Try one strategy for each: bf16 and fp16."),
    ],
)
def test_what_is_no_strategy_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_strategy(text)
    assert message in str(refusal.value)


def names(**changes: object) -> list[str]:
    options = {
        "precision": "fp32",
        "optimizer": "adamw",
        "accumulate": False,
        "world_size": 1,
        "is_measured": False,
    }
    return [strategy.name for strategy in usual_strategies(**{**options, **changes})]  # type: ignore[arg-type]


def test_each_lever_has_a_row_and_what_the_base_does_has_none() -> None:
    assert names()[0] == "as it is"
    assert {"bf16", "fp16", "pure-bf16", "checkpointing", "sgd", "bf16 + checkpointing"} < {
        *names()
    }
    assert "fp32" not in names()
    assert "sgd" not in names(optimizer="sgd")
    assert "accumulate" not in names(accumulate=True)
    assert "checkpointing + adafactor" in names(precision="bf16")
    assert len({*names()}) == len(names())


def test_only_a_device_compiles_and_only_several_ranks_shard() -> None:
    assert "compile" not in names()
    assert "compile" in names(is_measured=True)
    assert not any("fsdp" in name for name in names())
    assert "bf16 + checkpointing + fsdp" in names(world_size=8)
