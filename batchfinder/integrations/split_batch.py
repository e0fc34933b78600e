"""Split a batch into parts, each with its share of what the loss is the mean of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from batchfinder.errors import DeviceError, SampleError
from batchfinder.training.parallel import unwrapped
from batchfinder.training.sample import common_size, is_array, is_flat, is_texts, size_at
from batchfinder.training.setup import LossFunction
from batchfinder.training.tree import described_shapes, map_leaves, named_tensors

# The loss leaves out tokens with this label.
IGNORED = -100
# What a model's ``loss_type`` says of the loss: the label of a token is that of the one before it,
# or its own. None stands for a model without a type, such as GPT-2, whose loss is the first kind's.
OF_NEXT_TOKENS = (None, "ForCausalLM", "ForConditionalGeneration")
OF_TOKENS = ("ForMaskedLM", "ForTokenClassification")


def split_batch(
    batch: Any, size: int, batch_dim: int = 0, weigh: Callable[[Any], int] = lambda _: 0
) -> Iterator[tuple[Any, float]]:
    """Split a batch into parts of nearly equal size.

    Args:
        batch: any tree of tensors, or lists with one entry for each example, as detection models
            take them. Leaves without the batch dimension go into each part whole.
        size: the most examples in a part, at least 1.
        batch_dim: index of the batch dimension.
        weigh: returns what the loss of a batch or part is the mean of. Default, also where it
            returns 0 for the batch: the examples.

    Yields:
        Each part that weighs anything, a view of the batch, with its share of the weight.

    Raises:
        DeviceError: the batch's tensors do not agree about its size.

    Example:
        >>> import torch
        >>> [(part.tolist(), share) for part, share in split_batch(torch.arange(4), 2)]
        [([0, 1], 0.5), ([2, 3], 0.5)]
    """
    lists = _lists_of_examples(batch, batch_dim)
    if (len(lists[0]) if lists else largest_size(batch, batch_dim)) <= size:
        yield batch, 1.0
        return
    examples = examples_in(batch, batch_dim)
    parts, weight = -(-examples // size), weigh(batch)
    of_examples = {*map(id, lists)}

    def is_whole(node: Any) -> bool:
        return is_flat(node) or id(node) in of_examples

    for index in range(parts):
        start, end = index * examples // parts, (index + 1) * examples // parts

        def cut(_: str, leaf: Any, span: slice = slice(start, end)) -> Any:
            if is_whole(leaf):
                is_cut = id(leaf) in of_examples or (is_texts(leaf) and len(leaf) == examples)
                return leaf[span] if is_cut else leaf
            is_data = isinstance(leaf, Tensor) or is_array(leaf)
            if not is_data or size_at(leaf, batch_dim) != examples:
                return leaf
            return leaf[(slice(None),) * (batch_dim % leaf.ndim) + (span,)]

        part = map_leaves(cut, batch, is_leaf=is_whole)
        if share := weigh(part) / weight if weight else (end - start) / examples:
            yield part, share


def examples_in(batch: Any, batch_dim: int) -> int:
    """Return the number of examples in a batch.

    Raises:
        DeviceError: the batch's tensors do not agree about it.
    """
    lists = _lists_of_examples(batch, batch_dim)
    try:
        return len(lists[0]) if lists else common_size(batch, batch_dim)
    except SampleError as error:
        raise DeviceError(
            "a batch ran out of memory and cannot be split, as its tensors disagree about its "
            f"size: {described_shapes(named_tensors(batch))}. Try a smaller batch size"
        ) from error.__context__


def _lists_of_examples(batch: Any, batch_dim: int) -> list[Sequence[Any]]:
    """Return the lists of a batch if they have an entry for each example, some a dict; else none.

    A list whose tensors all have as many examples as it has entries holds parts of a batch.
    """
    if not isinstance(batch, Mapping | list | tuple):
        return []
    entries = [*(batch.values() if isinstance(batch, Mapping) else batch)]
    lists = [entry for entry in entries if type(entry) in (list, tuple)]
    tensors = [entry for entry in entries if isinstance(entry, Tensor)]
    lengths = {*map(len, lists), *(size_at(tensor, batch_dim) for tensor in tensors)}
    has_dicts = any(isinstance(each, Mapping) for each in itertools.chain(*lists))
    if not has_dicts or len(lengths) > 1 or len(lists) + len(tensors) < len(entries):
        return []
    return lists if {size_at(x, batch_dim) for _, x in named_tensors(lists)} != lengths else []


def largest_size(batch: Any, batch_dim: int) -> int:
    """Return the largest size of any tensor at ``batch_dim``: no batch has more examples."""
    sizes = [x.shape[batch_dim] for _, x in named_tensors(batch) if x.dim() > batch_dim]
    return max(sizes, default=1)


def tokens_in(model: nn.Module, loss_fn: LossFunction | None, batch: Any) -> int:
    """Return the tokens of a batch whose loss counts; 0 if it is not the model's mean over tokens.

    Source: ``loss/loss_utils.py`` of Transformers. Encoder-decoder models shift their inputs
    instead of the labels.
    """
    model = unwrapped(model)
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    is_own = loss_fn is None and hasattr(model, "loss_type")
    if not is_own or not isinstance(labels, Tensor) or labels.dim() != 2:
        return 0
    kind, config = model.loss_type, getattr(model, "config", None)
    if kind in OF_NEXT_TOKENS:
        if not getattr(config, "is_encoder_decoder", False):
            labels = labels[:, 1:]
    elif kind not in OF_TOKENS:
        return 0
    return int((labels != IGNORED).sum())
