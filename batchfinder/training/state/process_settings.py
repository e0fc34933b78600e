"""What training steps may change in the process itself: random numbers, modes, precision flags."""

from __future__ import annotations

import contextlib
import operator
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

Undo = Callable[[], object]

# Below torch.backends; from wide to narrow, since a narrow one follows the wide one it lies in.
_BACKEND_FLAGS = (
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "cudnn.allow_tf32",
    "cuda.matmul.allow_tf32",
    "fp32_precision",
    "cudnn.fp32_precision",
    "mkldnn.fp32_precision",
    "cuda.matmul.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "mkldnn.matmul.fp32_precision",
    "mkldnn.conv.fp32_precision",
    "mkldnn.rnn.fp32_precision",
)


def process_settings() -> list[Undo]:
    """How to put back what belongs to the process as a whole: one function per setting."""
    undo: list[Undo] = [
        partial(random.setstate, random.getstate()),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
        *(partial(_switch, name, value) for name, value in read_switches().items()),
    ]
    # Not imported before means not used before: nothing to put back.
    if numpy := sys.modules.get("numpy"):
        undo.append(partial(numpy.random.set_state, numpy.random.get_state()))
    return undo


def read_switches() -> dict[str, Any]:
    """What PyTorch is told for the whole process and a training step's memory hangs on, by name.

    Values are as JSON has them; a switch that cannot be read is left out.
    """
    values = {name: _readable(read) for name, (read, _) in _SWITCHES.items()}
    return {name: value for name, value in values.items() if value is not None}


def set_switches(values: Mapping[str, Any]) -> None:
    """Set in this process what :func:`read_switches` has read in another."""
    for name, value in values.items():
        _switch(name, value)


@contextlib.contextmanager
def repeatable(things: Iterable[Any]) -> Iterator[None]:
    """Run what follows with the same random numbers each time; the user's go on as they were.

    Settings of the process are put back too.

    Args:
        things: among them generators of the user's own, which are only put back.
    """
    torch_numbers = torch.default_generator
    undo = process_settings()
    for thing in (torch_numbers, *things):
        undo += generator(thing)
    random.seed(0)
    torch_numbers.manual_seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    with undone(undo):
        yield


@contextlib.contextmanager
def undone(undo: list[Undo]) -> Iterator[None]:
    """Put back what is changed inside."""
    try:
        yield
    finally:
        for put_back in undo:
            put_back()


def _set_default_device(name: str) -> None:
    device = torch.device(name)
    # None means the CPU as well, and spares every factory function a look at the default.
    torch.set_default_device(None if device.type == "cpu" else device)
    if _readable(torch.get_default_device) is None:  # PyTorch 2.4 cannot read a None
        torch.set_default_device(device)


def _set_backend_flag(flag: str, value: object) -> None:
    path, _, name = flag.rpartition(".")
    setattr(operator.attrgetter(path)(torch.backends) if path else torch.backends, name, value)


def _switch(name: str, value: Any) -> None:
    """Set a switch; it is not touched while it is as it should be."""
    read, write = _SWITCHES[name]
    if _readable(read) != value:
        with _unwarned():
            write(value)


def _readable(read: Callable[[], Any]) -> Any:
    try:
        with _unwarned():
            return read()
    except (AttributeError, RuntimeError):
        # An older PyTorch has not all of them. And the older TF32 switches cannot be read once
        # the newer ones were set apart from them:
        # https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
        return None


@contextlib.contextmanager
def _unwarned() -> Iterator[None]:
    """For switches that are on their way out: PyTorch 2.9 warns of reading the older TF32 ones.

    https://github.com/pytorch/pytorch/issues/166286
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def device_generator(device: torch.device) -> Undo:
    """How to put back the random numbers of an accelerator."""
    module = getattr(torch, device.type)
    # Apple's has one generator, whatever the index.
    where = () if device.type == "mps" else (device,)
    return partial(module.set_rng_state, module.get_rng_state(*where), *where)


def generator(thing: Any) -> list[Undo]:
    """How to put back a generator of random numbers of the user's own; nothing for other things.

    Args:
        thing: a ``torch.Generator``, ``random.Random``, or a generator of NumPy.
    """
    if isinstance(thing, torch.Generator):
        return [partial(thing.set_state, thing.get_state())]
    if isinstance(thing, random.Random) and not isinstance(thing, random.SystemRandom):
        return [partial(thing.setstate, thing.getstate())]
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(thing, numpy.random.RandomState):
        return [partial(thing.set_state, thing.get_state())]
    if numpy and isinstance(thing, numpy.random.Generator):
        bits: Any = thing.bit_generator
        return [partial(setattr, bits, "state", bits.state)]
    return []


def _deterministic() -> list[bool]:
    return [
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    ]


# How to read and to write each, in this order.
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "default_dtype": (
        lambda: str(torch.get_default_dtype()),
        lambda name: torch.set_default_dtype(getattr(torch, name.removeprefix("torch."))),
    ),
    "default_device": (lambda: str(torch.get_default_device()), _set_default_device),
    "num_threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic": (
        _deterministic,
        lambda values: torch.use_deterministic_algorithms(values[0], warn_only=values[1]),
    ),
    "float32_matmul_precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    **{
        f"{kernel}_sdp": (
            getattr(torch.backends.cuda, f"{kernel}_sdp_enabled"),
            getattr(torch.backends.cuda, f"enable_{kernel}_sdp"),
        )
        for kernel in ("flash", "mem_efficient", "math", "cudnn")
    },
    **{
        flag: (
            partial(operator.attrgetter(flag), torch.backends),
            partial(_set_backend_flag, flag),
        )
        for flag in _BACKEND_FLAGS
    },
}
