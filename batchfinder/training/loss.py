"""The loss of a step: from the user's ``loss_fn``, the model's output, or the targets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own name for it
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from batchfinder.errors import StepError
from batchfinder.training.parallel import inner_module
from batchfinder.training.setup import LossFunction, refused_call

# A second parameter with such a name gets the targets of (inputs, targets): that of a loss such as
# torch.nn.CrossEntropyLoss, and of a model that makes the loss itself, such as nanoGPT's
# GPT.forward(idx, targets) or torchvision's detectors. Without targets, these compute less.
TARGETS = frozenset({"target", "targets", "label", "labels", "y"})

MEAN_LOSS_WARNING = (
    "the loss is the mean of the model's outputs, because the batch has no targets that fit them. "
    "A real loss may need more memory. Try a sample (inputs, targets) or one with labels, or "
    "loss_fn(output, batch)"
)


def call_model(model: nn.Module, batch: Any, *, for_loss: bool = True) -> Any:
    """Call the model on a batch, with the arguments that :func:`arguments_of` chooses."""
    positional, keywords = arguments_of(model, batch, for_loss=for_loss)
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
            "Try TrainingSetup(model, sample=..., step=...), or find_max_batch(..., step=...)"
        ) from error


def arguments_of(
    model: nn.Module, batch: Any, *, for_loss: bool = True
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments with which a model is called on a batch.

    The first that its ``forward`` accepts: a mapping as keywords; a mapping as one argument, if
    ``forward`` knows none of its keys; the inputs of ``(inputs, targets)``, or any other batch, as
    one argument; all parts of a tuple. The targets are added if the second parameter is named for
    them. A list counts as a tuple, because a DataLoader makes lists of a data set's tuples.

    Args:
        model: the model.
        batch: a batch of the sample's structure.
        for_loss: False if no loss is wanted: then targets that are optional are left out.

    Example:
        >>> arguments_of(nn.Linear(2, 3), ("inputs", "targets"))
        (('inputs',), {})
        >>> arguments_of(nn.Bilinear(2, 3, 4), ("left", "right"))
        (('left', 'right'), {})
    """
    forward = inner_module(model).forward
    is_tuple = isinstance(batch, tuple | list)
    inputs = batch[0] if is_tuple and len(batch) in (1, 2) else batch
    ways: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((inputs,), {})]
    if isinstance(inputs, Mapping):
        ways.insert(0, ((), dict(inputs)))
        if not set(inputs).isdisjoint(_parameters_of(forward)):
            del ways[1]
    if is_tuple:
        ways.append((tuple(batch), {}))
    positional, keywords = next((way for way in ways if not refused_call(forward, *way)), ways[0])
    wants_targets = for_loss and len(positional) == 1 and takes_targets(forward)
    if wants_targets and _is_pair(batch) and not refused_call(forward, batch, {}):
        positional = tuple(batch)
    return positional, keywords


def takes_targets(function: Callable[..., Any]) -> bool:
    """Return True if the second parameter of a function is named for targets.

    Example:
        >>> takes_targets(F.cross_entropy), takes_targets(lambda output, batch: 0)
        (True, False)
    """
    return any(name in TARGETS for name in _parameters_of(function)[1:2])


def _parameters_of(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # compiled and built-in functions may have none
        return []


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


def call_loss(loss_fn: LossFunction, output: Any, batch: Any) -> Tensor:
    """Call the user's loss function on the batch; on the targets if it is named for them.

    An error says what it got.
    """
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    if _is_pair(batch) and takes_targets(function):
        return loss_fn(output, batch[1])
    try:
        return loss_fn(output, batch)
    except (TypeError, AttributeError) as error:
        if isinstance(batch, tuple | list):
            error.args = (
                f"{error} (loss_fn got the output and all of the batch, a {type(batch).__name__} "
                f"of {len(batch)}; if it takes the targets alone, give "
                "loss_fn=lambda output, batch: loss(output, batch[1]))",
            )
        raise
    except (IndexError, KeyError) as error:
        if isinstance(batch, Tensor):
            error.args = (
                f"{error} (loss_fn got the output and the batch, which is one tensor without "
                "targets. Try to return model, (inputs, targets) from the target)",
            )
        elif isinstance(batch, Mapping):
            error.args = (f"{error} (the batch that loss_fn got has the keys {', '.join(batch)})",)
        raise


def default_loss(
    output: Any, batch: Any, *, model_got_all: bool = False
) -> tuple[Tensor, str | None]:
    """Return the loss of an output.

    The first that applies: the output's own ``loss``; a scalar output; the scalar in the output of
    a model that got all of the batch, or the sum if all are scalars; cross-entropy or mean squared
    error with the targets of ``(inputs, targets)``, chosen by their dtype and shape; the mean of
    all floating-point and complex outputs.

    Args:
        output: the model's output.
        batch: the batch that it came from.
        model_got_all: True if the model got more than the inputs (:func:`arguments_of`).

    Returns:
        The loss, and a warning if it is that mean, which is no loss to train with; else None.
    """
    own = own_loss(output)
    if own is not None:
        return own.mean(), None
    # Only a tensor without dimensions. For a batch of one example, an output of shape [1] is no
    # loss.
    if _is_scalar(output):
        return output, None
    # Without the targets, it may be a regularization term, such as that of a mixture of experts.
    if model_got_all and (loss := _loss_among(output)) is not None:
        return loss, None
    if _is_pair(batch) and isinstance(batch[1], Tensor):
        prediction = _prediction(output)
        if prediction is not None:
            loss = _loss_of_targets(prediction, batch[1])
            if loss is not None:
                return loss, None
    floating = [
        torch.view_as_real(leaf) if leaf.is_complex() else leaf
        for leaf in tree_leaves(_plain(output))
        if isinstance(leaf, Tensor)
        and (leaf.is_floating_point() or leaf.is_complex())
        and leaf.requires_grad
    ]
    if not floating:
        return torch.zeros(()), MEAN_LOSS_WARNING
    return torch.stack([leaf.float().mean() for leaf in floating]).mean(), MEAN_LOSS_WARNING


def own_loss(output: Any) -> Tensor | None:
    """Return the ``loss`` that an output carries; None if it has none."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return own if isinstance(own, Tensor) else None


def _is_scalar(output: Any) -> bool:
    return isinstance(output, Tensor) and output.dim() == 0 and output.is_floating_point()


def _loss_among(output: Any) -> Tensor | None:
    """Return the first scalar of an output, or the sum if all of it are scalars; else None."""
    parts = output.values() if isinstance(output, Mapping) else output
    if not isinstance(output, Mapping | tuple | list):
        return None
    scalars: list[Tensor] = [part for part in parts if _is_scalar(part)]
    if scalars and len(scalars) == len(parts):
        return torch.stack(scalars).sum()
    return scalars[0] if scalars else None


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, tuple | list) and len(batch) == 2


def _plain(output: Any) -> Any:
    # Model outputs of Transformers are mappings. pytree knows them only once they are imported.
    return dict(output) if isinstance(output, Mapping) else output


def _prediction(output: Any) -> Tensor | None:
    """Return the tensor to compare with the targets: the output, its logits or first tensor."""
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else None
    logits = logits if logits is not None else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    return next((leaf for leaf in tree_leaves(_plain(output)) if isinstance(leaf, Tensor)), None)


def _loss_of_targets(prediction: Tensor, targets: Tensor) -> Tensor | None:
    """Return cross-entropy for labels, mean squared error for values; None if neither fits."""
    if not prediction.is_floating_point():
        return None
    if targets.is_floating_point():
        if prediction.numel() == targets.numel():
            return F.mse_loss(prediction.reshape(targets.shape), targets)
        return None
    if prediction.numel() == targets.numel():  # one logit for each label of 0 or 1
        labels = targets.to(prediction.dtype)
        return F.binary_cross_entropy_with_logits(prediction.reshape(targets.shape), labels)
    if prediction.dim() != targets.dim() + 1:
        return None
    if prediction.shape[:1] + prediction.shape[2:] == targets.shape:
        return F.cross_entropy(prediction, targets.long())
    if prediction.shape[:-1] == targets.shape:  # a language model: the classes come last
        return F.cross_entropy(prediction.flatten(0, -2), targets.flatten().long())
    return None
