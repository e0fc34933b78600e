"""RMS norm on CUDA since PyTorch 2.9: one kernel, which keeps one number for each row.

On the CPU it is composed of other operators, which keep several tensors as large as the input.

Sources: https://github.com/pytorch/pytorch/pull/153666, ``aten/src/ATen/native/layer_norm.cpp`` and
``native/cuda/layer_norm_kernel.cu`` of PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from batchfinder.simulation.kernels.convolution import compute_format

FUSED_SINCE = (2, 9)


def rms_norm(
    input: Tensor,  # noqa: A002 - as the operator names it
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Run ``aten::rms_norm`` as on CUDA.

    It is composed of other operators for channels-last images, and if the weight's dtype differs.
    """
    is_channels_last = compute_format(input) is not torch.contiguous_format
    output: Tensor
    if is_channels_last or (weight is not None and weight.dtype != input.dtype):
        output = torch.ops.aten.rms_norm.default.decompose(input, normalized_shape, weight, eps)
    else:
        output = _RmsNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return output


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        rows = values.contiguous()
        output = torch.empty_like(rows)
        shape = [*values.shape[: values.dim() - dims], *([1] * dims)]
        exact = torch.float64 if values.dtype is torch.float64 else torch.float32
        ctx.save_for_backward(values, weight, values.new_empty(shape, dtype=exact))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        values, weight, _ = ctx.saved_tensors
        rows = gradients[0].contiguous(), values.contiguous()
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        of_values = torch.empty_like(rows[1]) if ctx.needs_input_grad[0] else None
        return of_values, of_weight, None
