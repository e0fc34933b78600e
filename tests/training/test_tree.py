from __future__ import annotations

import gc
import types
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils import _pytree

from batchfinder.training.tree import map_leaves, named_tensors


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Batch:
    inputs: Any
    targets: Any = None
    made: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.made.append("made")


@dataclass(frozen=True)
class FrozenBatch:
    inputs: Any


@dataclass(frozen=True, slots=True)
class SlottedBatch:
    inputs: Any


class AttributeDict(UserDict[str, Any]):
    note = "none"


class OwnDict(dict[str, Any]):
    note = "none"


LEAVES = st.integers() | st.text(max_size=3) | st.none() | st.booleans()
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(UserDict)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OwnDict)
        | st.builds(Pair, inner, inner)
        | st.builds(FrozenBatch, inner)
        | st.builds(Batch, inner, inner)
    ),
    max_leaves=12,
)


@given(TREES)
def test_mapping_nothing_gives_an_equal_tree_of_the_same_types(tree: Any) -> None:
    mapped = map_leaves(lambda _, leaf: leaf, tree)
    assert mapped == tree
    assert type(mapped) is type(tree)


@given(TREES)
def test_paths_read_as_python_reaches_the_leaves(tree: Any) -> None:
    leaves: dict[str, Any] = {}
    map_leaves(leaves.__setitem__, tree)
    for path, leaf in leaves.items():
        assert eval(f"tree{path}", {"tree": tree}) is leaf


@given(TREES)
def test_the_tree_itself_stays_as_it_is(tree: Any) -> None:
    before = repr(tree)
    map_leaves(lambda path, _: path, tree)
    assert repr(tree) == before


@pytest.mark.parametrize(
    ("tree", "mapped"),
    [
        ([1, 2], [2, 3]),
        (Pair(1, 2), Pair(2, 3)),
        (OrderedDict(a=1), OrderedDict(a=2)),
        (defaultdict(int, a=1), defaultdict(int, a=2)),
        (deque([1, 2], maxlen=2), deque([2, 3], maxlen=2)),
        (types.MappingProxyType({"a": 1}), types.MappingProxyType({"a": 2})),
        (FrozenBatch(1), FrozenBatch(2)),
        (SlottedBatch(1), SlottedBatch(2)),
        ({"a": {"b": (1,)}}, {"a": {"b": (2,)}}),
    ],
)
def test_kinds_of_containers(tree: Any, mapped: Any) -> None:
    result = map_leaves(lambda _, leaf: leaf + 1, tree)
    assert result == mapped
    assert type(result) is type(mapped)


def test_what_else_a_container_carries_stays_with_it() -> None:
    tree = AttributeDict(a=1)
    tree.note = "kept"
    assert map_leaves(lambda _, leaf: leaf, tree).note == "kept"
    own = OwnDict(a=1)
    own.note = "kept"
    assert map_leaves(lambda _, leaf: leaf, own).note == "kept"
    assert map_leaves(lambda _, leaf: leaf, Batch(1)).made == ["made"]


def test_containers_that_the_user_registered() -> None:
    class Registered:
        def __init__(self, inside: Any) -> None:
            self.inside = inside

    _pytree.register_pytree_node(
        Registered, lambda r: ([r.inside], None), lambda children, _: Registered(*children)
    )
    assert map_leaves(lambda path, _: path, Registered(1)).inside == "[0]"


def test_nothing_is_registered_for_others() -> None:
    map_leaves(lambda _, leaf: leaf, [FrozenBatch(1), AttributeDict(a=1)])
    assert _pytree.tree_leaves(FrozenBatch(1)) == [FrozenBatch(1)]


def test_a_packed_sequence_stays_whole() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    assert map_leaves(lambda _, leaf: type(leaf), (packed,)) == (PackedSequence,)


def test_tensors_by_name() -> None:
    x = torch.zeros(2)
    assert [path for path, _ in named_tensors({"a": [x, 1], "b": FrozenBatch(x)})] == [
        "['a'][0]",
        "['b'].inputs",
    ]
    assert [path for path, _ in named_tensors(x)] == [""]


def test_a_tree_that_was_walked_is_freed_at_once() -> None:
    class Batch(dict[str, torch.Tensor]): ...

    batch = Batch(x=torch.zeros(2))
    alive = weakref.ref(batch)
    gc.disable()
    try:
        named_tensors(batch)
        del batch
        assert alive() is None
    finally:
        gc.enable()
