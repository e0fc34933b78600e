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
