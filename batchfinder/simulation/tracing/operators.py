"""Run one operator of a simulated step, without data but with the known values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from batchfinder.simulation.kernels.outputs import outputs_of
from batchfinder.simulation.values.values import follow, forget, outcome, places


def run_operator(
    func: OpOverload, args: Any, kwargs: Any, found: Callable[[Tensor], None], *, in_optimizer: bool
) -> Any:
    """Run an operator below autograd, record the known values of its output, and return it.

    ``found`` is called with each tensor of indices that replaces a mask. No step reads the values
    in an optimizer.
    """
    output = outcome(func, args, kwargs)
    if output is not None:
        return output
    indices = places(func, args)
    if indices is not None:
        args = (args[0], indices)
        for index in indices:
            if index is not None:
                found(index)
    output = outputs_of(func, args, kwargs)
    if in_optimizer:
        forget(func, args, kwargs)
    else:
        follow(func, args, kwargs, output)
    return output


class ValuesFollowed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps values known where nothing is recorded yet, as when an optimizer is made."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run_operator(func, args, kwargs or {}, lambda _: None, in_optimizer=False)
