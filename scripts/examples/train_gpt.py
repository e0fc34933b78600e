"""Train a small GPT, its output layer tied to its token embedding, to predict the next token.

Try it: batchfinder find scripts/examples/train_gpt.py:build_model --memory-limit 2GiB
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Causal self-attention and an MLP, each behind a layer normalisation."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, tokens, width) to the same shape."""
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return cast(Tensor, x + self.mlp(x))


class GPT(nn.Module):
    """A decoder-only transformer that returns its own loss, as those of Transformers do."""

    def __init__(self, width: int, depth: int, vocabulary: int, max_tokens: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(max_tokens, width)
        self.blocks = nn.Sequential(*(Block(width, width // 16) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """From token ids (batch, tokens) to the loss and the logits of the next tokens."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.blocks(self.tokens(input_ids) + self.positions(positions))
        logits = self.head(self.norm(x))
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def build_model(
    width: int = 64, depth: int = 4, vocabulary: int = 512, max_tokens: int = 64
) -> GPT:
    """The model to train."""
    return GPT(width, depth, vocabulary, max_tokens)


def build_sample(
    batch_size: int = 4, vocabulary: int = 512, max_tokens: int = 64
) -> dict[str, Tensor]:
    """One batch as the DataLoader yields it: token ids, which are the labels too."""
    input_ids = torch.randint(vocabulary, (batch_size, max_tokens))
    return {"input_ids": input_ids, "labels": input_ids.clone()}


def main(batch_size: int = 32, steps: int = 5) -> None:
    """Train for a few steps."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(steps):
        loss = model(**build_sample(batch_size))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
