"""Count and measure the training steps of a process. Imports no batchfinder."""

from __future__ import annotations

import functools
import importlib
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

# Some optimizers never step. The hook waits for them at most this many times the allowed steps.
MOST_WAITING = 5

# The most input shapes in one report: a step may call a model many times.
MOST_SHAPES = 20

# The most containers and objects within each other that are looked into: an object may hold itself.
MOST_DEPTH = 6


class Steps:
    """Count the steps of this process, report each, and wait after the last allowed one.

    A reading of the memory ends with each of these:

    - a step of the first optimizer that steps, if a backward pass came before it, or if the
      script has made none, and trains by ``torch.autograd.grad()``;
    - with gradient accumulation, instead each backward pass after the first step;
    - without an optimizer, or if it trains in the backward pass, each backward pass;
    - if the order counts forward passes, only each outermost forward pass without gradients.
    """

    def __init__(
        self,
        torch: ModuleType,
        order: dict[str, Any],
        report: Any,
        memory: Any,
        failures: Any,
        requests: Any,
        epoch_end: Any,
    ) -> None:
        self._torch: Any = torch
        self._order, self._report, self._memory = order, report, memory
        self._counts_passes: bool = order["counts_passes"]
        self._failures, self._requests, self._epoch_end = failures, requests, epoch_end
        self._created: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._first: Any = None
        self._depth = threading.local()
        self._in_backward = 0  # not per thread: on CUDA, autograd recomputes blocks in its own
        self._backwards = self._readings = self._steps = 0
        self._trains_by_grad = False  # by torch.autograd.grad(), with no backward pass
        self._accumulates = False  # in its last step
        self._is_read = False  # its last backward pass ended a reading
        self._shapes: list[list[int]] = []
        self._phases = {"forward": 0, "forward_backward": 0, "optimizer_step": 0}
        self._allocated = self._reserved = self._retries = self._elements = 0
        self._began = time.monotonic()

    def install(self) -> None:
        """Limit the memory and install the hooks in PyTorch."""
        torch = self._torch
        self._memory.install()
        os.register_at_fork(after_in_child=self._start_over)
        modules = torch.nn.modules.module
        modules.register_module_forward_pre_hook(self._enters)
        try:
            modules.register_module_forward_hook(self._leaves, with_kwargs=True, always_call=True)
        except TypeError:  # an older PyTorch, such as 2.4
            modules.register_module_forward_hook(self._leaves_by_frame, always_call=True)
        # torch.optim deletes its own name for this module.
        optimizers: Any = importlib.import_module("torch.optim.optimizer")
        optimizers.register_optimizer_step_pre_hook(self._before_step)
        optimizers.register_optimizer_step_post_hook(self._after_step)
        _follow(optimizers.Optimizer, "__init__", self._create)
        _follow(torch, "save", self._save)
        _follow(torch.utils.data.DataLoader, "__init__", self._epoch_end.note)
        torch.autograd.backward = self._watched(torch.autograd.backward, self._after_backward)
        torch.autograd.grad = self._watched(torch.autograd.grad, self._after_grad)
        self._failures.install()
        self._epoch_end.install()
        if torch.version.cuda or torch.version.hip:
            for part in (self._memory, self._failures, self._requests):
                torch.cuda._lazy_call(part.begin_cuda)  # when CUDA is initialized

    def _start_over(self) -> None:
        self._readings = self._steps = self._backwards = 0
        self._created.clear()  # so the first to step is another
        self._stepped.clear()

    # The inputs of a step.

    def _enters(self, module: Any, arguments: Any) -> None:
        if self._torch.compiler.is_compiling():
            return
        self._depth.value = getattr(self._depth, "value", 0) + 1
        self._failures.is_in_step = self._in_backward > 0

    def _leaves(self, module: Any, arguments: Any, *keywords_and_output: Any) -> None:
        if self._torch.compiler.is_compiling():
            return
        self._depth.value = getattr(self._depth, "value", 1) - 1
        # After an error PyTorch calls this hook without the keyword arguments.
        *keywords, output = keywords_and_output
        if error := sys.exc_info()[1] if output is None else None:
            self._failures.look_at(error)
        if self._depth.value or self._in_backward:
            return
        has_gradients = self._torch.is_grad_enabled()
        # After a validation, Lightning leaves DDP in evaluation, not the module within.
        trains = has_gradients and any(each.training for each in module.modules())
        if trains == self._counts_passes:
            is_validation = not (module.training or has_gradients or error)
            if is_validation and _has_parameters(module, trained=True):
                self._epoch_end.validate(has_trained=self._readings > 0)
            return
        if _has_parameters(module, trained=trains):
            shapes = _shapes(self._torch, [arguments, keywords])
            self._elements += sum(map(math.prod, shapes))
            self._shapes += shapes[: max(0, MOST_SHAPES - len(self._shapes))]
        if self._counts_passes and error is None and _has_parameters(module):
            self._note("forward")
            self._steps += 1
            self._end_reading()

    def _leaves_by_frame(self, module: Any, arguments: Any, output: Any) -> None:
        """Read the keyword arguments in the frame of PyTorch's ``_call_impl``, which calls this."""
        keywords = sys._getframe(1).f_locals.get("kwargs", {})
        self._leaves(module, arguments, keywords, output)

    # The end of a step.

    def _create(self, optimizer: Any, *arguments: Any, **keywords: Any) -> None:
        if type(optimizer).step.__qualname__ != "Optimizer.step":  # LOMO's trains in backward
            self._created.add(optimizer)
        self._failures.has_optimizer = True
        self._epoch_end.train_anew()
        if not self._readings:  # models may have run before, to learn their strides, or be counted
            self._shapes, self._elements = [], 0
        self._memory.train_on(_parameter(optimizer).device)

    def _watched(self, run: Callable[..., Any], then: Callable[[], None]) -> Callable[..., Any]:
        @functools.wraps(run)
        def watched(*arguments: Any, **keywords: Any) -> Any:
            self._in_backward += 1
            self._failures.is_in_step = True
            try:
                result = run(*arguments, **keywords)
            except Exception as error:
                self._failures.look_at(error)
                raise
            finally:
                self._in_backward -= 1
            if not self._in_backward:
                then()
            return result

        return watched

    def _after_grad(self) -> None:
        self._trains_by_grad |= not (self._steps or self._backwards)

    def _after_backward(self) -> None:
        self._backwards += 1
        self._trains_by_grad = False
        if self._counts_passes:
            return
        several = self._steps and (self._accumulates or self._backwards > 1)
        self._is_read = (several and len(self._created) == 1) or not self._created
        if self._is_read:
            self._note("forward_backward")
            self._end_reading()

    def _before_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        self._note("forward_backward")

    def _after_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        self._note("optimizer_step")
        self._created.add(optimizer)
        self._stepped.add(optimizer)
        first = self._first() if self._first else None
        if first is None or first not in self._created:
            self._first, first = weakref.ref(optimizer), optimizer
        has_gradients = self._backwards or self._trains_by_grad
        if optimizer is first and has_gradients and not self._counts_passes:
            self._accumulates, self._backwards = self._backwards > 1, 0
            self._steps += 1
            if not self._is_read:
                self._end_reading()

    def _note(self, phase: str) -> None:
        """Read the peak since the last note, and start a new one."""
        if not self._readings:
            trained = {each.device for one in self._created for each in _parameters(one)}
            self._memory.train_on_fullest(trained)
        peaks = self._memory.peaks()
        self._phases[phase] = max(self._phases[phase], peaks["allocated"])
        self._allocated = max(self._allocated, peaks["allocated"])
        self._reserved = max(self._reserved, peaks["reserved"])
        self._memory.reset()

    def _end_reading(self) -> None:
        self._memory.wait()
        if self._epoch_end.has_begun:
            self._epoch_end.step()
            return
        self._readings += 1
        seconds = time.monotonic() - self._began  # before the history is read
        self._requests.end_reading(self._memory.index, waits=self._must_wait())
        retries = self._memory.allocation_retries()
        self._report(
            "step",
            **self._memory.identity(),
            seconds=seconds,
            steps=self._steps,
            shapes=self._shapes,
            elements=self._elements,
            phases={phase: peak for phase, peak in self._phases.items() if peak},
            allocated=self._allocated,
            reserved=self._reserved,
            outside=self._memory.outside(),
            tries_kernels=self._torch.backends.cudnn.benchmark,
            retries=retries - self._retries,
        )
        self._retries = retries
        self._shapes, self._phases = [], dict.fromkeys(self._phases, 0)
        self._allocated = self._reserved = self._elements = 0
        self._wait()
        self._began = time.monotonic()

    def _wait(self) -> None:
        """Wait until more steps are allowed, or the launch ends this process."""
        while self._must_wait() and not self._epoch_end.begin_if_asked():
            self._report.pause()

    def _must_wait(self) -> bool:
        # Not for the one around another, as SAM: it has the other's parameters, and may never step.
        created, stepped = ({*map(_parameter, each)} for each in (self._created, self._stepped))
        waits_for_others = not self._counts_passes and not created <= stepped
        return self._readings >= self._allowed() * (MOST_WAITING if waits_for_others else 1)

    def _allowed(self) -> int:
        try:
            return int(Path(self._order["folder"], "allowed").read_text() or 0)
        except (OSError, ValueError):
            return 0

    def _save(self, *arguments: Any, **keywords: Any) -> None:
        path = arguments[1] if len(arguments) > 1 else keywords.get("f")
        if isinstance(path, (str, os.PathLike)) and self._created:
            self._report("saved", path=str(Path(path).absolute()))


def _parameters(optimizer: Any) -> Iterator[Any]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _parameter(optimizer: Any) -> Any:
    return next(_parameters(optimizer))


def _has_parameters(module: Any, *, trained: bool = False) -> bool:
    return any(each.requires_grad or not trained for each in module.parameters())


def _follow(owner: Any, name: str, then: Callable[..., None]) -> None:
    """Call a function after each call of another, with the same arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def followed(*arguments: Any, **keywords: Any) -> Any:
        result = original(*arguments, **keywords)
        then(*arguments, **keywords)
        return result

    setattr(owner, name, followed)


def _shapes(torch: Any, tree: Any, depth: int = MOST_DEPTH) -> list[list[int]]:
    """Return the shapes of all tensors in a structure of containers and objects."""
    if isinstance(tree, torch.Tensor):
        functorch = torch._C._functorch  # within vmap(), a tensor hides the dimension of the batch
        while functorch.is_functorch_wrapped_tensor(tree):
            tree = functorch.get_unwrapped(tree)
        return [list(tree.shape)]
    if not depth or isinstance(tree, torch.nn.Module):
        return []
    if not isinstance(tree, (dict, list, tuple)):
        tree = getattr(tree, "__dict__", {})  # of DETR's NestedTensor, or a graph
    parts = tree.values() if isinstance(tree, dict) else tree
    return [shape for part in [*parts] for shape in _shapes(torch, part, depth - 1)]
