"""The loss of a step: from the user's ``loss_fn``, the model's output, or the targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own name for it
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from batchfinder.training.calling import is_pair, takes_targets
from batchfinder.training.setup import LossFunction

MEAN_LOSS_WARNING = (
    "the loss is the mean of the model's outputs, because the batch has no targets that fit them. "
    "A real loss may need more memory. Try a sample (inputs, targets) or one with labels, or "
    "loss_fn(output, batch)"
)


def caller_of(loss_fn: LossFunction) -> LossFunction:
    """Return a function that calls the user's loss function as it wants to be called.

    It gets the batch; the targets alone if its second parameter is named for them. An error says
    what it got.

    Example:
        >>> loss = caller_of(torch.nn.MSELoss())
        >>> loss(torch.ones(2), ("inputs", torch.zeros(2))).item()
        1.0
    """
    of_targets = takes_targets(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn)

    def call(output: Any, batch: Any) -> Tensor:
        if of_targets and is_pair(batch):
            return loss_fn(output, batch[1])
        try:
            return loss_fn(output, batch)
        except (TypeError, AttributeError) as error:
            if isinstance(batch, tuple | list):
                error.args = (
                    f"{error} (loss_fn got the output and all of the batch, a "
                    f"{type(batch).__name__} of {len(batch)}; if it takes the targets alone, give "
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
                error.args = (
                    f"{error} (the batch that loss_fn got has the keys {', '.join(batch)})",
                )
            raise

    return call


def default_loss(
    output: Any, batch: Any, *, model_got_all: bool = False
) -> tuple[Tensor, str | None]:
    """Return the loss of an output.

    The first that applies: the output's own ``loss``; a scalar output; the scalar in the output of
    a model that got all of the batch (``way_of``), or the sum if all are scalars; cross-entropy or
    mean squared error with the targets of ``(inputs, targets)``, chosen by their dtype and shape;
    the mean of all floating-point and complex outputs.

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
    if is_pair(batch) and isinstance(batch[1], Tensor):
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
