"""How a model is called on a batch: with the inputs, with keywords, or with all parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from batchfinder.errors import StepError
from batchfinder.training.parallel import inner_module
from batchfinder.training.setup import parameters_taken, refused_call

Way: TypeAlias = Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]
"""``way(batch)`` returns the positional and keyword arguments of the model."""

# A second parameter with such a name gets the targets of (inputs, targets): that of a loss such as
# torch.nn.CrossEntropyLoss, and of a model that makes the loss itself, such as nanoGPT's
# GPT.forward(idx, targets) or torchvision's detectors. Without targets, these compute less.
TARGETS = frozenset({"target", "targets", "label", "labels", "y"})


def call_model(model: nn.Module, batch: Any, way: Way | None = None) -> Any:
    """Call the model on a batch, in the way that :func:`way_of` chooses if none is given."""
    positional, keywords = (way or way_of(model, batch))(batch)
    try:
        return model(*positional, **keywords)
    except (TypeError, AttributeError, ValueError, AssertionError) as error:
        # If forward accepts the arguments, the error comes from inside the model.
        problem = isinstance(error, TypeError) and refused_call(model.forward, positional, keywords)
        if not problem:
            if remark := _remark_on_inputs(model, positional, batch):
                error.args = (f"{error} ({remark})",)
            raise
        call = ", ".join(f"{name}=..." for name in keywords)
        call = call or ("batch" if positional[0] is batch else "inputs")
        raise StepError(
            f"the model is called as model({call}), which {type(model).__name__}.forward does not "
            f"take ({problem}); give step(model, batch), which calls it and returns the loss. "
            "Try TrainingSetup(model, sample=..., step=...), or find_max_batch(..., step=...), or "
            "(OOMGuard) a module around it whose forward takes the batch"
        ) from error


def as_keywords(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the mapping that the inputs are as keywords."""
    return (), dict(_inputs_of(batch))


def as_one(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs as one argument."""
    return (_inputs_of(batch),), {}


def as_parts(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return all parts of a tuple, each as an argument."""
    return tuple(batch), {}


def way_of(model: nn.Module, batch: Any, *, for_loss: bool = True) -> Way:
    """Choose how a model is called on batches like this one. It takes about 0.1 ms.

    The first that its ``forward`` accepts: a mapping as keywords; a mapping as one argument, if
    ``forward`` knows none of its keys; the inputs of ``(inputs, targets)``, or any other batch, as
    one argument; all parts of a tuple. If the second parameter is named for targets, it gets them.
    A list counts as a tuple, because a DataLoader makes lists of a data set's tuples.

    Unless it is ``for_loss``, targets that are optional are left out.

    Example:
        >>> way_of(nn.Linear(2, 3), ("inputs", "targets"))(("inputs", "targets"))
        (('inputs',), {})
        >>> way_of(nn.Bilinear(2, 3, 4), ("left", "right"))(("left", "right"))
        (('left', 'right'), {})
    """
    forward, inputs = inner_module(model).forward, _inputs_of(batch)
    ways: list[Way] = [as_one]
    if isinstance(inputs, Mapping):
        is_known = not set(inputs).isdisjoint(parameters_taken(forward))
        ways = [as_keywords] if is_known else [as_keywords, as_one]
    if isinstance(batch, tuple | list):
        ways.append(as_parts)
    accepted = [way for way in ways if not refused_call(forward, *way(batch))]
    wants_targets = for_loss and is_pair(batch) and takes_targets(forward)
    if wants_targets and as_one in accepted and as_parts in accepted:
        return as_parts
    return (accepted or ways)[0]


def takes_targets(function: Callable[..., Any]) -> bool:
    """Return True if the second parameter of a function is named for targets.

    Example:
        >>> takes_targets(nn.functional.cross_entropy), takes_targets(lambda output, batch: 0)
        (True, False)
    """
    return any(name in TARGETS for name in [*parameters_taken(function)][1:2])


def is_pair(batch: Any) -> bool:
    """Return True for a batch that may be ``(inputs, targets)``."""
    return isinstance(batch, tuple | list) and len(batch) == 2


def _inputs_of(batch: Any) -> Any:
    return batch[0] if isinstance(batch, tuple | list) and len(batch) in (1, 2) else batch


def _remark_on_inputs(model: nn.Module, positional: Sequence[Any], batch: Any) -> str:
    """Say which part of a batch the model got, if it may want another; else return ""."""
    if not isinstance(batch, tuple | list) or len(positional) != 1:
        return ""
    if positional[0] is batch:
        got = f"all of the batch, a {type(batch).__name__} of {len(batch)}"
        return f"the model got {got}; give step(model, batch) if it takes a part of it"
    if fields := getattr(batch, "_fields", ()):
        # A namedtuple of two parts is the usual pair, but a model may read its fields.
        return (
            f"the model got batch.{fields[0]} alone, the inputs of (inputs, targets). If it takes "
            "the whole batch, try step=lambda model, batch: model(batch), or what makes the loss "
            "of its output"
        )
    if len(batch) == 2 and not refused_call(model.forward, batch, {}):
        return (
            "the model got the first part of the batch alone, the inputs of (inputs, targets). If "
            "it takes both, try step=lambda model, batch: model(*batch), or what makes the loss of "
            "its output"
        )
    return ""
