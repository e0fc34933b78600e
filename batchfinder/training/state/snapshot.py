"""Restore everything that training steps change, bit for bit.

One rule covers modules, optimizers, scalers, schedulers and the user's functions. All dicts and
lists reachable from them get their old items back. Tensors get their old values, device and
gradient back, and closures their old variables. The saved values are kept in host memory.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from batchfinder.errors import DeviceError, StepError
from batchfinder.training.state.process_settings import (
    Undo,
    device_generator,
    generator,
    process_settings,
)
from batchfinder.training.state.reach import methods_of, reachable
from batchfinder.training.state.storage import SavedStorage, frozen, host_copy, leaving
from batchfinder.training.state.undo import undo_of

# The dicts of a tensor's hooks, None before the first hook. An optimizer that steps during the
# backward pass adds some.
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@contextlib.contextmanager
def preserved_state(
    *objects: object,
    device: torch.device | str | None = None,
    moved: Iterable[nn.Module] = (),
) -> Iterator[Snapshot]:
    """Run training steps and restore everything that they change, however they end.

    After the block, also after an exception or Ctrl-C, these are as before:

    - objects: attributes, dicts and lists, and so parameters, buffers, train/eval mode, hooks,
      optimizer states and groups, the scaler's scale, the scheduler's counters;
    - functions, and methods of the user's modules: the variables that they can reach in closures,
      globals, the user's modules and ``self``, and random generators, also those of data sets;
    - tensors in any of these: the object, its values, device and storage (tied and shared tensors
      stay so), ``requires_grad``, hooks and the gradient (the same object, or None);
    - the process: random generators (Python, NumPy, PyTorch on all devices), autograd mode, default
      dtype and device, determinism, cuDNN and TF32 switches.

    Inside the block, every gradient is None, as at the start of a training step, and the model may
    be moved to another device. A second Ctrl-C waits until everything is restored.

    Not restored: objects of libraries without a ``state_dict``; data sets except their generators;
    iterators, NumPy arrays; the allocator's cap; tensors on the meta device, which have no values.

    Args:
        objects: modules, optimizer, GradScaler, scheduler, functions, and so on; None is ignored.
            Everything that an optimizer or scheduler refers to is included.
        device: the device of the steps, for its random generator. Devices of tensors are included.
        moved: modules that move to the device before the first step. Their parameters elsewhere
            are not copied, because no step writes to them there.

    Yields:
        The snapshot. Its ``start_over`` restores everything in between, before other steps.

    Raises:
        StepError: a parameter has no shape yet, as in ``nn.LazyLinear``.
        DeviceError: a broken device prevented a part from being restored; the rest is restored.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> weight = model.weight.detach().clone()
        >>> with preserved_state(model):
        ...     _ = model.weight.data.zero_()
        >>> torch.equal(model.weight, weight)
        True
    """
    snapshot = Snapshot(objects, device, moved)
    try:
        snapshot.detach_gradients()
        yield snapshot
    finally:
        # sys.exc_info() also finds an error if this generator is closed in another ``finally``.
        error = sys.exc_info()[1]
        with _interrupts_deferred():
            try:
                snapshot.restore()
            except DeviceError:
                # The frames of the error may keep tensors alive that leave no room to restore.
                if error is None:
                    raise
                _clear_frames(error)
                snapshot.restore()


class Snapshot:
    """The saved state. It can be restored any number of times."""

    def __init__(
        self,
        objects: tuple[object, ...],
        device: torch.device | str | None,
        moved: Iterable[nn.Module],
    ) -> None:
        self._containers: list[Undo] = []
        self._values: list[Undo] = []
        self._tensors: list[_SavedTensor] = []
        self._settings: list[Undo] = process_settings()
        self._storages: dict[tuple[torch.device, int], SavedStorage] = {}
        self._devices = set() if device is None else {torch.device(device)}
        kind = torch.device(device or "cpu").type
        leave = (weight for module in moved for weight in leaving(module))
        self._only_watched = {id(weight) for weight in leave if weight.device.type != kind}
        self._collect(objects)
        for used in self._devices:
            if used.type not in ("cpu", "meta"):
                self._settings.append(device_generator(used))

    def detach_gradients(self) -> None:
        """Remove every gradient from its tensor, and from the accelerator."""
        for saved in self._tensors:
            saved.detach_gradient()

    def start_over(self) -> None:
        """Restore the state at the start of :func:`preserved_state` while still inside it."""
        with _interrupts_deferred():
            self.restore(is_midway=True)

    def restore(self, *, is_midway: bool = False) -> None:
        """Restore everything; a failure does not prevent the rest.

        ``is_midway``: other steps follow. Then values that cannot have changed are not read, and
        the user's gradients stay where they are.
        """
        with torch.no_grad():
            failures = _run(saved.drop_new_gradient for saved in self._tensors)
            failures += _run(self._containers)
            failures += _run(self._values)
            storages = self._storages.values()
            failures += _run(partial(saved.restore, is_midway) for saved in storages)
            failures += _run(partial(saved.restore, is_midway) for saved in self._tensors)
        failures += _run(self._settings)
        if failures:
            reason = str(failures[0]).partition("\n")[0]
            raise DeviceError(
                f"not all of the training state could be restored ({reason}). Try loading model "
                "and optimizer from a checkpoint before training."
            ) from failures[0]

    def _collect(self, objects: tuple[object, ...]) -> None:
        roots = [vars(item) for item in objects if hasattr(item, "__dict__")]
        methods = [m for item in objects if isinstance(item, nn.Module) for m in methods_of(item)]
        found = [*reachable([*roots, *objects, *methods])]
        self._only_watched |= {
            id(weight) for part in found if isinstance(part, nn.Module) for weight in frozen(part)
        }
        for value in found:
            if isinstance(value, Tensor):
                self._save_tensor(value)
            else:
                self._settings += generator(value)
                self._containers += undo_of(value)

    def _save_tensor(self, tensor: Tensor) -> None:
        refuse_lazy([tensor])
        # Tensors made in inference mode cannot be changed in place.
        if tensor.is_meta or tensor.is_inference():
            return
        self._devices.add(tensor.device)
        self._tensors.append(_SavedTensor(tensor))
        if tensor.is_leaf and tensor.grad is not None and not _moves_to_host(tensor.grad):
            self._save_tensor(tensor.grad)
        if not _is_plain(tensor):
            # DTensors, quantized wrappers and sparse tensors all support clone() and copy_(), on
            # their own device.
            self._values.append(partial(tensor.copy_, tensor.detach().clone()))
            return
        storage = tensor.untyped_storage()
        key = (storage.device, storage.data_ptr())
        if key not in self._storages:
            self._storages[key] = SavedStorage(storage)
        self._storages[key].note(tensor, is_copied=id(tensor) not in self._only_watched)


def refuse_lazy(tensors: Iterable[Tensor]) -> None:
    """Raise a StepError if a parameter has no shape yet."""
    if any(map(nn.parameter.is_lazy, tensors)):
        raise StepError(
            "the model has parameters without a shape, as in nn.LazyLinear. Try running one batch "
            "through it before the search."
        )


class _SavedTensor:
    """A tensor's data, ``requires_grad``, hooks and gradient."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._hooks = {name: dict(getattr(tensor, name) or {}) for name in _HOOKS}
        self._data = tensor.data if _is_plain(tensor) else None
        self._requires_grad = tensor.requires_grad
        self._grad = tensor.grad if tensor.is_leaf else None
        self._grad_home: tuple[Tensor, torch.device] | None = None

    def detach_gradient(self) -> None:
        grad = self._grad
        if grad is None:
            return
        if _moves_to_host(grad):
            self._grad_home = (host_copy(grad), grad.device)
            grad.data = self._grad_home[0]
        self._tensor.grad = None

    def drop_new_gradient(self) -> None:
        if self._tensor.is_leaf:
            self._tensor.grad = None

    def restore(self, is_midway: bool) -> None:
        if self._data is not None:
            self._tensor.data = self._data
        if self._tensor.is_leaf and self._tensor.requires_grad != self._requires_grad:
            self._tensor.requires_grad_(self._requires_grad)
        for name, known in self._hooks.items():
            hooks = getattr(self._tensor, name)  # handles of the hooks refer to this dict
            if hooks is not None:
                hooks.clear()
                hooks.update(known)
        if self._grad is not None and not is_midway:
            if self._grad_home is not None:
                values, device = self._grad_home
                self._grad.data = values.to(device)
            self._tensor.grad = self._grad


def _is_plain(tensor: Tensor) -> bool:
    """Return True for a view of one storage; False for a wrapper around other tensors."""
    return tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__")


def _moves_to_host(grad: Tensor) -> bool:
    """Return True if moving a gradient to the host frees memory on the accelerator.

    A gradient with a shared storage, as in DistributedDataParallel's buckets, frees none.
    """
    return (
        grad.device.type not in ("cpu", "meta")
        and _is_plain(grad)
        and grad.untyped_storage().nbytes() == grad.nbytes
    )


def _run(undos: Any) -> list[Exception]:
    failures: list[Exception] = []
    for undo in undos:
        try:
            undo()
        except Exception as error:  # noqa: BLE001, PERF203 - a user's class may raise anything
            failures.append(error)
    return failures


def _clear_frames(error: BaseException | None) -> None:
    """Release the local variables in the tracebacks of an error and its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    gc.collect()


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Delay Ctrl-C. Only the main thread receives it and can change its handler."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    caught: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught:
            signal.raise_signal(signal.SIGINT)
