"""Measure the data of ``--loader`` in processes of their own, which leave the device free."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, set_start_method
from typing import Any, TypeVar

from batchfinder.errors import WorkerError
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.setup_source import SetupSource, load_from
from batchfinder.results.noise_scale import NoiseScale

T = TypeVar("T")


def noise_scale_on_data(source: SetupSource, options: ProbeOptions) -> NoiseScale:
    """Measure the gradient noise scale of a target on its loader's data.

    Raises:
        BatchFinderError: it cannot be measured, or the user's code fails.
    """
    return _in_new_process(_noise_scale, source, source.loader, options)


def loader_rate(source: SetupSource) -> float:
    """Return how many examples a second the loader yields by itself.

    Raises:
        BatchFinderError: the user's code fails.
    """
    return _in_new_process(_rate, source.loader, dict(source.arguments))


def _in_new_process(function: Callable[..., T], *given: Any) -> T:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        try:
            return processes.submit(_as_user_code, function, *given).result()
        except BrokenProcessPool:
            raise WorkerError(
                "the process that measures the loader's data was killed, most likely for lack of "
                "host memory. Try fewer loader workers."
            ) from None


# Everything below runs in the new process. Only that process imports torch.


def _as_user_code(function: Callable[..., T], *given: Any) -> T:
    from batchfinder.cli.estimating.estimate import user_code

    set_start_method(None, force=True)  # a loader's workers start as they do in training
    with user_code():
        return function(*given)


def _noise_scale(source: SetupSource, loader: str, options: ProbeOptions) -> NoiseScale:
    from batchfinder.studies.noise_scale import DRAWS, SMALL, measured
    from batchfinder.training.target import call_with_arguments, load_function

    made = load_function(loader)
    setup, _ = load_from(source.to_dict())
    data = call_with_arguments(made, source.arguments)
    return measured(setup, data, options.device, options.precision, SMALL, DRAWS)


def _rate(loader: str, arguments: dict[str, Any]) -> float:
    from batchfinder.training.data.rate import samples_per_second
    from batchfinder.training.target import call_with_arguments, load_function

    return samples_per_second(call_with_arguments(load_function(loader), arguments))
