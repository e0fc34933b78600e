"""What Transformers 4 computed in another way than 5: losses, caches, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.mixtral import modeling_mixtral

from batchfinder.training.state.patching import replaced

# Architectures whose own loss in Transformers 4 left the logits in their dtype.
_OWN_LOSS = {"gpt_bigcode", "gpt_neox", "falcon", "gpt2"}


def use_older_forward(model: Any) -> None:
    """Compute the loss as Transformers 4 did, from a copy of the shifted logits."""
    base = getattr(model, "get_base_model", lambda: model)()
    base.loss_function = partial(_loss, upcasts=base.config.model_type not in _OWN_LOSS)
    if base.config.model_type == "gpt_bigcode":
        _return_cache(base)


def _return_cache(model: Any) -> None:
    """Return keys and values with checkpointing too. As views, they keep the queries alive."""
    kept: list[Tensor] = []
    hooks: list[Any] = []

    def begin(*_: Any) -> None:
        hooks[:] = [
            layer.attn.c_attn.register_forward_hook(lambda *a: kept.append(a[-1].detach()))
            for layer in model.transformer.h
        ]

    def end(_: Any, __: Any, output: Any) -> None:
        while hooks:  # before the layers are computed again
            hooks.pop().remove()
        output.past_key_values = (*kept,)
        kept.clear()

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end)


def _loss(logits: Any, labels: Any, vocab_size: int, *, upcasts: bool, **_: Any) -> Any:
    if upcasts:
        logits = logits.float()  # alive until the loss is there
    shifted = logits[..., :-1, :].contiguous().view(-1, vocab_size)
    return nn.functional.cross_entropy(shifted, labels[..., 1:].contiguous().view(-1))


@contextmanager
def older_experts() -> Iterator[None]:
    """Make experts from linear layers, which are quantized, instead of one tensor for all."""
    with replaced(modeling_mixtral, MixtralSparseMoeBlock=ListedExperts):
        yield


class ListedExperts(nn.Module):
    """Mixtral's experts in Transformers 4, each with an even share of the tokens.

    Args:
        config: the configuration of the model.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._chosen = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_local_experts, bias=False)
        self.experts = nn.ModuleList(_Expert(config) for _ in range(config.num_local_experts))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the weighted outputs of the experts."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        weights = nn.functional.softmax(self.gate(rows), dim=1, dtype=torch.float)
        weights, _ = torch.topk(weights, self._chosen, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(rows.dtype)
        output = torch.zeros_like(rows)
        share = len(rows) * self._chosen // len(self.experts)
        chosen = torch.arange(share, device=rows.device)
        for expert in self.experts:
            part = expert(rows[chosen]) * weights[chosen, 0, None]
            output.index_add_(0, chosen, part.to(rows.dtype))
        return output.reshape(hidden.shape)


class _Expert(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.w2(nn.functional.silu(self.w1(rows)) * self.w3(rows))
        return output
