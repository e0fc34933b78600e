"""``F.scaled_dot_product_attention`` as the target GPU would run it.

PyTorch picks one of several kernels by GPU, dtype, head size and mask; they differ by orders of
magnitude in what the backward pass keeps. Source of the rules:
https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable

import torch
from torch import Tensor

ComputeCapability = tuple[int, int]


class AttentionBackend(enum.Enum):
    """A kernel of ``F.scaled_dot_product_attention``."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


FAMILIES: tuple[ComputeCapability, ...] = ((5, 0), (7, 0), (8, 0))
"""The oldest GPU of each generation with kernels of its own."""


def kernel_family(capability: ComputeCapability) -> ComputeCapability:
    """The oldest GPU that runs a training step with the same kernels.

    Example:
        >>> kernel_family((8, 9)), kernel_family((7, 5)), kernel_family((6, 1))
        ((8, 0), (7, 0), (5, 0))
    """
    return max(oldest for oldest in FAMILIES if oldest <= capability)


def choose_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    has_mask: bool,
    capability: ComputeCapability,
) -> AttentionBackend:
    """The kernel PyTorch picks on CUDA.

    cuDNN's kernel, preferred on some GPUs, keeps what flash attention keeps and counts as it.

    Args:
        query: ``(batch, heads, length, head size)``, as ``key`` and ``value``.
        key: see ``query``.
        value: see ``query``.
        has_mask: whether an explicit mask is given.
        capability: of the target GPU, such as ``(8, 6)``.

    Example:
        >>> q = torch.empty(1, 8, 64, 64, dtype=torch.float16, device="meta")
        >>> choose_backend(q, q, q, has_mask=False, capability=(8, 0)).value
        'flash'
        >>> choose_backend(q, q, q, has_mask=True, capability=(7, 0)).value
        'efficient'
    """
    head_size = query.size(-1)
    same_head_size = head_size == value.size(-1)
    if query.dim() != 4 or query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return AttentionBackend.MATH
    half = query.dtype != torch.float32
    bfloat16_works = query.dtype != torch.bfloat16 or capability >= (8, 0)
    if half and not has_mask and same_head_size and head_size <= 256 and capability >= (8, 0):
        return AttentionBackend.FLASH
    alignment = _alignment(half, capability)
    aligned = head_size % alignment == 0 and value.size(-1) % alignment == 0
    same_heads = query.size(1) == key.size(1)
    if capability >= (5, 0) and aligned and bfloat16_works and same_heads:
        return AttentionBackend.EFFICIENT
    return AttentionBackend.MATH


def _alignment(half: bool, capability: ComputeCapability) -> int:
    """Of the head size, in elements, for the memory-efficient kernel."""
    if capability >= (8, 0):
        return 8 if half else 4
    if capability >= (7, 0):
        return 8 if half else 1
    return 1


def attention_kernel(
    capability: ComputeCapability, alike: set[ComputeCapability] | None = None
) -> Callable[..., Tensor]:
    """A replacement for ``aten::scaled_dot_product_attention`` that runs the target's kernel.

    Args:
        capability: of the target GPU.
        alike: some of :data:`FAMILIES`; those that choose otherwise are taken out.
    """
    alike = set() if alike is None else alike

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        choose = functools.partial(
            choose_backend, query, key, value, has_mask=attn_mask is not None
        )
        backend = choose(capability=capability)
        alike.difference_update(
            [family for family in alike if choose(capability=family) is not backend]
        )
        if backend is AttentionBackend.FLASH:
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if backend is AttentionBackend.EFFICIENT:
            mask = None if attn_mask is None else _bias(attn_mask, query, key)
            keeps_sums = query.requires_grad or key.requires_grad or value.requires_grad
            output: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, keeps_sums, dropout_p, is_causal, scale=scale
            )[0]
            return output
        options = {"enable_gqa": True} if enable_gqa else {}  # since PyTorch 2.5
        output, _ = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options
        )
        return output

    return attention


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Flash attention; head sizes are padded to a multiple of 8 before and cut after."""
    head_size = query.size(-1)
    missing = -head_size % 8
    if missing:
        scale = head_size**-0.5 if scale is None else scale
        query, key, value = (
            torch.nn.functional.pad(tensor, (0, missing)) for tensor in (query, key, value)
        )
    output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, scale=scale
    )[0]
    return output[..., :head_size] if missing else output


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as the kernel takes it: added to the scores, rows padded to 16 elements."""
    if mask.dtype is torch.bool:
        shown, hidden = query.new_zeros(()), query.new_full((), -torch.inf)
        mask = torch.where(mask, shown, hidden)
    missing = -mask.size(-1) % 16
    if missing:
        length = mask.size(-1)
        mask = torch.nn.functional.pad(mask, (0, missing))[..., :length]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
