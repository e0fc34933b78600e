"""Models of Transformers that return their loss: ``output = model(**batch)``."""

from __future__ import annotations

from typing import Any

import setup_loop
import torch
import transformers
from torch import Tensor, nn

Batch = dict[str, Tensor]


def target(model: str = "gpt2", **sizes: int) -> tuple[nn.Module, Batch]:
    """Return the model and one batch."""
    length = sizes.get("length", LENGTHS[model])
    return BUILD[model](**sizes), MAKE_BATCH[model](2, length)


def gpt2(layers: int = 12, width: int = 768, length: int = 512) -> nn.Module:
    """Return GPT-2."""
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 64, n_positions=length, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def llama(layers: int = 4, width: int = 1024, length: int = 1024) -> nn.Module:
    """Return a Llama that checkpoints its activations."""
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 256,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    model.gradient_checkpointing_enable()
    return model


def qwen(layers: int = 6, width: int = 896, length: int = 1024) -> nn.Module:
    """Return a Qwen2 with its large vocabulary and tied embeddings."""
    config = transformers.Qwen2Config(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4864,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return transformers.Qwen2ForCausalLM(config)


def bert(layers: int = 12, width: int = 768, length: int = 128) -> nn.Module:
    """Return BERT as a masked language model."""
    config = transformers.BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        max_position_embeddings=max(length, 512),
    )
    return transformers.BertForMaskedLM(config)


def t5(layers: int = 6, width: int = 512, length: int = 256) -> nn.Module:
    """Return T5."""
    config = transformers.T5Config(
        num_layers=layers,
        d_model=width,
        d_ff=4 * width,
        num_heads=width // 64,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def bart(layers: int = 6, width: int = 768, length: int = 256) -> nn.Module:
    """Return BART."""
    config = transformers.BartConfig(
        encoder_layers=layers, decoder_layers=layers, d_model=width, use_cache=False
    )
    return transformers.BartForConditionalGeneration(config)


def clip(layers: int = 12, length: int = 77) -> nn.Module:
    """Return CLIP with its contrastive loss."""
    config = transformers.CLIPConfig(
        text_config={"num_hidden_layers": layers},
        vision_config={"num_hidden_layers": layers},
    )
    return _WithItsLoss(transformers.CLIPModel(config))


def wav2vec2(layers: int = 12, length: int = 80_000) -> nn.Module:
    """Return wav2vec 2.0 as a classifier of speech, on 5 seconds of sound."""
    config = transformers.Wav2Vec2Config(num_hidden_layers=layers, apply_spec_augment=False)
    return transformers.Wav2Vec2ForSequenceClassification(config)


def whisper(layers: int = 4, length: int = 128) -> nn.Module:
    """Return Whisper tiny, on 30 seconds of sound."""
    config = transformers.WhisperConfig(
        d_model=384,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
        use_cache=False,
        apply_spec_augment=False,
    )
    return transformers.WhisperForConditionalGeneration(config)


class _WithItsLoss(nn.Module):
    """CLIP, which returns its loss only where it is asked to."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Any:
        """Return the output with the loss."""
        return self.model(**batch, return_loss=True)


def tokens(batch_size: int, length: int) -> Batch:
    """Return token ids that are their own labels."""
    ids = torch.ones(batch_size, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def masked_tokens(batch_size: int, length: int) -> Batch:
    """Return padded texts, as tokenizers do."""
    return {**tokens(batch_size, length), "attention_mask": torch.ones(batch_size, length).long()}


def texts_and_images(batch_size: int, length: int) -> Batch:
    """Return pairs of a text and an image."""
    return {
        "input_ids": torch.ones(batch_size, length, dtype=torch.long),
        "attention_mask": torch.ones(batch_size, length, dtype=torch.long),
        "pixel_values": torch.zeros(batch_size, 3, 224, 224),
    }


def sounds(batch_size: int, length: int) -> Batch:
    """Return waveforms and their classes."""
    waves = torch.zeros(batch_size, length)
    return {"input_values": waves, "labels": torch.zeros(batch_size, dtype=torch.long)}


def spectrograms(batch_size: int, length: int) -> Batch:
    """Return spectrograms of speech and its transcript."""
    labels = torch.ones(batch_size, length, dtype=torch.long)
    return {"input_features": torch.zeros(batch_size, 80, 3000), "labels": labels}


BUILD: dict[str, Any] = {
    f.__name__: f for f in (gpt2, llama, qwen, bert, t5, bart, clip, wav2vec2, whisper)
}
MAKE_BATCH = {
    **dict.fromkeys(("gpt2", "llama", "qwen"), tokens),
    **dict.fromkeys(("bert", "t5", "bart"), masked_tokens),
    "clip": texts_and_images,
    "wav2vec2": sounds,
    "whisper": spectrograms,
}
LENGTHS = {"gpt2": 512, "llama": 1024, "qwen": 1024, "bert": 128, "t5": 256, "bart": 256}
LENGTHS |= {"clip": 77, "wav2vec2": 80_000, "whisper": 128}


if __name__ == "__main__":
    device = setup_loop.device
    model, optimizer = setup_loop.with_adamw(target)
    kind = setup_loop.arguments.get("model", "gpt2")
    length = setup_loop.arguments.get("length", LENGTHS[kind])
    loader = (MAKE_BATCH[kind](setup_loop.batch_size, length) for _ in range(setup_loop.steps))
    for batch in loader:
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        with setup_loop.autocast():
            output = model(**batch)
        loss = output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
