"""CPU operators that behave as on CUDA while a step is simulated.

PyTorch picks an operator's kernel by device. If CUDA's kernel keeps other tensors alive than the
CPU's, the CPU's entry in PyTorch's dispatch table is replaced during the simulation. Composite
operators use the table too, so they also call the replacement.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


@contextmanager
def kernels_replaced(key: str, kernels: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace ``aten`` operators for one dispatch key until the block ends."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            # PyTorch warns that a kernel is replaced, which is intended here.
            warnings.simplefilter("ignore", UserWarning)
            for name, kernel in kernels.items():
                library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    """Compute a linear layer as on CUDA, where a separate bias is added in place.

    For fake tensors, PyTorch would add it out of place. It would also accept different dtypes,
    which real tensors do not.
    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/Linear.cpp
    """
    if input.dtype != weight.dtype:
        raise RuntimeError(
            f"mat1 and mat2 must have the same dtype, but got {input.dtype} and {weight.dtype}"
        )
    if bias is None or input.dim() == 2 or input.is_contiguous():
        output: Tensor = torch.ops.aten.linear.default.decompose(input, weight, bias)
        return output
    return torch.matmul(input, weight.t()).add_(bias)


def softmax_by(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a softmax as on CUDA: one kernel reads fp16 and writes fp32.

    Its gradient is in fp16 again. No other pair of dtypes is fused.
    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/SoftMax.cpp

    Args:
        kernel: ``aten::_softmax`` or ``aten::_log_softmax``.
    """

    def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:  # noqa: A002
        is_fused = input.dtype is torch.float16 and dtype is torch.float32
        converted = input if is_fused or dtype is None else input.to(dtype)
        return kernel(converted, dim, is_fused)

    return softmax


SOFTMAX: dict[str, Callable[..., Tensor]] = {
    "softmax.int": softmax_by(torch.ops.aten._softmax.default),
    "log_softmax.int": softmax_by(torch.ops.aten._log_softmax.default),
}
"""The replacements of both."""


def dropout(input: Tensor, p: float, train: bool) -> Tensor:  # noqa: A002
    """Compute dropout as on CUDA: one kernel that keeps a mask of one byte per element.

    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/Dropout.cpp
    """
    if not train or p == 0 or input.numel() == 0:
        return input
    if p == 1:
        return input.mul(0.0)
    output: Tensor = torch.ops.aten.native_dropout.default(input, p, train)[0]
    return output


def group_norm(
    input: Tensor,  # noqa: A002
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Compute group norm as on CUDA, which keeps a contiguous copy of channels-last images.

    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/group_norm.cpp
    """
    batch_size, channels = input.shape[:2]
    others = math.prod(input.shape[2:])
    output: Tensor = torch.ops.aten.native_group_norm.default(
        input.contiguous(), weight, bias, batch_size, channels, others, num_groups, eps
    )[0]
    return output


def foreach_as_cuda(optimizer: Optimizer, *_: Any) -> None:
    """Make an optimizer use its foreach implementation by default, as on CUDA.

    Called before each of its steps. It also turns ``capturable`` off, which refuses CPU tensors and
    only affects where the step counter is kept.
    https://docs.pytorch.org/docs/stable/optim.html#algorithms
    """
    for group in optimizer.param_groups:
        if group.get("capturable"):
            group["capturable"] = False
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
