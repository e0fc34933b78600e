"""Walk batches as trees: tuples, dicts, dataclasses and so on, with tensors at their leaves."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

from batchfinder.training.user_traceback import mark

_MOST_SHOWN = 6  # tensors in a message
_SHAPES = re.compile(r"\b(shapes?|sizes?|dim|dimensions?|channels)\b|Expected \d")


def map_leaves(
    function: Callable[[str, Any], Any],
    tree: Any,
    path: str = "",
    *,
    is_leaf: Callable[[Any], bool] = lambda _: False,
) -> Any:
    """Apply a function to each leaf and return a new tree of the same structure.

    Containers are everything that ``torch.utils._pytree`` knows (tuple, list, dict, namedtuple,
    deque and the user's registered classes), any other ``Mapping`` (``transformers.BatchEncoding``)
    and dataclasses. Everything else is a leaf. Containers are rebuilt, never changed. Nothing is
    registered, so the user's own pytrees behave as before.

    Args:
        function: ``function(path, leaf) -> new leaf``. The path is the Python text that leads to
            the leaf, such as ``[0]['input_ids']`` or ``.mask``.
        tree: any batch.
        path: the path of the tree itself.
        is_leaf: returns True for containers that count as leaves.

    Example:
        >>> map_leaves(lambda path, leaf: f"{path}={leaf}", {"a": 1, "b": (2, 3)})
        {'a': "['a']=1", 'b': ("['b'][0]=2", "['b'][1]=3")}
    """
    if isinstance(tree, Tensor | PackedSequence) or is_leaf(tree):
        # Some releases of torch take a PackedSequence for a namedtuple. It must stay whole, because
        # one of its tensors must never leave the host.
        return function(path, tree)

    def mapped(child: Any, name: str) -> Any:
        return map_leaves(function, child, path + name, is_leaf=is_leaf)

    # Compare by id: tree_flatten leaves the function in a cycle, which would keep the tree alive.
    root = id(tree)
    children, spec = _pytree.tree_flatten(tree, is_leaf=lambda node: id(node) != root)
    if not (len(children) == 1 and children[0] is tree):
        names = _child_names(tree, len(children))
        return _pytree.tree_unflatten(map(mapped, children, names), spec)
    if isinstance(tree, Mapping):
        return _with_items(tree, {key: mapped(item, f"[{key!r}]") for key, item in tree.items()})
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        # Replace the fields of a copy: this works for frozen dataclasses, without __post_init__.
        clone = copy.copy(tree)
        for field in dataclasses.fields(tree):
            value = mapped(getattr(tree, field.name), f".{field.name}")
            object.__setattr__(clone, field.name, value)
        return clone
    return function(path, tree)


def named_tensors(tree: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of a tree with their paths, in order.

    Example:
        >>> import torch
        >>> [(path, tuple(x.shape)) for path, x in named_tensors({"x": torch.zeros(2, 3), "n": 1})]
        [("['x']", (2, 3))]
    """
    return [(path, leaf) for path, leaf in named_leaves(tree) if isinstance(leaf, Tensor)]


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a tree with their paths, in order."""
    found: list[tuple[str, Any]] = []
    map_leaves(lambda path, leaf: found.append((path, leaf)), tree)
    return found


def elements_in(tree: Any) -> dict[str, int]:
    """Return the number of elements of each tensor in a tree, by its path.

    Example:
        >>> elements_in({"x": torch.zeros(2, 3), "n": 1})
        {"['x']": 6}
    """
    return {path: tensor.numel() for path, tensor in named_tensors(tree)}


def bytes_in(tree: Any) -> int:
    """Return the bytes of all tensors in a tree.

    Example:
        >>> bytes_in({"x": torch.zeros(2, 3), "y": torch.zeros(2).to_sparse()})
        24
    """
    return sum(_bytes_of(tensor) for _, tensor in named_tensors(tree))


def _bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor; of a sparse one, those of its values and their places."""
    if tensor.layout in (torch.strided, torch.jagged):
        return tensor.nbytes
    return tensor._nnz() * (tensor.element_size() + 8 * tensor.sparse_dim())


def described_shapes(tensors: list[tuple[str, Tensor]]) -> str:
    """Return the shapes of a sample's tensors as text.

    Example:
        >>> import torch
        >>> described_shapes(named_tensors({"x": torch.zeros(2, 3)}))
        "sample['x'] [2, 3]"
    """
    shown = [f"sample{path} {list(tensor.shape)}" for path, tensor in tensors[:_MOST_SHOWN]]
    return ", ".join(shown) + (", ..." if len(tensors) > _MOST_SHOWN else "")


@contextmanager
def shapes_named(batch: Any) -> Iterator[None]:
    """Mark an error about shapes with those of the batch: a sample may lack the batch dimension."""
    try:
        yield
    except RuntimeError as error:
        if _SHAPES.search(str(error)) and (tensors := named_tensors(batch)):
            shapes = described_shapes(tensors)
            doing = f"the step ran on {shapes}. If the sample is one example, try tensor[None]"
            if len({x.shape[0] for _, x in tensors if x.dim() and len(x) != 1}) > 1:
                doing += ". If parts of another size should grow, give make_batch(batch_size)"
            mark(error, doing)
        raise


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
    # A copy keeps the object's other attributes, such as the encodings of a BatchEncoding.
    try:
        clone = copy.copy(mapping)
    except KeyError:  # Python 3.10 takes a key for a method, if attributes are keys
        clone = type(mapping)()
    clone.update(items)
    return clone


def repeat_examples(examples: Tensor, dim: int, batch_size: int) -> Tensor:
    """Repeat examples in turn up to a batch size, and keep their memory format."""
    dim %= examples.dim()
    sizes = [*examples.shape]
    sizes[dim] = batch_size
    # Use the strides of a dense tensor: an expanded tensor has strides that make it overlap.
    strides = torch.empty_like(examples, device="meta").stride()
    # Outermost dimension first. At equal strides, a dimension of size 1 goes inside (except the
    # batch dimension): its stride has no meaning. So images of one channel stay channels_last.
    order = sorted(
        range(len(sizes)), key=lambda d: (-strides[d], d != dim and examples.shape[d] == 1)
    )
    batch = torch.empty([sizes[d] for d in order], dtype=examples.dtype, device=examples.device)
    batch = batch.permute([order.index(d) for d in range(len(sizes))])

    # Doubling the filled part needs few copies for any size, and no index tensor.
    filled = min(examples.shape[dim], batch_size)
    batch.narrow(dim, 0, filled).copy_(examples.narrow(dim, 0, filled))
    while filled < batch_size:
        more = min(filled, batch_size - filled)
        batch.narrow(dim, filled, more).copy_(batch.narrow(dim, 0, more))
        filled += more
    return batch
