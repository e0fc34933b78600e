"""The update of a guarded step: after the whole backward pass, by the optimizer alone."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from batchfinder.errors import DeviceError, UsageError
from batchfinder.probing.devices.oom import classify


def refuse_updates_in_backward(model: nn.Module) -> None:
    """Raise a UsageError if hooks act on gradients as soon as a backward pass has made them.

    Most of them update the parameter there, also in a pass that then runs out of memory.
    """
    for name, parameter in model.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise UsageError(
                f"{name} has a hook that acts within the backward pass "
                "(register_post_accumulate_grad_hook), so a step that runs out of memory cannot be "
                "dropped. Try optimizer.step() after the backward pass, without the hook"
            )


def update(optimizer: Optimizer) -> None:
    """Update the parameters.

    Raises:
        DeviceError: there is no room. States that the optimizer began to make are gone: half of
            them would fail in a later step.
    """
    had_states = {*optimizer.state}
    try:
        optimizer.step()
        return
    except Exception as error:
        failure = classify(error)
        if failure is None:
            raise
        reason = failure.reason
    for parameter in {*optimizer.state} - had_states:
        del optimizer.state[parameter]
    raise DeviceError(
        f"the optimizer's step ran out of memory ({reason}), and some parameters may have been "
        "updated; a smaller batch does not help. Try foreach=False, or a leaner optimizer"
    )
