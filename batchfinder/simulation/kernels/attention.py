"""``F.scaled_dot_product_attention`` as the target GPU would run it.

PyTorch picks one of several kernels by GPU, dtype, head size and mask. The kernels keep very
different amounts of memory for the backward pass, by orders of magnitude. Source of the rules:
https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp

Sources of the memory that kernels use besides their outputs: ``attention_backward.cu`` and
``flash_attn/flash_api.cpp`` beside it. The tile sizes of the memory-efficient kernel were derived
from the requests to PyTorch's own allocator. The requests cover every generation of GPUs and head
sizes from 16 to 256.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from batchfinder.probing.devices.allocator.blocks import round_up
from batchfinder.simulation.gpus import NO_GPU, Gpu

T = TypeVar("T")
ComputeCapability = tuple[int, int]


class AttentionBackend(enum.Enum):
    """A kernel of ``F.scaled_dot_product_attention``."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


NO_KERNEL = "No available kernel"
"""The start of PyTorch's error if every kernel that could run is switched off."""

_PREFER_CUDNN = (9, 10)  # major compute capabilities; other GPUs try cuDNN's kernel last

# Queries and keys are ``(batch, heads, length, head size)``.
_FLOAT_BYTES = 4
_LOCK_FLOATS = 4  # in each tile: a lock and a counter, aligned
_SPLIT_KEYS = 64
_ENOUGH_HEADS = 200  # over all examples; keys are split into at most this number / heads parts

FAMILIES: tuple[ComputeCapability, ...] = ((5, 0), (7, 0), (8, 0))
"""The compute capability of the oldest GPU in each generation that has its own kernels."""


def kernel_family(capability: ComputeCapability) -> ComputeCapability:
    """Return the oldest GPU that runs a training step with the same kernels.

    Example:
        >>> kernel_family((8, 9)), kernel_family((7, 5)), kernel_family((6, 1))
        ((8, 0), (7, 0), (5, 0))
    """
    return max(oldest for oldest in FAMILIES if oldest <= capability)


def on_target(
    capability: ComputeCapability, alike: set[ComputeCapability], value_on: Callable[..., T]
) -> T:
    """Return a kernel's property on the target GPU; remove families in which it differs."""
    value = value_on(capability)
    alike.difference_update([family for family in alike if value_on(family) != value])
    return value


def choose_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    has_mask: bool,
    capability: ComputeCapability,
) -> AttentionBackend | None:
    """Return the kernel that PyTorch picks on CUDA, among those that are switched on now.

    ``torch.nn.attention.sdpa_kernel`` and functions of ``torch.backends.cuda`` switch kernels on
    and off. Some GPUs prefer cuDNN's kernel. It keeps what flash attention keeps, so it counts as
    flash attention; with a mask, it counts as the memory-efficient kernel.

    The tensors are ``(batch, heads, length, head size)``. The result is None if no kernel that is
    switched on can run.

    Example:
        >>> q = torch.empty(1, 8, 64, 64, dtype=torch.float16, device="meta")
        >>> choose_backend(q, q, q, has_mask=False, capability=(8, 0)).value
        'flash'
        >>> choose_backend(q, q, q, has_mask=True, capability=(7, 0)).value
        'efficient'
    """
    switches: Any = torch.backends.cuda
    flash = efficient = by_cudnn = False
    if query.dim() == 4 and query.dtype in (torch.float32, torch.float16, torch.bfloat16):
        sizes = query.size(-1), value.size(-1)
        half = query.dtype != torch.float32
        modern = half and capability >= (8, 0)
        flash = modern and not has_mask and sizes[0] == sizes[1] <= 256
        bfloat16_works = query.dtype != torch.bfloat16 or capability >= (8, 0)
        alignment = _alignment(half, capability)
        aligned = all(size % alignment == 0 for size in sizes)
        same_heads = query.size(1) == key.size(1)
        efficient = capability >= (5, 0) and aligned and bfloat16_works and same_heads
        by_cudnn = modern and aligned and max(sizes) <= 128 and switches.cudnn_sdp_enabled()
    cudnn_first = by_cudnn and capability[0] in _PREFER_CUDNN
    if flash and (cudnn_first or switches.flash_sdp_enabled()):
        return AttentionBackend.FLASH
    if efficient and (cudnn_first or switches.mem_efficient_sdp_enabled()):
        return AttentionBackend.EFFICIENT
    if switches.math_sdp_enabled():
        return AttentionBackend.MATH
    if by_cudnn and (flash or efficient):
        return AttentionBackend.FLASH if flash else AttentionBackend.EFFICIENT
    return None


def _alignment(half: bool, capability: ComputeCapability) -> int:
    """Return the number of elements that the memory-efficient kernel's head size must divide by."""
    if capability >= (8, 0):
        return 8 if half else 4
    if capability >= (7, 0):
        return 8 if half else 1
    return 1


def attention_kernel(
    capability: ComputeCapability, alike: set[ComputeCapability]
) -> Callable[..., Tensor]:
    """Return a replacement for ``aten::scaled_dot_product_attention`` with the target's kernel.

    Args:
        capability: the compute capability of the target GPU.
        alike: some of :data:`FAMILIES`. Families that pick another kernel are removed.

    Raises:
        RuntimeError: when called, as in PyTorch, if every kernel that could run is switched off.
    """

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
        choose = functools.partial(choose_backend, query, key, value, attn_mask is not None)
        backend = on_target(capability, alike, choose)
        if backend is None:
            gpu = ".".join(map(str, capability))
            raise RuntimeError(f"{NO_KERNEL} for scaled_dot_product_attention on sm {gpu}")
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
    """Run flash attention, with head sizes padded to a multiple of 8 first and cut afterward."""
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
    """Return the mask in the kernel's form: added to the scores, rows padded to 16 elements."""
    if mask.dtype is torch.bool:
        shown, hidden = query.new_zeros(()), query.new_full((), -torch.inf)
        mask = torch.where(mask, shown, hidden)
    missing = -mask.size(-1) % 16
    if missing:
        length = mask.size(-1)
        mask = torch.nn.functional.pad(mask, (0, missing))[..., :length]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


def flash_backward_bytes(query: Tensor, key: Tensor) -> list[int]:
    """Return the bytes that the backward pass of flash attention uses, all at once.

    They are the gradient's row sums and the query's fp32 gradient. If several heads share a key,
    the gradients of keys and values exist for each head too, before they are added up.
    """
    batch, heads, length, head_size = query.shape
    rows = batch * heads * round_up(length, 128)
    width = round_up(head_size, 32 if head_size <= 128 else 64)
    sizes = [rows * _FLOAT_BYTES, rows * width * _FLOAT_BYTES]
    if key.size(1) != heads:
        sizes += [batch * heads * key.size(2) * head_size * query.element_size()] * 2
    return sizes


def efficient_forward_bytes(query: Tensor, value: Tensor) -> int:
    """Return the bytes of the fp32 output, needed if a tile of it does not fit into registers."""
    batch, heads, length, _ = query.shape
    head_size = value.size(-1)
    if query.element_size() == _FLOAT_BYTES or head_size <= 128:
        return 0
    return batch * heads * length * head_size * _FLOAT_BYTES


class EfficientBackward(NamedTuple):
    """One head's fp32 tiles of the gradients that several blocks of threads add to.

    Attributes:
        query_floats: elements for the query's gradient.
        split_floats: elements for the gradients of key and value, for each part of the keys.
        splits: the number of parts that the keys are split into. Many heads reduce it.

    Example:
        >>> kernel = EfficientBackward(query_floats=100, split_floats=10, splits=8)
        >>> kernel.bytes_of(1), kernel.bytes_of(1000)
        (720, 440000)
    """

    query_floats: int
    split_floats: int
    splits: int

    def bytes_of(self, heads: int, _: Gpu = NO_GPU) -> int:
        """Return the bytes for all heads of all examples. They are the same on every GPU."""
        splits = max(1, min(self.splits, _ENOUGH_HEADS // max(1, heads)))
        return heads * (self.query_floats + splits * self.split_floats) * _FLOAT_BYTES


def efficient_backward(
    query: Tensor, key: Tensor, capability: ComputeCapability
) -> EfficientBackward:
    """Return the memory that the backward pass of the memory-efficient kernel uses."""
    length, head_size = query.shape[2:]
    half = query.element_size() < _FLOAT_BYTES
    rows, columns = 64, 64
    # Gradients of key and value are summed in registers, unless a head is too large for that.
    keys = _SPLIT_KEYS if half and head_size > 128 else 0
    splits = -(-key.size(2) // _SPLIT_KEYS)
    if capability < (7, 0):
        if not half:
            return EfficientBackward(0, 0, 1)
        keys, splits = _SPLIT_KEYS if head_size > 64 else 0, 1
    elif head_size > 64 and (half or capability >= (8, 0)):
        rows = 128
        if half and head_size <= 128 and capability >= (8, 0):
            columns = 128
    tiles = -(-length // rows) * -(-head_size // columns)
    query_floats = tiles * (rows * columns + _LOCK_FLOATS)
    return EfficientBackward(query_floats, 2 * keys * round_up(head_size, rows), splits)
