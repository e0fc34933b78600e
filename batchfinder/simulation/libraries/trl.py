"""The Triton kernels of TRL's losses, which run on a GPU only.

They write to tensors that exist already, so they allocate nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

from batchfinder.training.state.patching import replaced


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


@contextmanager
def trl_simulated() -> Iterator[None]:
    """Let TRL take its path for CUDA, with kernels that do nothing."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if not name.startswith("trl.") or "_use_triton" not in vars(module):
                continue
            changes: dict[str, Any] = {
                name: _Kernel() for name in vars(module) if name.endswith("_kernel")
            }
            changes["_use_triton"] = lambda device: True
            changes["_addmm_fp32"] = lambda total, a, b: None  # in place on CUDA
            changes["triton"] = SimpleNamespace(cdiv=lambda size, block: -(-size // block))
            if "TOKEN_CHUNK_SIZE" in vars(module):
                changes["range"] = _tiles
            stack.enter_context(replaced(module, **changes))
        yield
