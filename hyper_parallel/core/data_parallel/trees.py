"""Tensors in what a module is called with and returns: tuples, lists, dicts and data classes of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.tensor import DTensor

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.device_mesh import DeviceMesh

__all__ = ["is_one_batch", "map_tensors"]

_SCALARS = frozenset({int, float, bool, complex, type(None), str})


def is_one_batch(inputs: Any, mesh: DeviceMesh, what: str) -> bool:
    """Whether the tensors among ``inputs`` are DTensors on ``mesh``, one batch for all ranks, and not plain ones, a
    batch of each rank's own. Those on other meshes, and tensors without dimensions, are neither.

    Raises:
        ValueError: when there are both.
    """
    kinds: dict[bool, Any] = {}
    for x in _tensors_in(inputs, mesh.platform):
        if isinstance(x, DTensor):
            if x.device_mesh is mesh:
                kinds[True] = x
        elif x.ndim:
            kinds[False] = x
    if len(kinds) > 1:
        raise ValueError(
            f"{what} was called with a DTensor of shape {tuple(kinds[True].shape)} on {mesh} and with a plain tensor "
            f"of shape {tuple(kinds[False].shape)}: one says that the ranks have one batch, the other that each has "
            "its own. Give DTensors (distribute_tensor(x, mesh, [Shard(0)]), or [Replicate()] for what all ranks "
            "share), or plain tensors alone"
        )
    return True in kinds


def _tensors_in(tree: Any, platform: Any) -> Iterator[Any]:
    if platform.is_tensor(tree):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _tensors_in(item, platform)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from _tensors_in(item, platform)


def map_tensors(tree: Any, convert: Callable[[Any], Any], platform: Any) -> Any:
    """``tree`` with ``convert(x)`` in place of each tensor ``x``: the same object where that changes nothing, else a
    copy. What is no tuple, list, dict or data class is left as it is."""
    if platform.is_tensor(tree):
        return convert(tree)
    kind = type(tree)
    if kind in _SCALARS:
        return tree
    if isinstance(tree, (tuple, list)):
        items = [map_tensors(item, convert, platform) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return tree._make(items) if hasattr(tree, "_make") else kind(items)
    if isinstance(tree, Mapping):
        return _changed(tree, dict(tree), convert, platform, lambda new, key, x: new.__setitem__(key, x))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
        return _changed(tree, fields, convert, platform, object.__setattr__)
    return tree


def _changed(
    tree: Any, items: dict[Any, Any], convert: Callable[[Any], Any], platform: Any, put: Callable[[Any, Any, Any], Any]
) -> Any:
    changed = {key: map_tensors(x, convert, platform) for key, x in items.items()}
    changed = {key: x for key, x in changed.items() if x is not items[key]}
    if not changed:
        return tree
    new = copy.copy(tree)
    for key, x in changed.items():
        put(new, key, x)
    return new
