"""Record every storage of a fake training step: when it is allocated and freed, and what for."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from batchfinder.errors import StepError
from batchfinder.simulation.trace.recorder import Recorder, held
from batchfinder.simulation.trace.trace import EMPTY_CACHE, Kind, Rule, Stage, Storage, Trace
from batchfinder.simulation.tracing.callers import user_line, value_for_pytorch_itself
from batchfinder.simulation.tracing.operators import run_operator
from batchfinder.simulation.tracing.refusal import USE_FIND
from batchfinder.training.optimizer import parameters_of

_CPU = torch.device("cpu")
_DEVICE_OF = torch.ops.prim.device.default
_ADD = torch.ops.aten.add.Tensor
_LITERAL = torch.ops.aten.lift_fresh.default
_DROPOUT = torch.ops.aten.native_dropout.default  # allocates its mask before its output
_ADDING = {"VarMeanBackward0", "StdMeanBackward0"}  # these add out of place on CUDA too
_ON_HOST = -1
"""The index of a tensor made from a Python number, such as an optimizer's step counter."""
_ITEM = torch.ops.aten._local_scalar_dense.default

Workspaces = Callable[[Recorder, OpOverload, Any, Any], None]
"""Called after each operator; tracks its outputs and the memory that its kernel uses."""


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Recorder of a :class:`~batchfinder.simulation.trace.trace.Trace` of all that runs inside it.

    It holds storages by weak references only, so nothing lives longer than without it.

    Example:
        >>> layer = nn.Linear(4, 2)
        >>> with StorageTracker(1, layer) as tracker:
        ...     output = layer(torch.ones(1, 4))
        >>> [storage.size_bytes for storage in tracker.trace.storages]
        [16, 32, 8]
    """

    def __init__(
        self,
        batch_size: int,
        model: nn.Module,
        workspaces: Workspaces | None = None,
        names: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace(batch_size)
        self._model = model
        self._workspaces = workspaces
        self._live: dict[int, _Live] = {}
        self._names = names or {id(module): name for name, module in model.named_modules()}
        self._modules: list[str] = []
        self._in_optimizer = False
        # The module and line behind an autograd node, by the node's sequence number.
        self._origins: dict[int, tuple[str, str]] = {}
        self._sum: tuple[_Live, _Live] | None = None
        self._hooks = ExitStack()

    def __enter__(self) -> StorageTracker:
        for handle in (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._enter_optimizer),
            register_optimizer_step_post_hook(self._leave_optimizer),
        ):
            self._hooks.callback(handle.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        self._hooks.close()
        self._live.clear()  # storages freed from here on are not part of a step

    def begin_step(self) -> None:
        """Mark the beginning of a training step."""
        self.trace.steps.append(len(self.trace.events))

    def track(self, tensor: Tensor, kind: Kind = Kind.TEMPORARY) -> None:
        """Record the storage of a tensor, unless it is known already."""
        self._track_storage(held(tensor).untyped_storage(), kind)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage released or reallocated its memory in place."""
        entry = self._live.pop(storage._cdata, None)
        if entry is not None:
            self.end_transient(entry.index)
        self._track_storage(storage, Kind.TEMPORARY)

    def _track_storage(self, storage: torch.UntypedStorage, kind: Kind) -> None:
        size = storage.nbytes()
        if size and storage._cdata not in self._live:
            self._watch(storage, _Live(self._born(size, kind)))

    def _watch(self, storage: torch.UntypedStorage, entry: _Live) -> None:
        key = storage._cdata

        def died(_: Any) -> None:
            if self._live.pop(key, None) is entry:
                self.end_transient(entry.index)

        entry.watch = weakref.ref(storage, died)
        self._live[key] = entry

    def begin_transient(self, size: int | Rule, *, optional: bool = False) -> int:
        """Record memory that a kernel uses while it runs; return the index to end it with."""
        return self._born(size, Kind.WORKSPACE, optional)

    def empty_cache(self) -> None:
        """Record that the allocator releases its cached segments."""
        self.trace.events.append(EMPTY_CACHE)

    def made_by_steps(self) -> list[weakref.ref[Any]]:
        """Return the live storages that were allocated in a step."""
        entries = [entry for entry in self._live.values() if entry.index != _ON_HOST]
        made = [e for e in entries if self.trace.storages[e.index].stage is not Stage.SETUP]
        return [entry.watch for entry in made if entry.watch]

    def label(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        """Set the kind of the storages of some tensors."""
        for tensor in tensors:
            known = self._live.get(held(tensor).untyped_storage()._cdata)
            if known is not None and known.index != _ON_HOST:
                self.trace.storages[known.index].kind = kind

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE_OF:
            # Autograd runs this operator for each gradient.
            return getattr(args[0], "fake_device", None) or func(*args)
        if func is _ITEM:
            value = value_for_pytorch_itself()
            if value is not None:
                return value
        if kwargs and getattr(kwargs.get("device"), "type", "cpu") != "cpu":
            # The CPU stands for every device: in a PyTorch without CUDA, autograd aborts the
            # process on a fake tensor "on cuda".
            kwargs = {**kwargs, "device": _CPU}
        self._sum = None
        output = run_operator(func, args, kwargs or {}, self.track, in_optimizer=self._in_optimizer)
        note = self._workspaces or StorageTracker.track_outputs
        note(self, func, args, output)
        return output

    def track_outputs(self, func: OpOverload, args: Any, output: Any) -> None:
        """Record the storages that an operator allocated."""
        births = len(self.trace.storages)
        if func is _LITERAL:
            self._watch(output.untyped_storage(), _Live(_ON_HOST))
        else:
            leaves = [output] if isinstance(output, Tensor) else tree_leaves(output)
            for leaf in reversed(leaves) if func is _DROPOUT else leaves:
                if isinstance(leaf, Tensor):
                    self.track(leaf)
        if func is _ADD and len(self.trace.storages) == births + 1:
            self._note_sum(args[0], output)

    def _born(self, size: int | Rule, kind: Kind, optional: bool = False) -> int:
        stage, (module, line) = self._where()
        if not self.trace.stages or self.trace.stages[-1][1] is not stage:
            self.trace.stages.append((len(self.trace.events), stage))
        index = len(self.trace.storages)
        asked, rule = (size.size_bytes, size) if isinstance(size, Rule) else (size, None)
        self.trace.storages.append(Storage(asked, kind, stage, module, line, optional, rule))
        self.trace.events.append(index)
        return index

    def end_transient(self, index: int) -> None:
        """Record the death of a storage, or that a kernel released its memory."""
        if index == _ON_HOST:
            return
        storage = self.trace.storages[index]
        if self._sum is not None and self._sum[0].index == index:
            self._settle_sum(*self._sum)
            return
        if (
            storage.kind is Kind.TEMPORARY
            and storage.stage is Stage.FORWARD
            and torch._C._current_autograd_node() is not None
        ):
            storage.kind = Kind.ACTIVATION
        self.trace.events.append(~index)

    def _where(self) -> tuple[Stage, tuple[str, str]]:
        """Return the current stage, and the module and line of the user's code behind it."""
        if self._in_optimizer:
            return Stage.OPTIMIZER, ("", "")
        node = torch._C._current_autograd_node()
        if node is not None:
            return Stage.BACKWARD, self._origins.get(node._sequence_nr(), ("", ""))
        if not self.trace.steps:
            return Stage.SETUP, ("", "")
        origin = (self._modules[-1] if self._modules else "", user_line())
        self._origins[torch._C._autograd._get_sequence_nr() - 1] = origin
        return Stage.FORWARD, origin

    # Autograd adds the gradients of a tensor that is used twice in place. With a tensor subclass or
    # a dispatch mode, as here, it adds out of place and frees the first term at once. Such a sum is
    # recorded in the storage of its first term instead.
    # https://github.com/pytorch/pytorch/blob/main/torch/csrc/autograd/input_buffer.cpp

    def _note_sum(self, first: Any, total: Tensor) -> None:
        node = torch._C._current_autograd_node()
        if node is None or node.name() in _ADDING or not isinstance(first, Tensor):
            return
        term = self._live.get(held(first).untyped_storage()._cdata)
        new = self._live[held(total).untyped_storage()._cdata]
        if term is None or term.index == _ON_HOST or first._is_view():
            return  # autograd does not add into a view, whose storage belongs to others
        storages = self.trace.storages
        if storages[term.index].size_bytes == storages[new.index].size_bytes:
            self._sum = (term, new)

    def _settle_sum(self, first: _Live, total: _Live) -> None:
        self._sum = None
        events = self.trace.events
        del events[next(at for at in reversed(range(len(events))) if events[at] == total.index)]
        self.trace.storages.pop()
        total.index = first.index

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        self._modules.append(self._names.get(id(module), ""))

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._modules:
            self._modules.pop()

    def _enter_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        own = parameters_of(optimizer)
        if not any(held(p).untyped_storage()._cdata in self._live for p in own):
            raise StepError(
                f"{type(optimizer).__name__} has no parameter of the simulated model. It belongs "
                f"to another model, or the step made it for the original: {USE_FIND}"
            )
        self._in_optimizer = True
        # A sharded optimizer has only a part of the model's parameters.
        parameters = {*own, *self._model.parameters()}
        self.label((p.grad for p in parameters if p.grad is not None), Kind.GRADIENT)

    def _leave_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._in_optimizer = False
        states = tree_leaves(list(optimizer.state.values()))
        self.label((s for s in states if isinstance(s, Tensor)), Kind.OPTIMIZER_STATE)


# PyTorch wraps the method so that torch.compile skips it. Nothing is compiled in a simulated step,
# and the wrapper would use a tenth of its time.
StorageTracker.__torch_dispatch__ = inspect.unwrap(StorageTracker.__torch_dispatch__)  # type: ignore[method-assign]


@dataclass(slots=True, eq=False)
class _Live:
    """A live storage and its index in the trace."""

    index: int
    watch: weakref.ref[Any] | None = None
