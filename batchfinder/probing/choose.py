"""In this process or in workers: which prober a call of ``find_max_batch`` gets."""

from __future__ import annotations

import pickle
import pickletools

from torch import nn

from batchfinder.errors import UsageError
from batchfinder.probing.devices import choose_device
from batchfinder.probing.in_process import InProcessProber
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.prober import Prober
from batchfinder.probing.source import SetupSource
from batchfinder.probing.worker import WorkerProber
from batchfinder.training.setup import TrainingSetup


def choose_prober(setup: TrainingSetup, options: ProbeOptions, *, isolate: bool) -> Prober:
    """The prober for a setup.

    Args:
        setup: what to train.
        options: of the search.
        isolate: whether the user asks for worker processes. On devices where an out-of-memory
            spoils the process that it happens in, they are chosen anyway where they can be.

    Raises:
        UsageError: isolation was asked for, and the setup cannot be sent to another process.
        BatchFinderError: see the probers.
    """
    if not isinstance(setup.model, nn.Module):
        raise UsageError(f"the model is {type(setup.model).__name__}, not a torch.nn.Module")
    device = choose_device(options.device, setup.model)
    if not isolate and device.leaves_no_trace:
        return InProcessProber(setup, options)
    try:
        return WorkerProber(SetupSource(pickled_setup=_pickle(setup)), options)
    except UsageError as error:
        if isolate:
            raise
        prober = InProcessProber(setup, options)
        prober.warn(
            f"sizes are tried in this process, as {error}: an out-of-memory on the CPU leaves "
            "holes in its memory, and the answer may be too small; batchfinder find does better"
        )
        return prober


def _pickle(setup: TrainingSetup) -> bytes:
    """The pickled setup.

    Raises:
        UsageError: it cannot be pickled, or not be unpickled in another process.
    """
    try:
        pickled = pickle.dumps(setup)
    except Exception as error:  # noqa: BLE001 - classes pickle by code of their own
        raise UsageError(f"the setup cannot be pickled ({error})") from None
    # A worker has another __main__, and running the user's script again is not ours to do.
    if any(arg == "__main__" for _, arg, _ in pickletools.genops(pickled)):
        raise UsageError(
            "something in it is defined in the script itself and so cannot be sent to another "
            "process; move it to a module of its own"
        )
    return pickled
