"""Weights that a library quantizes or freezes: restored bit for bit, and not copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchfinder import find_max_batch
from batchfinder.errors import DeviceError
from batchfinder.training.state import storage
from batchfinder.training.state.snapshot import preserved_state


class Scales:
    """What a library keeps beside a quantized weight; `nested` has scales of the scales."""

    __module__ = "torch.nn"  # counts as a library's class

    def __init__(self, absmax: Tensor, nested: Scales | None = None) -> None:
        self.absmax = absmax
        self.nested = nested
        self.is_packed = False


class Quantized(nn.Parameter):
    __module__ = "torch.nn"
    scales: Scales


class PackedInEvaluation(nn.Module):
    """A quantized layer that repacks its weight in evaluation mode, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Quantized(torch.randint(0, 255, (4, 4), dtype=torch.uint8), False)
        self.weight.scales = Scales(torch.rand(4), Scales(torch.rand(1)))
        self.adapter = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        scales = self.weight.scales
        if not scales.is_packed:
            self.weight.data = self.weight.data.t().contiguous().flatten()
            scales.is_packed = True
            scales.absmax = scales.absmax.half()
            assert scales.nested is not None
            scales.nested.absmax.mul_(2)
        weight = self.weight.view(4, 4).float() * scales.absmax
        return x @ weight + x @ self.adapter


def parts(layer: PackedInEvaluation) -> list[Any]:
    scales = layer.weight.scales
    assert scales.nested is not None
    return [layer.weight.data, scales.absmax, scales.nested.absmax]


def test_scales_and_a_repacked_weight_are_restored_bit_for_bit() -> None:
    layer = PackedInEvaluation()
    before, weight, scales = (
        [part.clone() for part in parts(layer)],
        layer.weight,
        layer.weight.scales,
    )
    with preserved_state(layer):
        layer(torch.ones(2, 4))
        assert layer.weight.shape == (16,)
    assert layer.weight is weight
    assert layer.weight.scales is scales
    assert not scales.is_packed
    for part, old in zip(parts(layer), before, strict=True):
        assert part.dtype is old.dtype
        assert torch.equal(part, old)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each copy in host memory."""
    sizes: list[int] = []
    real = storage.host_copy

    def noted(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return real(tensor)

    monkeypatch.setattr(storage, "host_copy", noted)
    return sizes


def test_frozen_weights_below_adapters_are_watched_and_not_copied(copied: list[int]) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False).requires_grad_(False), nn.Linear(64, 2))
    vars(model)["peft_config"] = SimpleNamespace()
    with preserved_state(model):
        model(torch.ones(1, 64)).sum().backward()
    assert 64 * 64 * 4 not in copied
    assert 2 * 64 * 4 in copied
    with pytest.raises(DeviceError, match="writes to frozen weights"), preserved_state(model):
        model.get_parameter("0.weight").zero_()


class OnHost(nn.Linear):
    """A layer that stays where it is, as large embeddings do."""

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        return self


def test_weights_that_move_to_the_device_are_not_copied(copied: list[int]) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), OnHost(2, 2, bias=False))
    first, second = model.parameters()
    before = [first.detach().clone(), second.detach().clone()]
    with preserved_state(model, device="meta", moved=[model]) as state:
        for _ in range(2):
            model.to("meta")
            assert model[0].weight.is_meta
            second.data.zero_()  # without a new version
            state.start_over()
            assert torch.equal(second, before[1])
    assert copied == [second.nbytes]
    assert model[0].weight is first
    assert torch.equal(first, before[0])


def tiny_llama(quantized: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    bitsandbytes = pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    make: Any = {
        "4bit": lambda i, o: bitsandbytes.nn.LinearNF4(i, o, bias=False),
        "8bit": lambda i, o: bitsandbytes.nn.Linear8bitLt(i, o, False, has_fp16_weights=False),
    }[quantized]
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            old = getattr(layer.self_attn, name)
            new = make(old.in_features, old.out_features)
            new.load_state_dict({"weight": old.weight.detach()})
            setattr(layer.self_attn, name, new.to("cpu"))
    lora = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options
    )
    return peft.get_peft_model(model, lora)


def step(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.no_grad():
        model.eval()
        model(input_ids=batch)  # as a reference model: bitsandbytes repacks in evaluation mode
        model.train()
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("quantized", ["4bit", "8bit"])
def test_a_quantized_model_answers_bit_for_bit_as_before(quantized: str) -> None:
    model = tiny_llama(quantized, use_dora=quantized == "4bit")
    ids = torch.arange(16)[None]
    model.train()
    for module in model.base_model.model.modules():
        module.eval()  # as from_pretrained() and get_peft_model() leave it
    with torch.no_grad():
        before = model(input_ids=ids).logits.clone()
    modes = [module.training for module in model.modules()]
    with preserved_state(model):
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=0.1)
        for _ in range(2):
            torch.autograd.backward(step(model, ids))
            optimizer.step()
    assert [module.training for module in model.modules()] == modes
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, before)
    with pytest.warns(match="LlamaForCausalLM is in evaluation mode"):
        assert find_max_batch(model, ids, step=step, device="cpu", max_batch_size=2).batch_size == 2
