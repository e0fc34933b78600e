"""Batches are trees: tuples, dicts, dataclasses ... with tensors at their leaves."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree


def map_leaves(
    function: Callable[[str, Any], Any],
    tree: Any,
    path: str = "",
    *,
    is_leaf: Callable[[Any], bool] = lambda _: False,
) -> Any:
    """Make a tree of the same shape from what a function returns for each leaf.

    Containers are all that ``torch.utils._pytree`` knows (tuple, list, dict, namedtuple, deque and
    what the user registered there), any other ``Mapping`` (``transformers.BatchEncoding``) and
    dataclasses. Everything else is a leaf. Containers are rebuilt, never changed, and nothing is
    registered: the user's own pytrees behave as before.

    Args:
        function: ``function(path, leaf) -> new leaf``; the path reads as Python would
            reach the leaf: ``[0]['input_ids']``, ``.mask``.
        tree: any batch.
        path: where the tree itself is.
        is_leaf: which containers are leaves as well.

    Returns:
        The new tree.

    Example:
        >>> map_leaves(lambda path, leaf: f"{path}={leaf}", {"a": 1, "b": (2, 3)})
        {'a': "['a']=1", 'b': ("['b'][0]=2", "['b'][1]=3")}
    """
    if isinstance(tree, Tensor | PackedSequence) or is_leaf(tree):
        # Some releases of torch take a PackedSequence for a namedtuple; it has to stay whole, as
        # one of its tensors must never leave the host.
        return function(path, tree)

    # By its id: tree_flatten leaves the function in a cycle, in which the tree would stay alive.
    root = id(tree)
    children, spec = _pytree.tree_flatten(tree, is_leaf=lambda node: id(node) != root)
    if not (len(children) == 1 and children[0] is tree):
        names = _child_names(tree, len(children))
        return _pytree.tree_unflatten(
            [
                map_leaves(function, child, path + name, is_leaf=is_leaf)
                for name, child in zip(names, children, strict=True)
            ],
            spec,
        )
    if isinstance(tree, Mapping):
        mapped = {
            key: map_leaves(function, value, f"{path}[{key!r}]", is_leaf=is_leaf)
            for key, value in tree.items()
        }
        return _with_items(tree, mapped)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        # A copy with its fields replaced also serves frozen ones, and runs no __post_init__ twice.
        clone = copy.copy(tree)
        for field in dataclasses.fields(tree):
            path_of_field = f"{path}.{field.name}"
            value = map_leaves(function, getattr(tree, field.name), path_of_field, is_leaf=is_leaf)
            object.__setattr__(clone, field.name, value)
        return clone
    return function(path, tree)


def named_tensors(tree: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a tree with their paths, in order.

    Example:
        >>> import torch
        >>> [(path, tuple(x.shape)) for path, x in named_tensors({"x": torch.zeros(2, 3), "n": 1})]
        [("['x']", (2, 3))]
    """
    found = []

    def note(path: str, leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            found.append((path, leaf))

    map_leaves(note, tree)
    return found


def described_shapes(tensors: list[tuple[str, Tensor]], limit: int = 6) -> str:
    """The shapes of a sample's tensors as text.

    Args:
        tensors: with their paths.
        limit: the most that are shown.

    Example:
        >>> import torch
        >>> described_shapes(named_tensors({"x": torch.zeros(2, 3)}))
        "sample['x'] [2, 3]"
    """
    shown = [f"sample{path} {list(tensor.shape)}" for path, tensor in tensors[:limit]]
    return ", ".join(shown) + (", ..." if len(tensors) > limit else "")


def _child_names(tree: Any, count: int) -> list[str]:
    if isinstance(tree, Mapping) and len(tree) == count:
        return [f"[{key!r}]" for key in tree]
    fields = getattr(tree, "_fields", ())
    if len(fields) == count:
        return [f".{field}" for field in fields]
    return [f"[{index}]" for index in range(count)]


def _with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if not isinstance(mapping, MutableMapping):
        return type(mapping)(items)  # type: ignore[call-arg]
    # A copy keeps what else the object carries, such as the encodings of a BatchEncoding.
    clone = copy.copy(mapping)
    clone.update(items)
    return clone


def repeat_examples(examples: Tensor, dim: int, batch_size: int) -> Tensor:
    """Repeat examples in turn, up to a batch size, in the memory format they have."""
    dim %= examples.dim()
    sizes = [*examples.shape]
    sizes[dim] = batch_size
    # The strides of a dense tensor of this kind; those of an expanded one would mean overlaps.
    strides = torch.empty_like(examples, device="meta").stride()
    # Outermost first. A dimension of size 1 has no place of its own, so among equals it goes
    # inside: channels_last images of one channel stay so.
    order = sorted(
        range(len(sizes)), key=lambda d: (-strides[d], d != dim and examples.shape[d] == 1)
    )
    batch = torch.empty([sizes[d] for d in order], dtype=examples.dtype, device=examples.device)
    batch = batch.permute([order.index(d) for d in range(len(sizes))])

    # Doubling what is there already takes few copies for any size, and no index tensor.
    filled = min(examples.shape[dim], batch_size)
    batch.narrow(dim, 0, filled).copy_(examples.narrow(dim, 0, filled))
    while filled < batch_size:
        more = min(filled, batch_size - filled)
        batch.narrow(dim, filled, more).copy_(batch.narrow(dim, 0, more))
        filled += more
    return batch
