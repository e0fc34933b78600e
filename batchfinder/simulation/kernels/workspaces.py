"""The memory that CUDA kernels use besides their outputs, from the same allocator.

Workspaces of cuDNN are optional: if none is available, PyTorch falls back to an algorithm that
needs less. Copies of tensors in another memory format than cuDNN's are not optional.

Workspaces of attention are in :mod:`~batchfinder.simulation.kernels.attention`. Workspaces
of cuBLAS outlive the step: :mod:`~batchfinder.simulation.kernels.matrix_products`.

Sources in ``aten/src/ATen/native`` of PyTorch: ``cudnn/Conv_v8.cpp`` and ``cudnn/ConvShared.cpp``,
``Loss.cpp``, ``cuda/SoftMax.cu``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from batchfinder.simulation.kernels.attention import (
    ComputeCapability,
    efficient_backward,
    efficient_forward_bytes,
    flash_backward_bytes,
    on_target,
)
from batchfinder.simulation.kernels.convolution import Convolution, Direction, compute_format
from batchfinder.simulation.kernels.embedding import (
    embedding_backward_sizes,
    embedding_bag_backward_sizes,
    index_put_sizes,
)
from batchfinder.simulation.kernels.losses import COPYING_LOSSES, CTC_BACKWARDS
from batchfinder.simulation.kernels.matrix_products import PRODUCTS, MatrixProducts, quantized_sizes
from batchfinder.simulation.kernels.reductions import REDUCTIONS
from batchfinder.simulation.kernels.torch_version import TORCH_VERSION
from batchfinder.simulation.trace.recorder import Recorder, copied_sizes, take, taken
from batchfinder.simulation.trace.trace import Rule

_aten: Any = torch.ops.aten
_CONVOLUTION = _aten.convolution.default
_CONVOLUTION_BACKWARD = _aten.convolution_backward.default
_EFFICIENT_BACKWARD = _aten._scaled_dot_product_efficient_attention_backward.default
_HALF = (torch.float16, torch.bfloat16)
# Of the operators that a training step on CUDA may run. Those of other libraries are custom ones.
_PYTORCHS = {
    "aten", "prims", "prim", "higher_order", "profiler", "quantized", "_native", "inductor",
    "rngprims", "fsdp", "symm_mem", "c10d", "c10d_functional", "_c10d_functional",
    "_c10d_functional_autograd", "_dtensor",
}  # fmt: skip
_CUSTOM = (
    "{}:: has custom operators: their outputs are counted, but not the memory that they use while "
    "they run. Try batchfinder find, which runs them on the device"
)
_Sizes: TypeAlias = Callable[[Any, Any], Sequence[int | Rule]]
"""A function that returns the bytes a kernel uses at once, from its arguments and its output."""


class CudaWorkspaces:
    """The workspaces of CUDA's kernels. Use one instance per trace.

    Args:
        capability: the compute capability of the target GPU.
        alike: the oldest GPUs of some generations. GPUs that need other workspaces are removed.
        benchmark: ``torch.backends.cudnn.benchmark``. PyTorch then times every algorithm for each
            new forward convolution, and empties the cache afterward.
        torch_version: the version of PyTorch to simulate.

    Attributes:
        warnings: texts for the user, about memory that is not counted.
    """

    def __init__(
        self,
        capability: ComputeCapability,
        alike: set[ComputeCapability],
        *,
        benchmark: bool = False,
        torch_version: tuple[int, int] = TORCH_VERSION,
    ) -> None:
        self._capability = capability
        self._alike = alike
        self._benchmark = benchmark
        self._seen: set[Any] = set()
        self._products = MatrixProducts(torch_version)
        self.warnings: set[str] = set()

    def __call__(self, recorder: Recorder, func: Any, args: Any, output: Any) -> None:
        """Note an operator's outputs, and the memory that it uses while it runs."""
        with taken(recorder, copied_sizes(args[at] for at in _COPIED_FIRST.get(func, ()))):
            recorder.track_outputs(func, args, output)
        if func is _CONVOLUTION:
            images, weight, _, stride, _, dilation, transposed = args[:7]
            sides = (output, images) if transposed else (images, output)
            convolution = Convolution(*sides, weight, stride, dilation)
            direction = Direction.IMAGES if transposed else Direction.OUTPUT
            self._convolve(recorder, convolution, direction, [images])
            key = (images.shape, weight.shape, images.dtype)
            if self._benchmark and key not in self._seen:
                self._seen.add(key)
                recorder.empty_cache()
        elif func is _CONVOLUTION_BACKWARD:
            grad, images, weight, _, stride, _, dilation, transposed = args[:8]
            sides = (grad, images) if transposed else (images, grad)
            convolution = Convolution(*sides, weight, stride, dilation)
            needs_images, needs_weight = args[10][:2]
            if needs_images:
                direction = Direction.OUTPUT if transposed else Direction.IMAGES
                self._convolve(recorder, convolution, direction, [grad])
            if needs_weight:
                self._convolve(recorder, convolution, Direction.WEIGHT, [grad, images])
        elif func in PRODUCTS:
            self._products.note(recorder, func)
        elif func is _EFFICIENT_BACKWARD:
            self._attention_backward(recorder, *args[:3])
        elif func in _KERNELS:
            take(recorder, _KERNELS[func](args, output))
        elif func.namespace not in _PYTORCHS:
            self._run_custom(recorder, func, args, output)

    def _run_custom(self, recorder: Recorder, func: Any, args: Any, output: Any) -> None:
        if func.namespace == "bitsandbytes":
            take(recorder, quantized_sizes(func, args, output))
        else:
            self.warnings.add(_CUSTOM.format(func.namespace))

    def _attention_backward(
        self, recorder: Recorder, grad: Tensor, query: Tensor, key: Tensor
    ) -> None:
        kernel = on_target(self._capability, self._alike, partial(efficient_backward, query, key))
        needed = Rule((math.prod(query.shape[:2]),), kernel.bytes_of)
        row_sums = math.prod(query.shape[:3]) * 4
        # The kernel reads the gradient by rows of heads.
        copied = copied_sizes([grad.transpose(1, 2)])
        if query.dtype in _HALF:
            take(recorder, [*copied, row_sums, needed])
            return
        with taken(recorder, copied):
            # Other kernels compute the row sums of gradient times output, in fp32.
            product = recorder.begin_transient(grad.nbytes)
            sums = recorder.begin_transient(row_sums)
            delta = recorder.begin_transient(row_sums)
            recorder.end_transient(sums)
            recorder.end_transient(product)
            take(recorder, [needed])
            recorder.end_transient(delta)

    def _convolve(
        self,
        recorder: Recorder,
        convolution: Convolution,
        direction: Direction,
        read: Sequence[Tensor],
    ) -> None:
        """Note the memory of one direction of a convolution, and copies of the images it reads."""
        memory_format = compute_format(read[0], convolution.weight)
        copied = [x for x in read if not x.is_contiguous(memory_format=memory_format)]
        workspace = 0
        # Images in channels last already need no workspace.
        if memory_format is torch.contiguous_format:
            needed = partial(convolution.workspace_bytes, direction)
            workspace = on_target(self._capability, self._alike, needed)
        with taken(recorder, [image.nbytes for image in copied]):
            take(recorder, [workspace], optional=True)


def _copied(args: Any, _: Any) -> list[int]:
    """Return the bytes of the first argument's copy, if it is not contiguous."""
    return copied_sizes(args[:1])


def _flash_backward(args: Any, _: Any) -> list[int]:
    # The kernel reads these by rows of heads.
    copied = copied_sizes(x.transpose(1, 2) for x in (args[0], args[4]))
    return [*copied, *flash_backward_bytes(*args[1:3])]


_COPIED_FIRST = {
    _aten.native_layer_norm.default: (0,),
    _aten.native_layer_norm_backward.default: (1,),
}
"""Arguments that are made contiguous before the outputs are allocated."""

_KERNELS: dict[Any, _Sizes] = {
    _aten.native_layer_norm_backward.default: _copied,
    # The product of both is computed first, whatever kernel sums it up.
    _aten._softmax_backward_data.default: lambda args, _: [max(args[0].nbytes, args[1].nbytes)],
    # -target, -target * input, and its exponential are alive at once.
    _aten.soft_margin_loss_backward.default: lambda _, output: [output.nbytes] * 2,
    # The logarithms of the sigmoid; and the loss for each element, unless that is the output.
    _aten.binary_cross_entropy_with_logits.default: lambda args, output: (
        [args[0].nbytes] * (1 if output.dim() else 2)
    ),
    _aten._log_softmax_backward_data.default: _copied,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention.default: lambda args, _: [
        efficient_forward_bytes(args[0], args[2])
    ],
    _aten.embedding_dense_backward.default: embedding_backward_sizes,
    _aten._embedding_bag_backward.default: embedding_bag_backward_sizes,
    **dict.fromkeys(
        (_aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default),
        index_put_sizes,
    ),
    # The output is allocated at the input's size first, and again at its own, larger size.
    _aten.im2col.default: lambda args, _: [*copied_sizes(args[:1]), args[0].nbytes],
    _aten.col2im.default: _copied,
    **dict.fromkeys(CTC_BACKWARDS, lambda args, _: [args[6].nbytes]),
    **REDUCTIONS,
    # The value for each element, if the loss is reduced.
    **dict.fromkeys(COPYING_LOSSES, lambda args, output: [] if output.dim() else [args[0].nbytes]),
}
"""The bytes that each kernel uses, where only the GPU's number of threads matters."""
