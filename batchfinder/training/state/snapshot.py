"""All that training steps touch, put back bit for bit.

One rule covers modules, optimizers, scalers, schedulers and the user's functions alike: every dict
and list reachable from them gets its old items back, every tensor in them its old values, place and
gradient, and every variable of a closure its old value. The values wait in host memory.
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
from batchfinder.training.state.undo import undo_of


@contextlib.contextmanager
def preserved_state(
    *objects: object, device: torch.device | str | None = None
) -> Iterator[Snapshot]:
    """Run training steps and leave no trace of them, whichever way they end.

    On leaving, also by an exception or Ctrl-C, these are as they were on entering:

    - of each object: attributes, dicts and lists; so parameters, buffers, train/eval mode, hooks,
      optimizer states and groups, the scaler's scale, the scheduler's counters;
    - of each function, and of each method of the user's modules: what it reaches in its closure,
      its globals, the user's files and the object that it belongs to, as far as that is the user's
      code, and which objects the variables there name; and the user's generators of random numbers;
    - of each tensor in them: the object, its values, its device and storage (tied and shared ones
      stay so), ``requires_grad`` and the gradient (the same object; None stays None);
    - of the process: random number generators (Python, NumPy, PyTorch on the CPU and the devices),
      autograd mode, default dtype and device, determinism, cuDNN and TF32 switches.

    Inside, every gradient is None, as at the start of a training step, and the model may be moved
    to another device. A second Ctrl-C waits until everything is back.

    Not covered: what only objects of libraries hold, unless they have a ``state_dict``; data sets,
    iterators, NumPy arrays; the allocator's cap; tensors on the meta device, which have no values.

    Args:
        objects: modules, optimizer, GradScaler, scheduler, functions, …; None is ignored. What an
            optimizer or scheduler holds is covered with it.
        device: where the steps run, for its random numbers; the devices of the tensors are known.

    Yields:
        What was there: its ``start_over`` puts all back in between, for other steps to follow.

    Raises:
        StepError: a parameter has no shape yet, as in ``nn.LazyLinear``.
        DeviceError: something could not be put back, as the device is broken; all else is back.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> weight = model.weight.detach().clone()
        >>> with preserved_state(model):
        ...     _ = model.weight.data.zero_()
        >>> torch.equal(model.weight, weight)
        True
    """
    snapshot = Snapshot(objects, device)
    try:
        snapshot.detach_gradients()
        yield snapshot
    finally:
        # Also where this is left in another's ``finally``, and no error comes through the ``with``.
        error = sys.exc_info()[1]
        with _interrupts_deferred():
            try:
                snapshot.restore()
            except DeviceError:
                # What the frames of an error hold of the step may be what there is no room beside.
                if error is None:
                    raise
                _clear_frames(error)
                snapshot.restore()


class Snapshot:
    """What was there. Taken once; restoring it twice is the same as once."""

    def __init__(self, objects: tuple[object, ...], device: torch.device | str | None) -> None:
        self._containers: list[Undo] = []
        self._values: list[Undo] = []
        self._tensors: list[_SavedTensor] = []
        self._settings: list[Undo] = process_settings()
        self._storages: set[tuple[torch.device, int]] = set()
        self._devices = set() if device is None else {torch.device(device)}
        self._collect(objects)
        for used in self._devices:
            if used.type not in ("cpu", "meta"):
                self._settings.append(device_generator(used))

    def detach_gradients(self) -> None:
        """Take every gradient off its tensor, and off the accelerator."""
        for saved in self._tensors:
            saved.detach_gradient()

    def start_over(self) -> None:
        """Make everything as it was on entering :func:`preserved_state`, in the midst of it.

        Raises:
            DeviceError: something could not be put back, as the device is broken; all else is back.
        """
        with _interrupts_deferred():
            self.restore()
        self.detach_gradients()

    def restore(self) -> None:
        """Put everything back; what fails does not keep the rest from it."""
        with torch.no_grad():
            failures = _run(saved.drop_new_gradient for saved in self._tensors)
            failures += _run(self._containers)
            failures += _run(self._values)
            failures += _run(saved.restore for saved in self._tensors)
        failures += _run(self._settings)
        if failures:
            reason = str(failures[0]).partition("\n")[0]
            raise DeviceError(
                f"not all of the training state could be put back ({reason}); load model and "
                "optimizer from a checkpoint before training"
            ) from failures[0]

    def _collect(self, objects: tuple[object, ...]) -> None:
        roots = [vars(item) for item in objects if hasattr(item, "__dict__")]
        methods = [m for item in objects if isinstance(item, nn.Module) for m in methods_of(item)]
        for value in reachable([torch.default_generator, *roots, *objects, *methods]):
            if isinstance(value, Tensor):
                self._save_tensor(value)
            else:
                self._settings += generator(value)
                self._containers += undo_of(value)

    def _save_tensor(self, tensor: Tensor) -> None:
        refuse_lazy([tensor])
        # Nothing can change in place a tensor made in inference mode.
        if tensor.is_meta or tensor.is_inference():
            return
        self._devices.add(tensor.device)
        self._tensors.append(_SavedTensor(tensor))
        if tensor.is_leaf and tensor.grad is not None and not _moves_to_host(tensor.grad):
            self._save_tensor(tensor.grad)
        if not _is_plain(tensor):
            # DTensors, quantized wrappers, sparse tensors: by what they all understand, and on
            # their own device.
            self._values.append(partial(tensor.copy_, tensor.detach().clone()))
            return
        storage = tensor.untyped_storage()
        key = (storage.device, storage.data_ptr())
        if key not in self._storages:
            self._storages.add(key)
            self._values.append(partial(_refill_storage, storage, _host_copy(_bytes(storage))))


def refuse_lazy(tensors: Iterable[Tensor]) -> None:
    """Raise a StepError if a parameter has no shape yet."""
    if any(map(nn.parameter.is_lazy, tensors)):
        raise StepError(
            "the model has parameters without a shape yet (nn.LazyLinear or the like); run one "
            "batch through it before looking for a batch size"
        )


class _SavedTensor:
    """Where a tensor's data lie, whether it is trained, and its gradient."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._data = tensor.data if _is_plain(tensor) else None
        self._requires_grad = tensor.requires_grad
        self._grad = tensor.grad if tensor.is_leaf else None
        self._grad_home: tuple[Tensor, torch.device] | None = None

    def detach_gradient(self) -> None:
        grad = self._grad
        if grad is None:
            return
        if _moves_to_host(grad):
            self._grad_home = (_host_copy(grad), grad.device)
            grad.data = self._grad_home[0]
        self._tensor.grad = None

    def drop_new_gradient(self) -> None:
        if self._tensor.is_leaf:
            self._tensor.grad = None

    def restore(self) -> None:
        if self._data is not None:
            self._tensor.data = self._data
        if self._tensor.is_leaf and self._tensor.requires_grad != self._requires_grad:
            self._tensor.requires_grad_(self._requires_grad)
        if self._grad is not None:
            if self._grad_home is not None:
                values, device = self._grad_home
                self._grad.data = values.to(device)
            self._tensor.grad = self._grad


def _is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is a view of one storage, and no wrapper around other tensors."""
    return tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__")


def _moves_to_host(grad: Tensor) -> bool:
    """Whether a gradient gives room on the accelerator when it moves away.

    One that shares its storage with others, as in the buckets of DistributedDataParallel, does not.
    """
    return (
        grad.device.type not in ("cpu", "meta")
        and _is_plain(grad)
        and grad.untyped_storage().nbytes() == grad.numel() * grad.element_size()
    )


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """The storage itself as a tensor; so views, expanded and strided tensors need no care."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _refill_storage(storage: torch.UntypedStorage, values: Tensor) -> None:
    if storage.nbytes() != values.numel():
        storage.resize_(values.numel())
    now = _bytes(storage)
    # What did not change is not written: it may be mapped from a file, read-only.
    if not torch.equal(now.cpu(), values):
        now.copy_(values)


def _run(undos: Any) -> list[Exception]:
    failures: list[Exception] = []
    for undo in undos:
        try:
            undo()
        except Exception as error:  # noqa: BLE001, PERF203 - classes set by code of their own
            failures.append(error)
    return failures


def _clear_frames(error: BaseException | None) -> None:
    """Let go of the local variables of all that an error has ended."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    gc.collect()


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Make Ctrl-C wait. Only the main thread gets it, and only it may change that."""
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
