"""Behavior of bitsandbytes on CUDA, for simulations, in which the CPU stands for the GPU.

Its operators have fake kernels. What they use while they run is in
:mod:`~batchfinder.simulation.kernels.matrix_products`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from batchfinder.simulation.values.shapes import new_like
from batchfinder.training.state.patching import replaced

# ``Optimizer8bit.get_state_buffer``: smaller states stay in the allocator.
_SMALLEST_PAGED = 100_000


@contextmanager
def bitsandbytes_simulated() -> Iterator[None]:
    """Page optimizer states, multiply 8-bit weights, and use gathered 4-bit ones, as on CUDA."""
    layers: Any = sys.modules.get("bitsandbytes.nn.modules")
    optimizers: Any = sys.modules.get("bitsandbytes.optim.optimizer")
    functions: Any = sys.modules.get("bitsandbytes.autograd._functions")
    with ExitStack() as stack:
        if layers is not None:
            stack.enter_context(
                replaced(layers, fix_4bit_weight_quant_state_from_module=_find_quantization)
            )
        if optimizers is not None:
            owner = optimizers.Optimizer8bit
            stack.enter_context(replaced(owner, get_state_buffer=_state_buffer))
        if functions is not None:

            def matmul(
                a: Tensor,
                b: Tensor,
                out: Any = None,
                state: Any = None,
                threshold: float = 0.0,
                bias: Tensor | None = None,
            ) -> Any:
                # Columns of outliers (threshold) are data. There are few, so none is assumed.
                state.threshold = 0.0
                return functions.MatMul8bitLt.apply(a, b, out, bias, state)

            stack.enter_context(replaced(sys.modules["bitsandbytes"], matmul=matmul))
        yield


def _find_quantization(layer: Any) -> None:
    """Let a weight that was gathered from all ranks be read as the layer's own was."""
    if getattr(layer.weight, "quant_state", None) is None:
        layer.weight.quant_state = layer.quant_state


def _state_buffer(self: Any, parameter: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    if self.is_paged and parameter.numel() >= _SMALLEST_PAGED:
        # Managed memory. Tensors from new_like are not tracked.
        return new_like(parameter, dtype=dtype)
    return torch.zeros_like(parameter, dtype=dtype)
