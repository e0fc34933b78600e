"""Make batches of any size from one example batch."""

from __future__ import annotations

import itertools
import math
import numbers
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from batchfinder.errors import SampleError
from batchfinder.training.setup import MakeBatch, TrainingSetup, refused_call
from batchfinder.training.tree import (
    bytes_in,
    described_shapes,
    map_leaves,
    named_tensors,
    repeat_examples,
)

_PLAIN = (str, bytes, numbers.Number, type(None), PurePath)


class BatchMaker:
    """Makes batches of any size on the host, by repeating the examples of one sample.

    The sample's batch size is the most common size of its tensors at ``batch_dim``. Tensors, NumPy
    arrays and lists of texts of this size are resized. Everything else stays the same, such as a
    mask shared by all examples. The examples repeat in turn, so labels and token ids stay valid.
    Every batch is a fresh copy with the sample's memory format, so a step may write into it.

    Args:
        sample: a batch as the DataLoader yields it, of any size from 1 on, on any device.
        make_batch: ``make_batch(batch_size) -> batch``, used instead of the sample. A second
            positional argument is the number of the step, from 0 on. Then lengths may vary, and
            step 0 must have the longest batch. With a sample, step 0 repeats the sample and
            ``make_batch`` makes the later batches.
        batch_dim: the dimension of the tensors that counts the examples; default 0, the first.

    Attributes:
        batch_size: the sample's; None if ``make_batch`` makes the batch of step 0.
        made: the bytes of the batches that ``make_batch`` has made, by size.
        warnings: names of tensors and lists that are not resized, in case the user expects it.
        varies: the batches of different steps may differ in shape.

    Example:
        >>> maker = BatchMaker((torch.randn(2, 3), torch.tensor([7, 8])))
        >>> inputs, targets = maker.make(5)
        >>> tuple(inputs.shape), targets.tolist()
        ((5, 3), [7, 8, 7, 8, 7])
    """

    def __init__(
        self, sample: Any = None, *, make_batch: MakeBatch | None = None, batch_dim: int = 0
    ) -> None:
        self.batch_dim = batch_dim
        self.batch_size: int | None = None
        self.made: dict[int, int] = {}
        self.warnings: list[str] = []
        self.varies = make_batch is not None and _takes_step(make_batch)
        self._make_batch = make_batch
        self._checked = False
        if make_batch is None or (self.varies and sample is not None):
            self._sample = map_leaves(_on_host, sample)
            self.batch_size = common_size(self._sample, batch_dim)
            self._warn_of_others()

    @classmethod
    def of(cls, setup: TrainingSetup, batch_dim: int) -> BatchMaker:
        """Return a maker of the batches of a setup."""
        return cls(setup.sample, make_batch=setup.make_batch, batch_dim=batch_dim)

    def make(self, batch_size: int, most_elements: int | None = None, *, step: int = 0) -> Any:
        """Make a fresh batch on the host. Only the batch itself is allocated.

        Args:
            batch_size: the number of examples, at least 1.
            most_elements: the most elements of a tensor with data. Larger ones are on the meta
                device, unless ``make_batch`` made them. None: all have data.
            step: the number of the step, for a ``make_batch`` that takes it.
        """
        if self._make_batch is None or (self.batch_size is not None and step == 0):
            return map_leaves(
                lambda _, leaf: self._resized(leaf, batch_size, most_elements),
                self._sample,
                is_leaf=is_flat,
            )
        batch = self._made(batch_size, step)
        if not self._checked:
            self._check_made(batch, batch_size, step)
            self._checked = True
        self.made[batch_size] = max(self.made.get(batch_size, 0), bytes_in(batch))
        return batch

    def _made(self, batch_size: int, step: int) -> Any:
        assert self._make_batch is not None
        return self._make_batch(batch_size, step) if self.varies else self._make_batch(batch_size)

    def _warn_of_others(self) -> None:
        sizes = [(name, x, size_at(x, self.batch_dim)) for name, x in named_tensors(self._sample)]
        # A scalar has no size, and a tensor of size 1 suits every batch.
        others = [(name, x) for name, x, size in sizes if size not in (None, 1, self.batch_size)]
        kept = [described_shapes(others)] if others else []
        kept += unclear_parts(self._sample, self.batch_size or 0)
        if kept:
            self.warnings.append(
                f"the sample's batch size is taken to be {self.batch_size}, so this stays as it is "
                f"in every batch: {', '.join(kept)}; if it should grow with the batch, give "
                "make_batch(batch_size)"
            )

    def _resized(self, leaf: Any, batch_size: int, most_elements: int | None) -> Any:
        if is_array(leaf) and size_at(leaf, self.batch_dim) == self.batch_size:
            return leaf.take(range(batch_size), axis=self.batch_dim, mode="wrap")
        if is_flat(leaf):
            is_resized = is_texts(leaf) and len(leaf) == self.batch_size
            length = batch_size if is_resized else len(leaf)
            return type(leaf)(itertools.islice(itertools.cycle(leaf), length))
        if not isinstance(leaf, Tensor):
            return leaf
        if size_at(leaf, self.batch_dim) != self.batch_size:
            return leaf.clone()
        elements = leaf.numel() // (self.batch_size or 1) * batch_size
        if most_elements is not None and elements > most_elements:
            leaf = leaf.to("meta")
        return repeat_examples(leaf, self.batch_dim, batch_size)

    def _check_made(self, batch: Any, batch_size: int, step: int) -> None:
        """Refuse a ``make_batch`` that ignores the size, because every size would seem to fit."""
        if batch is None:
            raise SampleError(f"make_batch({batch_size}) returned None; it must return a batch")
        tensors = named_tensors(batch)
        # A batch without tensors is an object of an unknown kind, such as a batch of graphs.
        if not tensors or any(size_at(x, self.batch_dim) == batch_size for _, x in tensors):
            return
        # Packed data may have no tensor of this size, but their shapes still depend on it.
        other_size = batch_size // 2 or 2
        others = named_tensors(self._made(other_size, step))
        if [(path, x.shape) for path, x in others] == [(path, x.shape) for path, x in tensors]:
            raise SampleError(
                f"make_batch({batch_size}) and make_batch({other_size}) returned the same shapes: "
                f"{described_shapes(tensors)}; make_batch must return a batch of the size asked for"
            )


def _takes_step(make_batch: Callable[..., Any]) -> bool:
    """Return True if ``make_batch`` requires a second positional argument."""
    needs_more = refused_call(make_batch, (1,), {})
    return bool(needs_more) and not refused_call(make_batch, (1, 0), {})


def move_batch(batch: Any, device: torch.device | str) -> Any:
    """Move all tensors of a batch to a device, as a training loop does.

    Objects of another kind, such as a batch of graphs, move by their method ``to(device)``.
    """

    def move(_: str, leaf: Any) -> Any:
        # A class in the batch may have a method "to" as well, but it is no object to move.
        if isinstance(leaf, type) or not callable(getattr(leaf, "to", None)):
            return leaf
        moved = leaf.to(device)
        return leaf if moved is None else moved  # some objects move in place and return None

    return map_leaves(move, batch)


def _on_host(path: str, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        if _holds_tensors(leaf):
            raise SampleError(
                f"sample{path} is a {type(leaf).__name__}, which cannot be made larger or smaller; "
                "give make_batch(batch_size), which returns a batch of that size"
            )
        return leaf
    if leaf.layout != torch.strided or leaf.is_nested or leaf.is_meta:
        kind = "nested" if leaf.is_nested else "meta" if leaf.is_meta else "sparse"
        raise SampleError(
            f"sample{path} is a {kind} tensor, whose examples cannot be repeated; "
            "give make_batch(batch_size), which returns a batch of that size"
        )
    return leaf.detach().cpu()


def _holds_tensors(leaf: Any) -> bool:
    """Return True if an object that is no known container holds tensors."""
    held = leaf if isinstance(leaf, list | tuple) else getattr(leaf, "__dict__", {}).values()
    return any(isinstance(value, Tensor) for value in held)


def is_array(leaf: Any) -> bool:
    """Return True for an array of NumPy. NumPy is not imported here."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(leaf, numpy.ndarray)


def _is_list(node: Any) -> bool:
    """Return True for a list without tensors: of numbers, texts, paths, None, or dicts of these."""
    return type(node) in (list, tuple) and all(
        isinstance(entry, _PLAIN) or (isinstance(entry, Mapping) and not named_tensors(entry))
        for entry in node
    )


def is_flat(node: Any) -> bool:
    """Return True for a list without tensors, arrays and inner containers."""
    return type(node) in (list, tuple) and all(isinstance(entry, _PLAIN) for entry in node)


def is_texts(node: Any) -> bool:
    """Return True for a list of texts: a DataLoader cannot stack texts, so it makes a list."""
    return all(isinstance(entry, str | bytes) for entry in node)


def unclear_parts(batch: Any, batch_size: int) -> list[str]:
    """Name the lists and objects that may be about each example, yet are taken as they are.

    A list of numbers may also be the height and width of images in a batch of 2.
    """
    unclear = []

    def note(name: str, leaf: Any) -> None:
        if _is_list(leaf) and not is_texts(leaf) and 1 < len(leaf) == batch_size:
            unclear.append(f"sample{name}, a {type(leaf).__name__} of {len(leaf)}")
        elif not isinstance(leaf, Tensor) and _holds_tensors(leaf):  # a PackedSequence, or graphs
            unclear.append(f"sample{name}, a {type(leaf).__name__}")

    map_leaves(note, batch, is_leaf=_is_list)
    return unclear


def size_at(tensor: Any, dim: int) -> int | None:
    """Return a tensor's or an array's size at a dimension; None if it has no such dimension."""
    shape = tensor.shape
    return shape[dim] if -len(shape) <= dim < len(shape) else None


def common_size(sample: Any, batch_dim: int) -> int:
    """Return the batch size of a batch: the most common size of its tensors at ``batch_dim``."""
    tensors = named_tensors(sample)
    if not tensors:
        raise SampleError(
            f"the sample, of type {type(sample).__name__}, holds no tensors; give a batch as your "
            "DataLoader yields it. Try next(iter(loader)), torch.from_numpy for an array, "
            "make_batch= for a function, or the loader itself, as for graphs: loader= in Python, "
            "--loader FILE.py:FUNCTION"
        )
    sizes = Counter(size for _, x in tensors if (size := size_at(x, batch_dim)) is not None)
    if not sizes:
        raise SampleError(
            f"no tensor of the sample has a dimension {batch_dim} that could count the examples: "
            f"{described_shapes(tensors)}; give a batch, not one example"
        )
    (size, count), *others = sizes.most_common(2)
    if others and _has_dicts_in_a_list(sample):
        raise SampleError(
            f"the sample has a list of dicts whose tensors disagree about the batch size "
            f"({described_shapes(tensors)}): if it has one for each example, give your loader "
            "instead, or make_batch(batch_size), which returns a batch of that size"
        )
    if others and others[0][1] == count:
        raise SampleError(
            f"the sample's tensors disagree about the batch size: {size} or {others[0][0]}? "
            f"({described_shapes(tensors)}); set batch_dim (in Python) if their dimension "
            f"{batch_dim} does not count the examples, else give your loader instead, or "
            "make_batch(batch_size), which returns a batch of that size"
        )
    if size == 0 or not any(math.prod(x.shape) for _, x in tensors):
        shapes = described_shapes(tensors)
        raise SampleError(f"the sample is empty: {shapes}; give at least one example with data")
    return size


def _has_dicts_in_a_list(tree: Any) -> bool:
    """Return True if a list in the tree may have one dict per example, as detection models use."""
    if isinstance(tree, Mapping):
        return any(map(_has_dicts_in_a_list, tree.values()))
    if not isinstance(tree, list | tuple):
        return False
    are_dicts = bool(tree) and all(isinstance(entry, Mapping) for entry in tree)
    return are_dicts or any(map(_has_dicts_in_a_list, tree))
