"""A setup as bytes, for another process."""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from batchfinder.errors import DeviceError, UsageError
from batchfinder.probing.devices.oom import classify
from batchfinder.probing.devices.oom_table import Tier
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.tree import map_leaves


def pickle_setup(setup: TrainingSetup) -> bytes:
    """The setup as ``torch.save`` writes it.

    With ``pickle`` alone each tensor would bring a storage of its own: that of the weights of an
    LSTM, which share one on a GPU, as often as there are weights.

    Raises:
        UsageError: it cannot be pickled, or not be unpickled in another process.
    """
    file = io.BytesIO()
    try:
        sample = map_leaves(_without_the_rest, setup.sample)
        torch.save(replace(setup, sample=sample), file, pickle_protocol=pickle.DEFAULT_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - classes pickle by code of their own
        raise UsageError(
            f"the setup cannot be pickled ({error}) and so cannot be sent to another "
            "process; define its functions and classes at the top of a module"
        ) from None
    # A worker has another __main__, and running the user's script again is not ours to do.
    if any(arg == "__main__" for _, arg, _ in pickletools.genops(_pickle_in(file))):
        raise UsageError(
            "something in it is defined in the script itself and so cannot be sent to another "
            "process; move it to a module of its own"
        )
    return file.getvalue()


def unpickle_setup(pickled: bytes) -> TrainingSetup:
    """The inverse, in the other process.

    Raises:
        DeviceError: its tensors do not fit on the device where they lay.
        UsageError: it cannot be unpickled here.
    """
    try:
        setup: TrainingSetup = torch.load(io.BytesIO(pickled), weights_only=False)
    except Exception as error:  # noqa: BLE001 - classes unpickle by code of their own
        failure = classify(error)
        if failure is not None and failure.tier is Tier.CERTAIN:
            raise DeviceError(
                f"a second copy of model and sample has no room beside this process's "
                f"({failure.reason}); build them on the CPU, or leave isolate=True away"
            ) from None
        raise UsageError(
            f"the setup cannot be unpickled in another process ({type(error).__name__}: {error})"
        ) from None
    return setup


def _without_the_rest(_: str, leaf: Any) -> Any:
    """A slice of a data set without the rest of it."""
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or leaf.is_meta:
        return leaf
    is_slice = leaf.untyped_storage().nbytes() > leaf.numel() * leaf.element_size()
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if is_slice else leaf


def _pickle_in(file: io.BytesIO) -> bytes:
    """The pickle in what ``torch.save`` has written: all but the tensors' data."""
    with zipfile.ZipFile(file) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        return archive.read(name)
