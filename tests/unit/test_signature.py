"""Trees of arguments are taken apart and put together again without loss."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from training import differs, frozen

from pygraph_train.tracing.signature import family_of, flatten, flattened, key_of, leaf_paths, map_leaves

pytestmark = pytest.mark.quick

Pair = namedtuple("Pair", "a b")


@dataclass
class Item:
    a: Any
    b: Any


@dataclass(frozen=True)
class FrozenItem:
    a: Any
    b: Any


T = torch.arange(3.0)

TREES = [
    T,
    None,
    "text",
    b"bytes",
    range(3),
    (),
    [],
    {},
    (T, [T, {"k": T, 1: 2.5}], None),
    Pair(T, "x"),
    Item([T], {"n": 1}),
    FrozenItem(T, (T, T)),
    OrderedDict(b=T, a=1),
    defaultdict(list, x=[T]),
    UserDict(x=T, y=[1, T]),
    torch.Size([2, 3]),
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
def test_identity_map_rebuilds_the_tree(tree):
    leaves: list[Any] = []
    structure = flatten(tree, leaves)
    copied = map_leaves(lambda leaf: leaf, tree)
    assert type(copied) is type(tree)
    again: list[Any] = []
    assert flatten(copied, again) == structure
    assert len(again) == len(leaves) == len(leaf_paths((tree,), {}, ("args", "kwargs")))
    assert all(a is b for a, b in zip(leaves, again, strict=True))
    hash(key_of(structure, leaves))


def test_map_leaves_goes_in_flattens_order_and_leaves_the_tree_alone():
    tree = {"b": (1, [2, 3]), "a": Pair(4, Item(5, UserDict(x=6)))}
    leaves: list[Any] = []
    flatten(tree, leaves)
    assert leaves == [1, 2, 3, 4, 5, 6]
    mapped = map_leaves(lambda leaf: leaf * 10, tree)
    after: list[Any] = []
    flatten(mapped, after)
    assert after == [10, 20, 30, 40, 50, 60]
    leaves.clear()
    flatten(tree, leaves)
    assert leaves == [1, 2, 3, 4, 5, 6]


def test_paths_are_what_a_user_would_write():
    tree = ({"x": T, "more": [1, Item(2, 3)]},)
    assert leaf_paths(tree, {}, ("args", "kwargs")) == [
        "args[0]['x']",
        "args[0]['more'][0]",
        "args[0]['more'][1].a",
        "args[0]['more'][1].b",
    ]


def test_what_cannot_be_rebuilt_is_refused():
    with pytest.raises(TypeError, match="mappingproxy"):
        map_leaves(lambda leaf: leaf, MappingProxyType({"x": T}))


def _key(tree: Any) -> Any:
    leaves: list[Any] = []
    return key_of(flatten(tree, leaves), leaves)


@pytest.mark.parametrize(
    "other",
    [
        torch.arange(4.0),
        T.double(),
        torch.arange(6.0)[::2],
        T.clone().requires_grad_(),
        T.to_sparse(),
        [T],
        1,
    ],
)
def test_keys_differ_with_metadata(other):
    assert _key((T,)) != _key((other,))
    assert _key((other,)) == _key((other,))


def test_keys_do_not_depend_on_values():
    assert _key({"x": T, "n": 1, "s": "a"}) == _key({"x": T + 1, "n": 2, "s": "b"})
    assert _key({"n": 1}) != _key({"n": 1.0})
    assert _key({"n": 1}) != _key({"m": 1})
    assert _key([1]) != _key((1,))


def test_frozen_copies_are_equal():
    assert differs(frozen([T, {"a": 1}]), frozen([T, {"a": 1}])) is None


def test_keys_of_one_family_differ_in_sizes_alone() -> None:
    def family(*leaves: Any) -> Any:
        return family_of(key_of(*flattened((leaves, {}))))[0]

    x = torch.ones(4, 6)
    assert family(x) == family(torch.ones(5, 7)) == family(torch.ones(1, 7)) == family(torch.ones(0, 7))
    others = [
        x.t(),
        x[:, :3],
        x.double(),
        x.clone().requires_grad_(),
        torch.ones(4, 6, 1),
        x[:1].expand(4, 6),
    ]
    assert len({family(x), *map(family, others)}) == 1 + len(others)
    assert family(x, x) != family(x, x.clone()) and family(x, 1) != family(x, 1.0)
    assert family_of(key_of(*flattened(((x, 3), {}))))[1] == ((4, 6), ())
