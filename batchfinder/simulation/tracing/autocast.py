"""CUDA's autocast policy, for tensors on the CPU.

``torch.autocast("cpu")`` brings the machinery: which dtype is on, the cache of cast weights that
lives until the outermost block ends. What it casts differs from CUDA: there, losses,
normalizations, softmax and powers run in fp32, and their fp32 inputs are what the backward pass
keeps. Here CUDA's lists are laid over the CPU's.

Source of the lists: https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior and
``aten/src/ATen/autocast_mode.h``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

LOWER_PRECISION = (
    "prelu", "addmv", "addr", "mv", "chain_matmul", "linalg_multi_dot", "einsum",
    "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
)  # fmt: skip
"""Run in fp16 or bf16 on CUDA and not on the CPU."""

FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p",
    "reciprocal", "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar",
    "softplus", "layer_norm", "native_layer_norm", "group_norm", "frobenius_norm.dim",
    "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss",
    "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss",
    "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
)  # fmt: skip
"""Run in fp32 on CUDA, on inputs cast before."""

FP32_SINCE_2_0 = (
    "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d",
    "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d",
    "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d",
    "upsample_bicubic2d", "_upsample_bicubic2d_aa",
)  # fmt: skip
"""The same, since PyTorch 2.0."""

FP32_SINCE_2_13 = ("rms_norm",)
"""The same, in PyTorch 2.13 and not in 2.11."""

FP32_BY_DTYPE = (
    "prod", "prod.dim_int", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
"""Run in fp32 on CUDA by their ``dtype`` argument: the input is not copied."""

PROMOTE = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler",
    "index_put", "tensordot", "scatter_add",
)  # fmt: skip
"""Run in the widest dtype among their inputs."""

NOT_AS_IS = ("conv1d.padding", "conv2d.padding", "conv3d.padding")
"""On CUDA these are cast further in, as ``convolution``."""

_ASKED = ("is_autocast_enabled", "get_autocast_dtype", "get_autocast_gpu_dtype")
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

Kernel = Callable[..., Any]


def autocast_kernels(torch_version: tuple[int, int]) -> dict[str, Kernel]:
    """CUDA's policy as replacements for the key ``"AutocastCPU"``; only what this PyTorch knows.

    Args:
        torch_version: of the PyTorch to imitate, such as ``(2, 4)``.
    """
    since_2_0 = torch_version >= (2, 0)
    fp32 = FP32 + (FP32_SINCE_2_0 if since_2_0 else ())
    fp32 += FP32_SINCE_2_13 if torch_version >= (2, 13) else ()
    as_is = cast_on_cpu_only() + (() if since_2_0 else FP32_SINCE_2_0)
    makers: tuple[tuple[tuple[str, ...], Callable[[Any], Kernel]], ...] = (
        (LOWER_PRECISION, lambda op: _after_cast(op, lambda _: torch.get_autocast_dtype("cpu"))),
        (fp32, lambda op: _after_cast(op, lambda _: torch.float32)),
        (PROMOTE, lambda op: _after_cast(op, _widest)),
        (as_is, _as_is),
        (FP32_BY_DTYPE, _by_dtype),
        (("softmax.int",), lambda op: _softmax(op, torch.ops.aten._softmax.default)),
        (("log_softmax.int",), lambda op: _softmax(op, torch.ops.aten._log_softmax.default)),
    )
    kernels = {}
    for names, make in makers:
        for name in names:
            operator = _operator(name)
            if operator is not None:
                kernels[name] = make(operator)
    return kernels


@functools.cache
def cast_on_cpu_only() -> tuple[str, ...]:
    """Run in fp32 or the widest dtype on the CPU, and in whatever comes on CUDA.

    PyTorch's dispatcher knows them, in builds without CUDA too.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [
        full_name.removeprefix("aten::")
        for full_name in torch._C._dispatch_get_all_op_names()
        if full_name.startswith("aten::")
        and has_kernel(full_name, "AutocastCPU")
        and not has_kernel(full_name, "AutocastCUDA")
    ]
    return tuple(sorted(set(names).difference(NOT_AS_IS)))


OFF_WARNING = (
    "a torch.autocast('cuda') that was made before the step is off in this estimate, as PyTorch "
    "turns it off where there is no CUDA; if it is to be on, make it inside the step, or ask for "
    "the precision instead"
)


@contextmanager
def cuda_autocast_on_cpu() -> Iterator[None]:
    """Let each ``torch.autocast("cuda")`` that is made work on CPU tensors.

    Where PyTorch is built without CUDA it would do nothing, silently.
    """
    original = torch.autocast.__init__

    def on_cpu(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        original(self, device_type, dtype, enabled, cache_enabled)

    torch.autocast.__init__ = on_cpu  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]


@contextmanager
def cuda_autocast_simulated(warn: Callable[[str], None]) -> Iterator[None]:
    """Let ``torch.autocast("cuda")`` work on the tensors of the simulation, which are on the CPU.

    Those too that were made before. And who asks whether it is on asks about CUDA, unless it names
    a device.

    Args:
        warn: told of one that was made before and is off.
    """
    enter = torch.autocast.__enter__
    moved: list[torch.autocast] = []

    def enter_on_cpu(self: torch.autocast) -> object:
        if self.device == "cuda":
            if not self._enabled and not torch.cuda.is_available():
                warn(OFF_WARNING)
            self.device = "cpu"
            moved.append(self)
        entered: object = enter(self)  # type: ignore[no-untyped-call]
        return entered

    is_enabled, dtype_of, gpu_dtype = (getattr(torch, name) for name in _ASKED)

    def on_gpu(device_type: str = "cuda") -> bool:
        return bool(is_enabled("cpu" if device_type == "cuda" else device_type))

    def dtype_on_gpu(device_type: str) -> torch.dtype:
        return cast("torch.dtype", dtype_of("cpu" if on_gpu(device_type) else device_type))

    torch.autocast.__enter__ = enter_on_cpu  # type: ignore[method-assign]
    answers = (on_gpu, dtype_on_gpu, lambda: dtype_on_gpu("cuda"))
    for name, answer in zip(_ASKED, answers, strict=True):
        setattr(torch, name, answer)
    try:
        with cuda_autocast_on_cpu():
            yield
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]
        for autocast in moved:
            autocast.device = "cuda"
        for name, answer in zip(_ASKED, (is_enabled, dtype_of, gpu_dtype), strict=True):
            setattr(torch, name, answer)


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _as_is(operator: Any) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return operator(*args, **kwargs)

    # The parts of a composite operator are cast each by its own rule.
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        operator.name(), "CompositeImplicitAutograd"
    )
    return operator.decompose if is_composite else kernel


def _after_cast(operator: Any, choose: Callable[[list[Tensor]], torch.dtype]) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            dtype = choose(tensors)
            args, kwargs = tree_map_only(Tensor, lambda t: _cast(t, dtype), (args, kwargs))
            return operator(*args, **kwargs)

    return kernel


def _by_dtype(operator: Any) -> Kernel:
    def kernel(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            if kwargs.get("dtype") is None and first.dtype in (torch.float16, torch.bfloat16):
                kwargs["dtype"] = torch.float32
            return operator(first, *args, **kwargs)

    return kernel


def _softmax(operator: Any, fused: Any) -> Kernel:
    """CUDA's kernel reads fp16 and writes fp32 at once; other dtypes are copied to fp32 first.

    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/SoftMax.cpp
    """

    def kernel(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:  # noqa: A002
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            if input.dtype is torch.float16 and dtype in (None, torch.float32):
                return fused(input, dim, True)
            return operator(input, dim, dtype or torch.float32)

    return kernel


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
        return tensor
    return tensor.to(dtype)


def _widest(tensors: list[Tensor]) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("cpu")
