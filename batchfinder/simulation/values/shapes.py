"""A fast path for operators on fake tensors.

A fake tensor is a "meta" tensor that claims another device. FakeTensorMode looks every operator up
in a cache, by all its arguments. Most operators of a training step are simple: PyTorch's "meta"
kernel needs a fraction of that time. Everything else is left to FakeTensorMode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

_CPU = torch.device("cpu")
_aten: Any = torch.ops.aten
_SIMPLE = {
    getattr(_aten, name).default
    for name in (
        "_foreach_sqrt", "_unsafe_view", "addmm", "bmm", "cat", "linalg_vector_norm", "mm",
        "select_backward", "slice_backward", "zero_",
    )
} | {_aten._foreach_mul.List, _aten.mean.dim}  # fmt: skip


def run_on_shapes(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Run an operator on fake tensors and return its outputs."""
    if not _is_simple(func):
        return func(*args, **kwargs)
    mode = None
    for tensor in _tensors(args):
        # Only FakeTensorMode computes with constants and converts tensors that are not fake.
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
            if lacks_memory(tensor):
                raise RuntimeError("Cannot access data pointer of a tensor made from a fake one")
            return func(*args, **kwargs)
        mode = tensor.fake_mode
    if mode is None:
        return func(*args, **kwargs)
    schema = func._schema
    if not schema.returns:
        return None
    if schema.is_mutable and _keeps_shape(args):
        return args[0]
    with in_kernel_invocation_manager(mode):
        output = func(*args, **kwargs)
        if schema.is_mutable:
            return args[0]
        if isinstance(output, Tensor):
            return _fake(mode, output)
        return [_fake(mode, part) for part in output]


def lacks_memory(tensor: Tensor) -> bool:
    """Return True for a tensor that looks real but would crash the process when read.

    ``torch.from_dlpack`` makes such tensors from fake ones.
    """
    is_real = type(tensor) is Tensor and not tensor.is_meta and tensor.layout is torch.strided
    return is_real and tensor.numel() > 0 and tensor.data_ptr() == 0


def _fake(mode: FakeTensorMode, meta: Tensor) -> Tensor:
    """Do the same as ``FakeTensor(mode, meta, "cpu")`` in a fifth of the time.

    A step makes tens of thousands of fake tensors. Those of one mode differ only in their "meta"
    tensor, so they share the attributes of the first.
    https://github.com/pytorch/pytorch/blob/main/torch/_subclasses/fake_tensor.py
    """
    attributes = vars(mode).get("_attributes_of_fakes")
    if attributes is None:
        first = FakeTensor(mode, meta, _CPU)
        vars(mode)["_attributes_of_fakes"] = vars(first).copy()
        return first
    fake = Tensor._make_subclass(
        FakeTensor, meta, dispatch_device=True, device_for_backend_keys=_CPU
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(attributes)
    return fake


def new_tensor(
    like: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """Call ``torch.empty`` on the device of ``like``; return a fake tensor if ``like`` is fake.

    ``dtype`` defaults to the dtype of ``like``.
    """
    dtype = dtype or like.dtype
    if not isinstance(like, FakeTensor):
        return torch.empty(shape, dtype=dtype, device=like.device, memory_format=memory_format)
    with torch._C._DisableTorchDispatch():
        meta = torch.empty(shape, dtype=dtype, device="meta", memory_format=memory_format)
        return _fake(like.fake_mode, meta)


def new_strided_like(like: Tensor, mode: FakeTensorMode) -> Tensor:
    """Make a fake tensor with the shape, strides and dtype of ``like``, from any device."""
    size, stride, dtype = like.size(), like.stride(), like.dtype
    with torch._C._DisableTorchDispatch():
        return _fake(mode, torch.empty_strided(size, stride, dtype=dtype, device="meta"))


def new_literal(value: Tensor, mode: FakeTensorMode) -> Tensor:
    """Make a fake tensor from a literal, such as ``torch.tensor(0.0)``, that knows its value.

    Optimizers make one for each parameter. FakeTensorMode would describe each in every detail.
    """
    fake = new_strided_like(value, mode)
    assert isinstance(fake, FakeTensor)
    with torch._C._DisableTorchDispatch():
        fake.constant = value.clone()
    mode.fake_tensor_converter.add_constant_storage_mapping(fake)
    return fake


def new_like(
    like: Tensor,
    memory_format: torch.memory_format = torch.preserve_format,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Call ``torch.empty_like``; return a fake tensor if ``like`` is fake."""
    if not isinstance(like, FakeTensor):
        return torch.empty_like(like, memory_format=memory_format, dtype=dtype)
    if memory_format is torch.preserve_format:
        memory_format = _plain_format(like)
    if memory_format is not torch.preserve_format:
        return new_tensor(like, like.shape, dtype, memory_format)
    with in_kernel_invocation_manager(like.fake_mode):
        meta = torch.empty_like(like, memory_format=memory_format, dtype=dtype)
        return _fake(like.fake_mode, meta)


def _plain_format(tensor: Tensor) -> torch.memory_format:
    """Return a tensor's memory format; ``preserve_format`` if it fits none, or both.

    The "meta" kernel of ``empty_like`` finds the same, but needs ten times as long.
    """
    is_contiguous = tensor.is_contiguous()
    if tensor.dim() != 4:
        return torch.contiguous_format if is_contiguous else torch.preserve_format
    if is_contiguous == tensor.is_contiguous(memory_format=torch.channels_last):
        return torch.preserve_format
    return torch.contiguous_format if is_contiguous else torch.channels_last


@cache
def _is_simple(func: OpOverload) -> bool:
    """Return True if the "meta" kernel alone gives the whole result.

    That holds for pointwise operators, views, and operators that only change their arguments. It
    does not hold for ``out=`` variants, which resize their output. The "meta" kernels of
    bitsandbytes only make empty tensors.
    """
    if func.namespace == "bitsandbytes":
        return not func._schema.is_mutable
    if func.namespace != "aten" or torch.Tag.data_dependent_output in func.tags:
        return False
    if any(argument.is_out for argument in func._schema.arguments):
        return False
    returns = func._schema.returns
    is_view = bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)
    return is_view or not returns or torch.Tag.pointwise in func.tags or func in _SIMPLE


def _keeps_shape(args: Any) -> bool:
    """Return True if a pointwise in-place operator is certain to succeed."""
    shape, dtype = args[0].shape, args[0].dtype
    return all(tensor.shape == shape and tensor.dtype == dtype for tensor in _tensors(args))


def _tensors(args: Any) -> Iterator[Tensor]:
    for argument in args:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)
