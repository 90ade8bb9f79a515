"""Tensors in the arguments and results of modules: `core.trees`."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hyper_parallel.core.trees import map_tensors, tensors_in

PLATFORM = SimpleNamespace(is_tensor=lambda x: isinstance(x, np.ndarray))
Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Output:
    logits: Any
    count: int = 3
    length: int = dataclasses.field(init=False, default=7)


class Unknown:
    """Could hold tensors."""


def doubled(tree: Any) -> Any:
    return map_tensors(tree, lambda x: x * 2, PLATFORM, refuse)


def refuse(x: Any) -> Any:
    raise TypeError(type(x).__name__)


def one() -> np.ndarray:
    return np.ones(2)


@pytest.mark.parametrize(
    "make",
    [
        one,
        lambda: [one(), 1, None],
        lambda: (one(), "text", (one(), 2.5)),
        lambda: Pair(one(), b"bytes"),
        lambda: {"a": one(), "b": {"c": [one()], "d": True}},
        lambda: OrderedDict(a=one(), b=1j),
        lambda: Output(one()),
        lambda: {"out": Output(Pair(one(), None))},
    ],
)
def test_maps_each_tensor_and_keeps_types(make: Any) -> None:
    tree = make()
    found = list(tensors_in(tree, PLATFORM))
    assert found and all((x == 1).all() for x in found)
    new = doubled(tree)
    assert type(new) is type(tree)
    assert [x.tolist() for x in tensors_in(new, PLATFORM)] == [[2, 2]] * len(found)
    assert all((x == 1).all() for x in found)  # the tree itself stays as it is


@pytest.mark.parametrize(
    "tree", [None, [1, 2], (), {"a": "b"}, Pair(1, 2), Output(None), OrderedDict(a=1)], ids=lambda t: type(t).__name__
)
def test_a_tree_without_tensors_is_itself(tree: Any) -> None:
    assert doubled(tree) is tree and not list(tensors_in(tree, PLATFORM))


@pytest.mark.parametrize("tree", [Unknown(), [one(), Unknown()], {"a": {1, 2}}, Output])
def test_what_could_hold_tensors_is_refused(tree: Any) -> None:
    with pytest.raises(TypeError):
        doubled(tree)


def test_other_attributes_stay() -> None:
    new = doubled(Output(one(), count=5))
    assert (new.count, new.length) == (5, 7)
