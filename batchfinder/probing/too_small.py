"""The decision whether a step needs more than one example, as BatchNorm may."""

from __future__ import annotations

from collections.abc import Callable

from batchfinder.errors import BatchTooSmallError, UserCodeError

NEEDS_MORE_THAN_ONE = "Expected more than 1 value per channel when training"
"""PyTorch's error, in ``torch.nn.functional.batch_norm``, for a single value per channel."""


def needs_more_than_one_sample(error: BaseException, handled: BaseException | None = None) -> bool:
    """Return True if a normalization layer needs more than one example.

    The error that the user was handling when the step ran does not count.
    """
    from batchfinder.probing.devices.oom import chain  # late: it imports torch

    return any(
        isinstance(link, (ValueError, RuntimeError)) and NEEDS_MORE_THAN_ONE in str(link)
        for link in chain(error, handled)
    )


def too_small(batch_size: int) -> BatchTooSmallError:
    """Return the error for a step that needs more than ``batch_size`` examples."""
    examples = "example" if batch_size == 1 else "examples"
    return BatchTooSmallError(
        f"a layer of the model needs more than {batch_size} {examples} to train on. "
        f"Try batch sizes of {batch_size + 1} or more."
    )


def why_only_one_fails(problem: UserCodeError, try_two: Callable[[], object]) -> str:
    """Return why a batch of 1 fails where one of 2 does not; "" if both fail.

    The code may squeeze a batch of 1, whatever its error is: only a batch of 2 can tell.
    """
    try:
        try_two()
    except UserCodeError:
        return ""
    return f"a batch of 1 fails ({problem}), one of 2 does not"
