"""CUDA's autocast policy for tensors on the CPU.

``torch.autocast("cpu")`` provides the active dtype and the cache of cast weights, which lives until
the outermost block ends. CUDA casts other operators, though: losses, normalizations, softmax and
powers run in fp32 there, and the backward pass keeps their fp32 inputs. This module replaces the
CPU's lists of operators by CUDA's.

Source of the lists: https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior and
``aten/src/ATen/autocast_mode.h``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from batchfinder.simulation.tracing.cuda_dispatch import SOFTMAX
from batchfinder.training.state.patching import replaced

LOWER_PRECISION = (
    "prelu", "addmv", "addr", "mv", "chain_matmul", "linalg_multi_dot", "einsum",
    "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
)  # fmt: skip
"""Operators that run in fp16 or bf16 on CUDA but not on the CPU."""

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
"""Operators that run in fp32 on CUDA, after a cast of their inputs."""

FP32_SINCE_2_0 = (
    "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d",
    "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d",
    "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d",
    "upsample_bicubic2d", "_upsample_bicubic2d_aa",
)  # fmt: skip
"""Like ``FP32``, since PyTorch 2.0."""

FP32_SINCE_2_13 = ("rms_norm",)
"""Like ``FP32``, in PyTorch 2.13 but not in 2.11."""

FP32_BY_DTYPE = (
    "prod", "prod.dim_int", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
"""Operators that run in fp32 on CUDA through their ``dtype`` argument, without an input copy."""

PROMOTE = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler",
    "index_put", "tensordot", "scatter_add",
)  # fmt: skip
"""Operators that run in the widest dtype among their inputs."""

NOT_AS_IS = ("conv1d.padding", "conv2d.padding", "conv3d.padding")
"""CUDA casts these one level deeper, as ``convolution``."""

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

Kernel = Callable[..., Any]


def autocast_kernels(torch_version: tuple[int, int]) -> dict[str, Kernel]:
    """Return CUDA's policy as kernels for the key ``"AutocastCPU"``.

    Operators that this PyTorch lacks are left out.
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
    )
    kernels = {name: _softmax(on_cuda) for name, on_cuda in SOFTMAX.items()}
    for names, make in makers:
        for name in names:
            operator = _operator(name)
            if operator is not None:
                kernels[name] = make(operator)
    return kernels


@functools.cache
def cast_on_cpu_only() -> tuple[str, ...]:
    """Return the operators that autocast casts on the CPU but not on CUDA.

    PyTorch's dispatcher lists them, even in builds without CUDA.
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
    "a torch.autocast('cuda') made before the step has no effect in this estimate, because PyTorch "
    "disables it without CUDA. Try making it inside the step, or --precision bf16"
)


def cuda_autocast_on_cpu() -> AbstractContextManager[Any]:
    """Make new ``torch.autocast("cuda")`` objects work on CPU tensors.

    Without this, they silently do nothing in a PyTorch without CUDA.
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

    return replaced(torch.autocast, __init__=on_cpu)


@contextmanager
def cuda_autocast_simulated(warn: Callable[[str], None]) -> Iterator[None]:
    """Make ``torch.autocast("cuda")`` work on the simulation's CPU tensors.

    Objects made earlier work too. ``torch.is_autocast_enabled()`` answers for CUDA by default.
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

    is_enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype

    def on_gpu(device_type: str = "cuda") -> bool:
        return bool(is_enabled("cpu" if device_type == "cuda" else device_type))

    def dtype_on_gpu(device_type: str) -> torch.dtype:
        return dtype_of("cpu" if on_gpu(device_type) else device_type)

    with (
        cuda_autocast_on_cpu(),
        replaced(torch.autocast, __enter__=enter_on_cpu),
        replaced(
            torch,
            is_autocast_enabled=on_gpu,
            get_autocast_dtype=dtype_on_gpu,
            get_autocast_gpu_dtype=lambda: dtype_on_gpu("cuda"),
        ),
    ):
        try:
            yield
        finally:
            for autocast in moved:
                autocast.device = "cuda"


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _as_is(operator: Any) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return operator(*args, **kwargs)

    # Each part of a composite operator is cast by its own rule.
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


def _softmax(on_cuda: Kernel) -> Kernel:
    def kernel(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:  # noqa: A002
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return on_cuda(input, dim, dtype or torch.float32)

    return kernel


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
        return tensor
    return tensor.to(dtype)


def _widest(tensors: list[Tensor]) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("cpu")
