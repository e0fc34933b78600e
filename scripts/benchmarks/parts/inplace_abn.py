"""The memory of ``inplace_abn``, the package that timm's TResNet was built on before timm 0.9.

A batch normalization with a leaky ReLU, written over its input: of the two only the output is kept,
and the backward pass computes the normalized input and its gradient anew, each in a tensor of its
own. Source: ``inplace_abn/functions.py`` of https://github.com/mapillary/inplace_abn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def with_inplace_abn(model: nn.Module) -> nn.Module:
    """The model with its normalizations replaced, in place."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, _InplaceAbn(child))
    return model


class _InplaceAbn(nn.Module):
    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)

    def forward(self, images: Tensor) -> Any:
        return _Function.apply(images, self.weight, self.bias)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        variance = torch.empty_like(weight)
        ctx.mark_dirty(images)
        ctx.save_for_backward(images, variance, weight, bias)
        return images

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        images, _, weight, bias = ctx.saved_tensors
        normalized, gradient = torch.empty_like(images), torch.empty_like(images)
        del normalized
        return gradient, torch.empty_like(weight), torch.empty_like(bias)
