"""The protocol between the search and the code that runs the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from batchfinder.results.probe import Probe


class Recording(NamedTuple):
    """The memory requests of a confirmation to the caching allocator.

    Attributes:
        held: the size in bytes of each block that was in use before, ordered by address.
        steps: the events of each step. An event is the number of bytes requested, or ``~i`` for the
            release of the i-th block. Blocks are counted through ``held``, then all steps, and then
            all validations.
        streams: the number of the stream that requested each block; empty if there is one stream.
        validations: the events of each validation that ran after the steps, and of the step after
            it.
        batches_vary: True if each step trained on a batch of another shape, drawn from many.
        lengths_differ: True if a script's own batches differed in length. The budget then leaves
            room for other orders of them.
        ran_out: True if the confirmation failed after these steps, so there may be few.
        settings: the allocator's settings, as in ``PYTORCH_CUDA_ALLOC_CONF``. The code that trains
            may have set them by itself.
    """

    held: Sequence[int]
    steps: Sequence[Sequence[int]]
    streams: Sequence[int] = ()
    validations: Sequence[Sequence[int]] = ()
    batches_vary: bool = False
    lengths_differ: bool = False
    ran_out: bool = False
    settings: str = ""


class Prober(Protocol):
    """Try one batch size. The search does not know how.

    Attributes:
        device: the device's name for people, such as ``"cuda:0 NVIDIA H200"``.
        capacity_bytes: memory of the device; None if unknown.
        used_by_others_bytes: memory that other processes use; None if unknown.
        budget_bytes: memory that a step may use.
        is_repeatable: True if a size that ran one step will run many, in any process.
        versions: the versions of the software that the answer depends on.
        warnings: the warnings for the user. There may be more after each probe.
        may_expand: True if the device's allocator has expandable segments, and they are off.
        recordings: the memory requests of confirmations so far, by size; None if the prober
            records none.
        seconds_by_part: time spent outside the steps so far, such as ``loading``.
    """

    @property
    def device(self) -> str: ...

    @property
    def capacity_bytes(self) -> int | None: ...

    @property
    def used_by_others_bytes(self) -> int | None: ...

    @property
    def budget_bytes(self) -> int: ...

    @property
    def is_repeatable(self) -> bool: ...

    @property
    def versions(self) -> Mapping[str, str]: ...

    @property
    def warnings(self) -> tuple[str, ...]: ...

    @property
    def may_expand(self) -> bool: ...

    @property
    def recordings(self) -> Mapping[int, Recording] | None: ...

    @property
    def seconds_by_part(self) -> Mapping[str, float]: ...

    def probe(self, batch_size: int, *, confirm: bool = False) -> Probe:
        """Run one batch size.

        Args:
            batch_size: examples per forward/backward pass, at least 1.
            confirm: run several full steps from a fresh allocator, until the peak is steady.

        Returns:
            The probe. Running out of memory is an outcome, not an exception.

        Raises:
            Exception: an error of the user's own code in this process.
            UserCodeError: an error of the user's own code in a worker process.
        """
        ...

    def close(self) -> None:
        """End every process and release all memory. Safe to call twice."""
        ...
