"""``batchfinder estimate hf:...``: a language model named by its configuration, without code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from batchfinder.cli.app import cli

CONFIG = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["estimate", *arguments, "--gpu", "rtx4090"])


@pytest.fixture
def target(tmp_path: Path) -> str:
    for name in ("transformers", "peft", "bitsandbytes"):
        pytest.importorskip(name)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return f"hf:{tmp_path}"


def test_its_options_are_for_a_configuration_only() -> None:
    result = run("train.py:build_model", "--lora", "16")
    assert result.exit_code == 2
    assert "Try hf:meta-llama/Llama-3.1-8B as the target." in result.output


def test_a_length_is_a_number() -> None:
    result = run("hf:anything", "--seq", "long")
    assert result.exit_code == 2
    assert "'long' is no number of tokens" in result.output


def test_a_missing_configuration_or_library_is_one_line(tmp_path: Path) -> None:
    result = run(f"hf:{tmp_path}")
    assert result.exit_code == 1
    assert "Try" in result.output
    assert "Traceback" not in result.output


@pytest.mark.filterwarnings("ignore")
def test_several_lengths_make_a_table(target: str) -> None:
    options = ("--lora", "4", "--4bit", "--checkpointing", "--optimizer", "paged_adamw_8bit")
    result = run(target, *options, "--seq", "64,2048", "--memory", "2.2GiB")
    assert result.exit_code == 0, result.output
    header, memory, *rows = (line.split() for line in result.stdout.splitlines())
    assert (header, memory) == (["tokens", "RTX", "4090"], ["2.2", "GiB"])
    assert [row[0] for row in rows] == ["64", "2048"]
    assert int(rows[0][1]) > 8 * int(rows[1][1]) > 0
    assert "LoRA of rank 4" in result.stderr
    assert "fp32, as TRL and PEFT prepare them" in result.stderr


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["full", "dpo"])
def test_all_weights_or_preferences_are_trained(target: str, method: str) -> None:
    result = run(target, "--method", method, "--seq", "128", "--max-batch-size", "8", "--json")
    assert result.exit_code == 0, result.output
    (estimate,) = json.loads(result.stdout)["estimates"]
    assert (estimate["batch_size"], estimate["seq"]) == (8, 128)
