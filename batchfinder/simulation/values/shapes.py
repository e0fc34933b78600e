"""Operators run on the shapes of tensors alone, without what FakeTensorMode spends on each.

A fake tensor is one on "meta" that claims another device. FakeTensorMode looks each operator up in
a cache, by all its arguments; for the simple ones, which are most of a training step, PyTorch's own
kernel for "meta" takes a fraction of that. Everything else is left to FakeTensorMode.
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
        "_unsafe_view", "addmm", "bmm", "cat", "mm", "select_backward", "slice_backward", "zero_",
    )
}  # fmt: skip


def run_on_shapes(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """The outputs of an operator on fake tensors.

    Args:
        func: the operator.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    if not _is_simple(func):
        return func(*args, **kwargs)
    mode = None
    for tensor in _tensors(args):
        # FakeTensorMode computes with the values it knows, and converts what is no fake tensor.
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
            if lacks_memory(tensor):
                raise RuntimeError("Cannot access data pointer of what was made of a fake tensor")
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
    """Whether a tensor passes for a real one, but to read it would end the process.

    ``torch.from_dlpack`` makes such a one of a fake tensor.
    """
    is_real = type(tensor) is Tensor and not tensor.is_meta and tensor.layout is torch.strided
    return is_real and tensor.numel() > 0 and tensor.data_ptr() == 0


def _fake(mode: FakeTensorMode, meta: Tensor) -> Tensor:
    """``FakeTensor(mode, meta, "cpu")``, in a fifth of the time: a step makes tens of thousands.

    All of a mode differ in the tensor on "meta" alone, so the first one's attributes are those of
    all; https://github.com/pytorch/pytorch/blob/main/torch/_subclasses/fake_tensor.py
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
    """``torch.empty`` beside another tensor; fake if that is.

    Args:
        like: the other tensor.
        shape: of the new one.
        dtype: of the new one; None: as the other's.
        memory_format: of the new one.
    """
    dtype = dtype or like.dtype
    if not isinstance(like, FakeTensor):
        return torch.empty(shape, dtype=dtype, device=like.device, memory_format=memory_format)
    with in_kernel_invocation_manager(like.fake_mode):
        meta = torch.empty(shape, dtype=dtype, device="meta", memory_format=memory_format)
        return _fake(like.fake_mode, meta)


def new_strided_like(like: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor laid out like another one, which may be on any device.

    Args:
        like: the other tensor.
        mode: the mode that is on.
    """
    with in_kernel_invocation_manager(mode):
        meta = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="meta")
        return _fake(mode, meta)


def new_like(
    like: Tensor,
    memory_format: torch.memory_format = torch.preserve_format,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``torch.empty_like``, and fake if the other is.

    Args:
        like: the other tensor.
        memory_format: of the new one.
        dtype: of the new one; None: as the other's.
    """
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
    """The one memory format that a tensor is in; ``preserve_format`` where it is in none, or both.

    The kernel of ``empty_like`` for "meta" finds the same, in ten times as long.
    """
    is_contiguous = tensor.is_contiguous()
    if tensor.dim() != 4:
        return torch.contiguous_format if is_contiguous else torch.preserve_format
    if is_contiguous == tensor.is_contiguous(memory_format=torch.channels_last):
        return torch.preserve_format
    return torch.contiguous_format if is_contiguous else torch.channels_last


@cache
def _is_simple(func: OpOverload) -> bool:
    """Whether the kernel for "meta" tells all there is to tell.

    So it is for operators that work element by element, for views, and for those that only change
    what they are given; not for those that write to a tensor for their output, and resize it.
    """
    if func.namespace != "aten" or torch.Tag.data_dependent_output in func.tags:
        return False
    if any(argument.is_out for argument in func._schema.arguments):
        return False
    returns = func._schema.returns
    is_view = bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)
    return is_view or not returns or torch.Tag.pointwise in func.tags or func in _SIMPLE


def _keeps_shape(args: Any) -> bool:
    """Whether an operator that works in place, element by element, cannot but succeed."""
    shape, dtype = args[0].shape, args[0].dtype
    return all(tensor.shape == shape and tensor.dtype == dtype for tensor in _tensors(args))


def _tensors(args: Any) -> Iterator[Tensor]:
    for argument in args:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)
