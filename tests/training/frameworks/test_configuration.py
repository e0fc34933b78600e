"""The configuration that ``hf:`` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchfinder.errors import TargetError
from batchfinder.training.frameworks.language_model import language_model

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_file_of_another_name_is_the_one_that_counts(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    for name, layers in (("config", 1), ("larger", 3)):
        described = {"model_type": "llama", **sizes, "num_hidden_layers": layers}
        (tmp_path / f"{name}.json").write_text(json.dumps(described))
    setup = language_model(str(tmp_path / "larger.json"), seq=8, precision="fp32")
    config: Any = setup.model.config
    assert config.num_hidden_layers == 3


def test_an_empty_name_is_no_model() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(TargetError, match=r"hf: names no model\. Try hf:FOLDER"):
        language_model("")


@pytest.mark.parametrize(
    ("described", "left_out"),
    [
        ({"model_type": "mamba2", "num_heads": 4, "n_groups": 1, "state_size": 16}, "out_proj"),
        ({"model_type": "llama4_text", "num_attention_heads": 4, "head_dim": 16}, "router"),
    ],
)
def test_layers_that_cannot_have_adapters_have_none(
    tmp_path: Path, described: dict[str, Any], left_out: str
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    sizes = {"hidden_size": 64, "head_dim": 32, "vocab_size": 128, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 64, "intermediate_size_mlp": 64, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **described}))
    setup = language_model(str(tmp_path), seq=8, lora=4, precision="fp32")
    adapted = {
        name.split(".lora_")[0] for name, _ in setup.model.named_parameters() if "lora" in name
    }
    assert adapted
    assert not any(name.endswith(left_out) for name in adapted)
    assert any(name.endswith(left_out) for name, _ in setup.model.named_modules())
    model: Any = setup.model
    model(**setup.sample).loss.backward()
