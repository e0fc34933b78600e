"""Code outside of PyTorch's operators that behaves differently on CUDA, replaced in a simulation.

Libraries that are not imported need no replacement.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from batchfinder.simulation.values.known import value_of
from batchfinder.simulation.values.shapes import new_like
from batchfinder.training.state.patching import replaced

Replacements = Iterator[tuple[Any, dict[str, Any]]]
"""Modules and classes, each with its new attributes."""

# ``Optimizer8bit.get_state_buffer`` of bitsandbytes: smaller states stay in the allocator.
_SMALLEST_PAGED = 100_000


@contextmanager
def libraries_simulated() -> Iterator[None]:
    """Let libraries behave as on CUDA until the block ends."""
    with ExitStack() as stack:
        for replacements in (_of_pytorch, _of_transformers, _of_bitsandbytes, _of_trl):
            for owner, attributes in replacements():
                stack.enter_context(replaced(owner, **attributes))
        yield


def _of_pytorch() -> Replacements:
    """Make ``save_on_cpu`` free each saved tensor until it is needed again.

    Its copy to the CPU would not change anything here, because all fake tensors are on the CPU.
    """
    yield save_on_cpu, {"__init__": _on_host}


def _on_host(self: Any, pin_memory: bool = False, device_type: str = "cuda") -> None:
    # Tensors from new_like are not tracked, as if they were in host memory.
    saved_tensors_hooks.__init__(self, new_like, torch.empty_like)


def _of_transformers() -> Replacements:
    """Drop attention masks that mask nothing, as with real tensors: the rest uses less memory.

    Transformers does not read the values of fake tensors, since it assumes that a graph is being
    traced. The simulation knows the values of most masks. Source: ``is_tracing`` in
    ``src/transformers/utils/import_utils.py`` of transformers 5, and its callers in
    ``masking_utils.py``.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    if hasattr(module, "is_fake_tensor"):  # an older version reads all tensors
        yield module, {"is_fake_tensor": _is_unknown}


def _is_unknown(x: Any) -> bool:
    return isinstance(x, FakeTensor) and value_of(x) is None


def _of_bitsandbytes() -> Replacements:
    """Page optimizer states, multiply 8-bit weights, and use gathered 4-bit ones.

    The operators of bitsandbytes have fake kernels. What they use while they run is in
    :mod:`~batchfinder.simulation.kernels.matrix_products`.
    """
    if layers := sys.modules.get("bitsandbytes.nn.modules"):
        yield layers, {"fix_4bit_weight_quant_state_from_module": _find_quantization}
    optimizers: Any = sys.modules.get("bitsandbytes.optim.optimizer")
    if optimizers:
        yield optimizers.Optimizer8bit, {"get_state_buffer": _state_buffer}
    if sys.modules.get("bitsandbytes.autograd._functions"):
        yield sys.modules["bitsandbytes"], {"matmul": _matmul}


def _find_quantization(layer: Any) -> None:
    """Let a weight that was gathered from all ranks be read as the layer's own was."""
    if getattr(layer.weight, "quant_state", None) is None:
        layer.weight.quant_state = layer.quant_state


def _state_buffer(self: Any, parameter: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    if self.is_paged and parameter.numel() >= _SMALLEST_PAGED:
        # Managed memory. Tensors from new_like are not tracked.
        return new_like(parameter, dtype=dtype)
    return torch.zeros_like(parameter, dtype=dtype)


def _matmul(
    a: Tensor,
    b: Tensor,
    out: Any = None,
    state: Any = None,
    threshold: float = 0.0,
    bias: Tensor | None = None,
) -> Any:
    # Columns of outliers (threshold) are data. There are few, so none is assumed.
    state.threshold = 0.0
    functions: Any = sys.modules["bitsandbytes.autograd._functions"]
    return functions.MatMul8bitLt.apply(a, b, out, bias, state)


def _of_trl() -> Replacements:
    """Let the losses of TRL take their path for CUDA, with Triton kernels that do nothing.

    The kernels write to tensors that exist already, so they allocate nothing.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("trl.") and "_use_triton" in vars(module):
            changes: dict[str, Any] = {
                name: _Kernel() for name in vars(module) if name.endswith("_kernel")
            }
            changes["_use_triton"] = lambda device: True
            changes["_addmm_fp32"] = lambda total, a, b: None  # in place on CUDA
            changes["triton"] = SimpleNamespace(cdiv=lambda size, block: -(-size // block))
            if "TOKEN_CHUNK_SIZE" in vars(module):
                changes["range"] = _tiles
            yield module, changes


class _Kernel:
    """A kernel that does nothing, on any grid."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: None


def _tiles(start: int, stop: int, size: int) -> Iterable[int]:
    """Return the starts of at most three tiles, all full, which is enough for the peak memory.

    A tile replaces the one before. The same number of tiles at every batch size keeps traces alike.
    """
    if stop - start <= size:
        return range(start, stop, size)
    return start, stop - size, stop - size
