"""Fallback for operations without a sharding rule: they run on gathered operands and give replicated results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hyper_parallel.core.communication.errors import tell_of_failure
from hyper_parallel.core.communication.redistribute import redistribute
from hyper_parallel.core.layouts.layout import Layout, replicated_layout
from hyper_parallel.core.layouts.memory_order import bind_order
from hyper_parallel.core.modes import is_implicit_replication, is_strict
from hyper_parallel.core.operations.aliasing import is_moved
from hyper_parallel.core.operations.operands import (
    common_mesh,
    mixed_error,
    name_of,
    refuse_foreign,
    refuse_summed,
)
from hyper_parallel.core.operations.owners import owner_of
from hyper_parallel.core.operations.views import after_write, before_write, follow, forget_value, share
from hyper_parallel.core.rules import OPERATIONS
from hyper_parallel.core.rules.random import run_alike
from hyper_parallel.platform.contract import NativeOp, Platform
from hyper_parallel.platform.logs import LOG

_WARNED: set[Any] = set()


def run_gathered(func: Any, args: tuple, kwargs: dict, op: NativeOp | None = None) -> Any:
    """Run an operation on gathered operands, which is always correct, and warn once for each operation.

    Args:
        func, args, kwargs: the native call.
        op: entry of the op table, or None. There is no warning if its operation is meant to be gathered
            (`CanonicalOp.gathers`).

    Raises:
        ValueError: when the operation writes in place and an operand is not replicated; inside `strict`; for plain
            tensors among the operands.
    """
    name = name_of(func)
    meant = op is not None and OPERATIONS[op.name].gathers
    writes = (op is not None and op.in_place) or (name.endswith("_") and not name.endswith("__"))
    found = list(_dtensors((args, kwargs)))
    mesh = common_mesh(tuple(x._layout for x in found), func)
    if mesh is None:
        raise TypeError(f"{name_of(func)} was intercepted without a DTensor among its arguments")
    mesh.require_member(name)
    platform: Platform = mesh.platform
    sharded = [x._layout for x in found if not x._layout.replicated]
    if sharded and not meant:
        _report(func, sharded[0], writes)
    leaves = list(_leaves((args, kwargs)))
    for i, x in enumerate(leaves):
        if getattr(x, "_layout", None) is not None:
            continue
        refuse_foreign(x, platform, name_of(func))
        if platform.is_tensor(x) and platform.shape_of(x) and not is_implicit_replication():
            raise mixed_error(func, leaves, i)
        if platform.is_tensor(x) and platform.shape_of(x):
            refuse_summed(func, leaves, i, mesh)
    if writes:
        before_write(found[0])
    with platform.no_dispatch():
        given: list[_Given] = []

        def gather(x: Any) -> Any:
            if getattr(x, "_layout", None) is None:
                return x
            layout = replicated_layout(mesh, x._layout.shape)
            whole = redistribute(x, layout)
            order = None if whole is x else bind_order(x._layout, layout, True)
            if order is not None and (ordered := order(x, whole)) is not whole:
                whole = platform.wrap(ordered, layout)
            # Code that inspects arguments gets plain tensors. An argument that is written to must stay the same object.
            whole = whole if writes else platform.alias(whole)
            if not meant:
                given.append(_Given(x, whole, platform, name))
            return whole

        local_args, local_kwargs = _map(gather, args), _map(gather, kwargs)
        if meant:
            result = func(*local_args, **local_kwargs)
        else:
            result = run_alike(
                lambda: func(*local_args, **local_kwargs), mesh, lambda: any(g.is_written() for g in given), name
            )
        changed = [g for g in given if g.write_back(name)]
        written = {id(g.whole): g.x for g in changed}

        def wrap(y: Any) -> Any:
            if id(y) in written:
                return written[id(y)]
            if not platform.is_tensor(y) or getattr(y, "_layout", None) is not None:
                return y
            return platform.wrap(y, replicated_layout(mesh, platform.shape_of(y)))

        result = _map(wrap, result)
    for operand in changed:
        after_write(operand.x)
    views: dict[int, Any] = {}
    with platform.no_dispatch():
        for operand in given:
            views |= operand.note_views(result, name)
    return _map(lambda y: views.get(id(y), y), result) if views else result


class _Given:
    """A DTensor, and the gathered tensor that the operation received in its place.

    The operation may write to the gathered tensor: batch normalisation updates its running statistics.

    Attributes:
        x: the DTensor.
        whole: the gathered value.
    """

    def __init__(self, x: Any, whole: Any, platform: Platform, name: str) -> None:
        self.x, self.whole = x, whole
        self._how = platform.watch(whole, name) if platform.has_values(whole) else None

    def is_written(self) -> bool:
        """Return whether the operation has written to the gathered tensor."""
        return bool(self._how and self._how())

    def write_back(self, name: str) -> bool:
        """Copy the operation's changes of the gathered tensor into the DTensor, and return whether anything changed.

        All ranks return the same, because all ranks computed the same on equal values.

        Raises:
            ValueError: when the placements or autograd make this impossible.
        """
        how = self._how and self._how()
        if not how:
            return False
        x, layout = self.x, self.x._layout
        platform = layout.mesh.platform
        before_write(x)
        if not layout.replicated:
            if how == "recorded" or any(p.is_partial() for p in layout.placements):
                held = owner_of(x, platform) or "an operand"
                raise ValueError(
                    f"{name} writes in place into {held}, placed {list(layout.placements)}, which is not supported: "
                    "redistribute it to Replicate() first, or use the operation that returns a new tensor"
                )
            with platform.no_grad():
                whole = platform.wrap(platform.detach(self.whole), replicated_layout(layout.mesh, layout.shape))
                platform.write(x, platform.detach(redistribute(whole, layout)))
        forget_value(x, platform)
        return True

    def note_views(self, result: Any, name: str) -> dict[int, Any]:
        """Register results that are views of the operand. Return result id -> the tensor that takes its place."""
        x, views = self.x, {}
        for y in _dtensors(result):
            if y is not x and y._layout.mesh.platform.same_memory(self.whole, y):
                if is_moved(x._layout, x._layout.with_placements(y._layout.placements)):
                    views[id(y)] = follow(x, (y,), (None,), name)[0]
                else:
                    share(x, y)
        return views


def tell_of_failure_in(error: Exception, func: Any, args: tuple, kwargs: dict) -> None:
    """Report the failure of an operation on distributed tensors to the other ranks (see `tell_of_failure`)."""
    for x in _dtensors((args, kwargs)):
        tell_of_failure(error, name_of(func), x._layout.mesh)
        return


def _report(func: Any, layout: Layout, writes: bool) -> None:
    name = name_of(func)
    if writes:
        raise ValueError(
            f"{name} writes in place and has no sharding rule for these operands, so it cannot run on a tensor placed "
            f"{list(layout.placements)}. Redistribute the tensor to Replicate() first, or use the operation that "
            "returns a new tensor"
        )
    if is_strict():
        raise ValueError(
            f"{name} has no sharding rule for a tensor placed {list(layout.placements)} of shape "
            f"{tuple(layout.shape)}, and strict() is on: redistribute the tensor to Replicate() yourself, or add a "
            "rule with register_sharding"
        )
    if func not in _WARNED:
        _WARNED.add(func)
        LOG.warning(
            "%s has no sharding rule for a tensor placed %s: its operands are gathered on every rank. To keep them "
            "sharded, add a rule with register_sharding; inside strict() this is an error (said once)",
            name,
            list(layout.placements),
        )


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _leaves(item)
    elif isinstance(tree, dict):
        yield from _leaves(tuple(tree.values()))
    else:
        yield tree


def _dtensors(tree: Any) -> Iterator[Any]:
    return (x for x in _leaves(tree) if getattr(x, "_layout", None) is not None)


def _map(convert: Callable[[Any], Any], tree: Any) -> Any:
    """Return ``tree`` with each of its leaves converted."""
    if isinstance(tree, (tuple, list)):
        items = [_map(convert, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        return {key: _map(convert, value) for key, value in tree.items()}
    return convert(tree)
