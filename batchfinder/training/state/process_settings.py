"""Process-wide state that training steps may change: random numbers, modes, precision flags."""

from __future__ import annotations

import contextlib
import operator
import pickle
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

Undo = Callable[[], object]

# Flags of torch.backends. Wide flags come first: setting one also sets its narrower flags.
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
    """Return one function per process-wide setting that restores its current value."""
    return [
        *_host_generators(),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
        *(partial(_switch, name, value) for name, value in read_switches().items()),
    ]


def _host_generators() -> list[Undo]:
    """Return one function for each of the host's random generators that restores its state."""
    undo: list[Undo] = [
        partial(random.setstate, random.getstate()),
        *generator(torch.default_generator),
    ]
    # If NumPy is not imported yet, its generator has no state to restore.
    if numpy := sys.modules.get("numpy"):
        undo.append(partial(numpy.random.set_state, numpy.random.get_state()))
    return undo


def host_numbers() -> bytes:
    """Return the state of the host's random generators. It changes with each number drawn."""
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy else None
    return pickle.dumps((random.getstate(), of_numpy, torch.get_rng_state().tolist()))


def read_switches() -> dict[str, Any]:
    """Return PyTorch's process-wide settings that affect the memory of a training step, by name.

    The values are JSON types. Settings that cannot be read are left out.
    """
    values = {name: _readable(read) for name, (read, _) in _SWITCHES.items()}
    return {name: value for name, value in values.items() if value is not None}


@contextlib.contextmanager
def repeatable(things: Iterable[Any]) -> Iterator[None]:
    """Run the block with fixed random seeds; restore generators and process settings afterwards.

    The user's generators among the things are restored but not seeded.
    """
    undo = process_settings()
    for thing in things:
        undo += generator(thing)
    with undone(undo), seeded(0):
        yield


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run the block with a seed for random, torch on the host, and numpy; restore them afterwards.

    It is quicker than :func:`repeatable`, which restores all process settings.
    """
    with undone(_host_generators()):
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed)
        yield


@contextlib.contextmanager
def undone(undo: list[Undo]) -> Iterator[None]:
    """Run the functions in ``undo`` when the block ends."""
    try:
        yield
    finally:
        for put_back in undo:
            put_back()


def _set_default_device(name: str) -> None:
    device = torch.device(name)
    # None means the CPU too, and is faster: factory functions skip the lookup.
    torch.set_default_device(None if device.type == "cpu" else device)
    if _readable(torch.get_default_device) is None:  # PyTorch 2.4 cannot read a None
        torch.set_default_device(device)


def _set_backend_flag(flag: str, value: object) -> None:
    path, _, name = flag.rpartition(".")
    setattr(operator.attrgetter(path)(torch.backends) if path else torch.backends, name, value)


def _switch(name: str, value: Any) -> None:
    """Set a switch, unless it already has this value."""
    read, write = _SWITCHES[name]
    if _readable(read) != value:
        with _unwarned():
            write(value)


def _readable(read: Callable[[], Any]) -> Any:
    try:
        with _unwarned():
            return read()
    except (AttributeError, RuntimeError):
        # Older versions of PyTorch lack some switches. The older TF32 switches cannot be read once
        # the newer ones have different values:
        # https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
        return None


@contextlib.contextmanager
def _unwarned() -> Iterator[None]:
    """Suppress warnings: PyTorch 2.9 warns about reading the older TF32 switches.

    https://github.com/pytorch/pytorch/issues/166286
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def device_generator(device: torch.device) -> Undo:
    """Return a function that restores an accelerator's random generator."""
    module = getattr(torch, device.type)
    # MPS has a single generator, which takes no device.
    where = () if device.type == "mps" else (device,)
    return partial(module.set_rng_state, module.get_rng_state(*where), *where)


def generator(thing: Any) -> list[Undo]:
    """Return functions that restore a user's random generator; none for other objects."""
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


# A function to read each switch, and one to write it.
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "default_dtype": (
        lambda: str(torch.get_default_dtype()),
        lambda name: torch.set_default_dtype(getattr(torch, name.removeprefix("torch."))),
    ),
    "default_device": (lambda: str(torch.get_default_device()), _set_default_device),
    "num_threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic": (
        lambda: [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ],
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
