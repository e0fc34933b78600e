"""Targets ``hf:...``: a language model named by its configuration, without code."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("command", ["estimate", "find", "compare", "sweep"])
def test_its_options_are_for_a_configuration_only(command: str) -> None:
    place = ["--device", "cpu"] if command == "find" else ["--gpu", "t4"]
    result = CliRunner().invoke(cli, [command, f"{__file__}:build", "--lora", "16", *place])
    assert result.exit_code == 2
    assert "Try hf:meta-llama/Llama-3.1-8B as the target." in result.output


def test_a_length_is_a_number() -> None:
    result = run("hf:anything", "--seq", "long")
    assert result.exit_code == 2
    assert "'long' is no number of tokens" in result.output


@pytest.mark.parametrize("command", ["find", "compare"])
def test_one_length_or_a_sweep(command: str) -> None:
    place = ["--device", "cpu"] if command == "find" else ["--gpu", "t4"]
    result = CliRunner().invoke(cli, [command, "hf:llama", "--seq", "64", "--seq", "128", *place])
    assert result.exit_code == 2
    assert "Try batchfinder sweep hf:llama --seq 64,128" in result.output


def test_a_folder_with_a_configuration_is_named_with_hf(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    result = run(str(tmp_path))
    assert result.exit_code == 2
    assert f"Try hf:{tmp_path} for a language model." in result.output


def test_a_missing_configuration_or_library_is_one_line(tmp_path: Path) -> None:
    result = run(f"hf:{tmp_path}")
    assert result.exit_code == 1
    assert "Try" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("name", "attention", "line"),
    [
        ("gemma2", "sdpa", "it has no attention kernel for sdpa. Try --attention eager."),
        (
            "musicgen",
            "eager",
            r"AttributeError: .* \(.*modeling_musicgen\.py:\d+\)\. Try FILE\.py:",
        ),
    ],
)
def test_a_configuration_that_cannot_be_built_is_one_line(
    target: str, name: str, attention: str, line: str
) -> None:
    Path(target[3:], "config.json").write_text(json.dumps({"model_type": name}))
    result = run(target, "--seq", "64", "--attention", attention)
    assert result.exit_code == 1
    assert re.search(line, result.output)
    assert "Traceback" not in result.output


@pytest.mark.filterwarnings("ignore")
def test_a_model_without_sdpa_trains_with_eager_attention(target: str) -> None:
    Path(target[3:], "config.json").write_text(
        json.dumps({**CONFIG, "model_type": "gemma2", "head_dim": 16})
    )
    peaks = []
    for attention in ((), ("--attention", "eager")):
        result = run(target, "--seq", "64", *attention, "--max-batch-size", "2", "--json")
        assert result.exit_code == 0, result.output
        peaks.append(json.loads(result.stdout)["estimates"][0]["peak_bytes"])
    assert peaks[0] == peaks[1]


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
    assert "adapters in bf16, as TRL trains them" in result.stderr


@pytest.mark.filterwarnings("ignore")
def test_if_nothing_fits_the_first_lever_that_helps_is_named(target: str) -> None:
    small = (target, "--seq", "4096", "--memory", "60MiB", "--overhead", "0")
    result = run(*small)
    assert result.exit_code == 3, result.output
    *tried, advice = result.stderr.splitlines()
    options = advice.removeprefix("Note: Try ").removesuffix(
        ": batch size 1 fits with that, by the estimate."
    )
    assert f"  with {options}: fits" in tried
    assert f"  with {options.rpartition(' --')[0]}: needs more than " in "\n".join(tried)
    again = run(*small, *options.split())
    assert again.exit_code == 0, again.output


@pytest.mark.filterwarnings("ignore")
def test_of_several_gpus_and_lengths_the_advice_names_the_one_that_it_is_for(target: str) -> None:
    Path(target[3:], "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 200_000}))
    small = ("--memory", "150MiB", "--overhead", "0", "--gpu", "t4")
    result = run(target, "--seq", "8,16", *small)
    assert re.search(r"batch size 1 fits the (RTX 4090|T4) at 8 tokens with that", result.stderr)


@pytest.mark.filterwarnings("ignore")
def test_levers_that_need_a_missing_package_are_left_out(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *package: None if name == "bitsandbytes" else find(name, *package),
    )
    result = run(target, "--seq", "1024", "--memory", "40MiB", "--overhead", "0")
    assert result.exit_code == 3, result.output
    *tried, advice = result.stderr.splitlines()
    assert any("fits" in line for line in tried)
    assert not any("bitsandbytes" in line for line in tried)
    assert advice.endswith(" For --4bit, which saves more, try pip install bitsandbytes.")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["full", "dpo"])
def test_all_weights_or_preferences_are_trained(target: str, method: str) -> None:
    result = run(target, "--method", method, "--seq", "128", "--max-batch-size", "8", "--json")
    assert result.exit_code == 0, result.output
    (estimate,) = json.loads(result.stdout)["estimates"]
    assert (estimate["batch_size"], estimate["seq"]) == (8, 128)


@pytest.mark.filterwarnings("ignore")
def test_the_optimizer_is_the_fused_one_of_a_trainer(target: str) -> None:
    Path(target[3:], "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 200_000}))
    peaks = []
    for optimizer in ((), ("--optimizer", "adamw_torch_fused"), ("--optimizer", "adamw")):
        result = run(target, "--seq", "8", *optimizer, "--max-batch-size", "1", "--json")
        assert result.exit_code == 0, result.output
        peaks.append(json.loads(result.stdout)["estimates"][0]["peak_bytes"])
    assert peaks[0] == peaks[1] < peaks[2]


TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
SEEN = {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14, **TINY}
PATCHES = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}
ROPE = {"rope_type": "default", "mrope_section": [4, 6, 6]}
OTHERS = {
    "BertForMaskedLM": {"model_type": "bert", "num_hidden_layers": 2, **TINY},
    "BertForSequenceClassification": {"model_type": "bert", "num_hidden_layers": 2, **TINY},
    "ModernBertForMaskedLM": {"model_type": "modernbert", "num_hidden_layers": 2, **TINY},
    "T5ForConditionalGeneration": {"model_type": "t5", "d_model": 64, "num_layers": 2},
    "LlavaForConditionalGeneration": {
        "model_type": "llava",
        "image_token_index": 500,
        "text_config": CONFIG,
        "vision_config": {"num_hidden_layers": 2, **SEEN},
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "model_type": "qwen2_5_vl",
        "image_token_id": 500,
        "text_config": {**CONFIG, "model_type": "qwen2_5_vl_text", **TINY, "rope_parameters": ROPE},
        "vision_config": {**PATCHES, "out_hidden_size": 64, "fullatt_block_indexes": [1]},
    },
    "Qwen3VLForConditionalGeneration": {
        "model_type": "qwen3_vl",
        "image_token_id": 500,
        "text_config": {
            **CONFIG,
            "model_type": "qwen3_vl_text",
            "head_dim": 32,
            **TINY,
            "rope_parameters": {**ROPE, "rope_theta": 5e6},
        },
        "vision_config": {**PATCHES, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    },
    "Mistral3ForConditionalGeneration": {
        "model_type": "mistral3",
        "image_token_index": 500,
        "text_config": {**CONFIG, "model_type": "mistral", "head_dim": 16},
        "vision_config": {**SEEN, "model_type": "pixtral", "num_hidden_layers": 2, "head_dim": 32},
    },
}
IMAGES = {
    "Llava": "56 x 56 pixels in each example, 16",
    "Mistral3": "56 x 56 pixels in each example, 4",
}
IMAGES |= {"Qwen2_5_VL": "448 x 448 pixels in each example, 256"}
IMAGES |= {"Qwen3VL": "448 x 448 pixels in each example, 196"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_the_model_is_the_one_that_its_configuration_names(target: str, name: str) -> None:
    tokens = {"pad_token_id": 0, "decoder_start_token_id": 0}
    described = {"architectures": [name], **tokens, **OTHERS[name]}
    Path(target[3:], "config.json").write_text(json.dumps(described))
    result = run(target, "--seq", "300", "--lora", "4", "--max-batch-size", "2", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["estimates"][0]["batch_size"] == 2
    assert f"{name}, 0." in result.stderr
    image = IMAGES.get(name.partition("For")[0])
    assert ("one image of " in result.stderr) == bool(image)
    assert f"one image of {image} of 300" in result.stderr or not image


@pytest.mark.filterwarnings("ignore")
def test_experts_that_are_trained_or_not_quantized_are_said(target: str) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    Path(target[3:], "config.json").write_text(
        json.dumps({**CONFIG, **experts, "model_type": "mixtral"})
    )
    result = run(target, "--4bit", "--lora", "4", "--seq", "32", "--max-batch-size", "2")
    assert result.exit_code == 0, result.output
    assert "0.2 M of experts stay as they are: no linear layers" in result.stderr
    assert "on down_proj, gate.weight, gate_up_proj, k_proj, o_proj" in result.stderr


@pytest.mark.filterwarnings("ignore")
def test_no_more_tokens_than_positions_and_no_fewer_than_an_image_has(target: str) -> None:
    for name, seq, why in (
        ("BertForMaskedLM", "600", "positions for 512 tokens only. Try --seq 512."),
        ("LlavaForConditionalGeneration", "16", "the image alone has 16 tokens"),
    ):
        Path(target[3:], "config.json").write_text(
            json.dumps({"architectures": [name], **OTHERS[name]})
        )
        result = run(target, "--seq", seq)
        assert result.exit_code == 2
        assert why in result.output
        assert "for causal language models" in run(target, "--method", "dpo").output


@pytest.mark.filterwarnings("ignore")
def test_lengths_beyond_what_a_configuration_states_are_said(target: str) -> None:
    described = {**CONFIG, "max_position_embeddings": 64}
    Path(target[3:], "config.json").write_text(json.dumps(described))
    small = ("--method", "dpo", "--lora", "4", "--max-batch-size", "2")
    result = run(target, "--seq", "64,65", *small)
    assert result.exit_code == 0
    assert re.findall(r"(\d+) tokens are more than .*, (\d+)\.", result.stderr) == [("65", "64")]


def test_a_newer_transformers_may_know_a_model(target: str) -> None:
    Path(target[3:], "config.json").write_text(json.dumps({"model_type": "llama99"}))
    result = run(target, "--seq", "64")
    assert result.exit_code == 1
    assert "model type `llama99`" in result.output
    assert "Try pip install --upgrade transformers." in result.output


@pytest.mark.filterwarnings("ignore")
def test_a_sweep_over_lengths_and_a_comparison_of_levers(target: str) -> None:
    small = ("--lora", "4", "--gpu", "t4", "--max-batch-size", "8", "--json")
    swept = CliRunner().invoke(cli, ["sweep", target, "--seq", "64,128", *small])
    assert swept.exit_code == 0, swept.output
    rows = json.loads(swept.stdout)["rows"]
    assert [(row["seq"], row["batch_size"]) for row in rows] == [(64, 8), (128, 8)]
    levers = ("--strategy", "checkpointing", "--strategy", "bf16")
    compared = CliRunner().invoke(cli, ["compare", target, "--seq", "64", *small, *levers])
    assert compared.exit_code == 0, compared.output
    (comparison,) = json.loads(compared.stdout)["comparisons"]
    plain, checkpointed, lower = comparison["rows"]
    assert comparison["base"] in ("bf16, AdamW", "bf16, fused AdamW")  # by the Transformers version
    assert checkpointed["per_sample_bytes"] < plain["per_sample_bytes"]
    assert "sets its own precision, bf16" in lower["note"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_find_trains_random_weights(target: str) -> None:
    options = ("--lora", "4", "--seq", "16", "--device", "cpu", "--max-batch-size", "4", "--json")
    found = CliRunner().invoke(cli, ["find", target, *options])
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout)
    assert (result["batch_size"], result["status"]) == (4, "capped")
    assert any("random weights" in text for text in result["warnings"])


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_model_is_prepared_as_its_trainer_does(target: str) -> None:
    import torch

    from batchfinder.training.frameworks.language_model import language_model

    def dtypes(prepare: str) -> tuple[torch.dtype, ...]:
        with torch.device("meta"):
            setup = language_model(target[3:], lora=4, quantize="4bit", prepare=prepare, seq=8)
        model: Any = setup.model
        base = model.get_base_model()
        adapter = next(p for p in model.parameters() if p.requires_grad)
        return base.model.embed_tokens.weight.dtype, base.model.norm.weight.dtype, adapter.dtype

    whole, half = torch.float32, torch.bfloat16
    assert dtypes("trl") == (half, half, half)
    assert dtypes("trl0") == (half, whole, whole)
    assert dtypes("peft") == (whole, whole, whole)
    assert dtypes("none") == (half, half, whole)


@pytest.mark.filterwarnings("ignore")
def test_the_assumed_overhead_is_said(target: str) -> None:
    options = (target, "--seq", "64", "--max-batch-size", "2", "--explain")
    assumed, given = run(*options), run(*options, "--overhead", "1GiB")
    assert "Outside PyTorch's allocator: 1.8 GiB (assumed, as no" in assumed.stdout
    assert "Outside PyTorch's allocator: 1.0 GiB (--overhead)" in given.stdout
