"""Running an operation on distributed tensors: look the plan up, run on the locals, wrap the result.

The hot path is one dictionary look-up under the operands' layouts and static arguments, the reads that the plan names
(usually none), the native operation and the wrap. Everything else happens once per plan.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from hyper_parallel.core.dtensor.layout import Layout, get_layout
from hyper_parallel.core.dtensor.placement_types import Replicate
from hyper_parallel.core.dtensor.redistribute import partial_grad_view, redistribute
from hyper_parallel.core.dtensor.rules import RULES
from hyper_parallel.core.dtensor.strategy import solve
from hyper_parallel.platform.base import NativeOp, Platform

__all__ = ["dispatch", "implicit_replication", "is_strict", "strict"]

_LOG = logging.getLogger("hyper_parallel")
_STRICT: ContextVar[bool] = ContextVar("hyper_parallel_strict", default=False)
_IMPLICIT: ContextVar[bool] = ContextVar("hyper_parallel_implicit_replication", default=False)
_ELEMENTWISE = frozenset({"pointwise", "add", "mul", "linear_unary", "like", "pointwise_", "add_", "mul_", "linear_"})
_SCALARS = frozenset({int, float, bool, complex, type(None), str})
_PLANS: dict[tuple, _Plan] = {}
_MAX_PLANS = 1 << 16
_WARNED: set[Any] = set()


@contextmanager
def strict() -> Iterator[None]:
    """Inside, an operation without a sharding rule is an error instead of running on gathered operands.

    Example:
        >>> with strict():
        ...     pass
    """
    token = _STRICT.set(True)
    try:
        yield
    finally:
        _STRICT.reset(token)


def is_strict() -> bool:
    """Whether the caller is inside `strict`."""
    return _STRICT.get()


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, a plain tensor that meets a distributed one counts as replicated: the same value on every rank.

    Example:
        >>> with implicit_replication():
        ...     pass

    Source: ``torch.distributed.tensor.experimental.implicit_replication``.
    """
    token = _IMPLICIT.set(True)
    try:
        yield
    finally:
        _IMPLICIT.reset(token)


class _Plan:
    """How an operation with given layouts runs.

    Attributes:
        reads: (index of operand, layout to read it with, mesh dims of its partial gradient) for the operands that are
            not simply their local tensor.
        plain: indices of plain tensors that are promoted first.
        statics: static arguments of the local call, None to use the call's own.
        call: replacement of the native call, or None.
        operand_layouts, results: layouts after the reads.
        inplace: whether operand 0 is written.
    """

    __slots__ = ("call", "inplace", "mesh", "operand_layouts", "plain", "reads", "results", "statics")

    def __init__(
        self,
        layouts: tuple[Layout | None, ...],
        plain: tuple[int, ...],
        sharding: Any,
        strategy: Any,
        statics: tuple,
        mesh: Any,
        inplace: bool,
    ) -> None:
        self.mesh = mesh
        self.reads = tuple(
            (i, target, dims)
            for i, (have, target, dims) in enumerate(
                zip(layouts, strategy.operands, strategy.partial_grad_dims, strict=True)
            )
            if target is not None and (target is not have or dims)
        )
        self.plain = tuple(i for i in plain if any(i == r[0] for r in self.reads))
        self.operand_layouts = strategy.operands
        self.results = strategy.results
        self.call = sharding.call
        self.inplace = inplace
        localized = sharding.localize
        self.statics = None if localized is None else localized(statics, strategy.operands, strategy.results)


def dispatch(op: NativeOp | None, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run a native operation of which some argument is a DTensor. Called by the platform's interception."""
    if op is None:
        return _run_gathered(func, args, kwargs)
    operands, statics = op.bind(func, args, kwargs)
    layouts = tuple([_operand_key(x) for x in operands])
    key = (op, layouts) if op.name in _ELEMENTWISE else (op, layouts, statics)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _make_plan(op, func, operands, layouts, statics)
        if plan is None:
            return _run_gathered(func, args, kwargs)
        if len(_PLANS) >= _MAX_PLANS:
            _PLANS.clear()
        _PLANS[key] = plan
    return _run(plan, op, func, operands, statics)


def _run(plan: _Plan, op: NativeOp, func: Any, operands: tuple, statics: Any) -> Any:
    platform: Platform = plan.mesh.platform
    local_of = platform.local_of
    with platform.no_dispatch():
        locals_: list[Any] = list(operands)
        for i in plan.plain:
            shape = platform.shape_of(locals_[i])
            origin = locals_[i]
            locals_[i] = platform.wrap(platform.alias(origin), get_layout(plan.mesh, _all_replicated(plan.mesh), shape))
            locals_[i]._origin = origin
        for i, layout, partial_dims in plan.reads:
            x = redistribute(locals_[i], layout)
            locals_[i] = partial_grad_view(x, partial_dims) if partial_dims else local_of(x)
        locals_ = [local_of(x) if hasattr(x, "_layout") else x for x in locals_]
        if plan.statics is not None:
            statics = plan.statics
        if plan.call is None:
            result = op.call(func, tuple(locals_), statics)
        else:
            result = plan.call(
                platform,
                lambda operands, statics: op.call(func, operands, statics),
                tuple(locals_),
                statics,
                plan.operand_layouts,
                plan.results,
            )
        if plan.inplace:
            target = operands[0]
            platform.clear_cache(target)
            target._gathered = None
            return target
        return _wrap_results(platform, result, plan.results)


def _wrap_results(platform: Platform, result: Any, layouts: tuple[Layout, ...]) -> Any:
    if isinstance(result, (tuple, list)):
        wrapped = [platform.wrap(r, layout) for r, layout in zip(result, layouts, strict=True)]
        return type(result)(wrapped)
    return platform.wrap(result, layouts[0])


def _all_replicated(mesh: Any) -> tuple:
    return (Replicate(),) * mesh.ndim


def _operand_key(x: Any) -> Any:
    """What of an operand a plan depends on: the layout of a DTensor, the shape of a plain tensor, else nothing."""
    if type(x) in _SCALARS:
        return None
    layout = getattr(x, "_layout", None)
    if layout is not None:
        return layout
    shape = getattr(x, "shape", None)
    return None if shape is None else tuple(shape)


def _make_plan(op: NativeOp, func: Any, operands: tuple, layouts: tuple, statics: Any) -> _Plan | None:
    mesh = _common_mesh(layouts, func)
    if mesh is None:
        return None
    plain = tuple(i for i, key in enumerate(layouts) if isinstance(key, tuple))
    for i in plain:
        if layouts[i] and not _IMPLICIT.get():
            raise _mixed(func, operands, layouts, i)
    known = tuple(
        get_layout(mesh, _all_replicated(mesh), key) if isinstance(key, tuple) else key for key in layouts
    )
    rule = RULES.get(op.name)
    if rule is None:
        raise ValueError(f"the op table maps {_name(func)} to {op.name!r}, which is no canonical operation")
    shapes = tuple(None if layout is None else tuple(layout.shape) for layout in known)
    sharding = rule(shapes, statics)
    if sharding is None:
        return None
    inplace = op.name.endswith("_")
    strategy = solve(sharding, known, mesh, pinned=0 if inplace else None)
    if strategy is None:
        raise ValueError(
            f"{_name(func)} cannot write into a tensor placed {list(layouts[0].placements)} on {mesh}: the other "
            "operands do not fit that placement. Redistribute it first, or use the operation that returns a new tensor"
        )
    return _Plan(known, plain, sharding, strategy, statics, mesh, inplace)


def _common_mesh(layouts: tuple, func: Any) -> Any:
    mesh = None
    for layout in layouts:
        if isinstance(layout, Layout):
            if mesh is not None and layout.mesh is not mesh:
                raise ValueError(
                    f"{_name(func)} got tensors on different meshes, {mesh} and {layout.mesh}: bring them to one mesh "
                    "(full_tensor, then distribute_tensor)"
                )
            mesh = layout.mesh
    return mesh


def _mixed(func: Any, operands: tuple, layouts: tuple, plain: int) -> TypeError:
    other = next(i for i, layout in enumerate(layouts) if isinstance(layout, Layout))
    return TypeError(
        f"{_name(func)} got a plain tensor (operand {plain}, shape {layouts[plain]}) and a DTensor (operand {other}, "
        f"global shape {tuple(layouts[other].shape)}, placements {list(layouts[other].placements)}): make the plain one "
        "a DTensor with DTensor.from_local or distribute_tensor, or work on to_local(), or, when it is the same on all "
        "ranks, use `with implicit_replication():`"
    )


def _name(func: Any) -> str:
    return getattr(func, "__name__", None) or getattr(func, "name", None) or repr(func)


def _run_gathered(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operation that has no rule on gathered operands: right by construction, and said once."""
    found = list(_dtensors((args, kwargs)))
    mesh = _common_mesh(tuple(x._layout for x in found), func)
    if mesh is None:
        raise TypeError(f"{_name(func)} was intercepted without a DTensor among its arguments")
    platform: Platform = mesh.platform
    sharded = [x._layout for x in found if not x._layout.replicated]
    if sharded:
        _report(func, sharded[0])
    for x in _plain_tensors((args, kwargs), platform):
        if platform.shape_of(x) and not _IMPLICIT.get():
            shapes = (tuple(platform.shape_of(x)), found[0]._layout)
            raise _mixed(func, (x, found[0]), shapes, 0)
    with platform.no_dispatch():
        replicated = _all_replicated(mesh)
        result = func(
            *_map_dtensors(args, lambda x: platform.local_of(redistribute(x, x._layout.with_placements(replicated)))),
            **_map_dtensors(kwargs, lambda x: platform.local_of(redistribute(x, x._layout.with_placements(replicated)))),
        )
        return _wrap_replicated(result, mesh, replicated)


def _report(func: Any, layout: Layout) -> None:
    name = _name(func)
    if name.endswith("_") and not name.endswith("__"):
        raise ValueError(
            f"{name} writes in place and has no sharding rule: it cannot run on a tensor placed "
            f"{list(layout.placements)}. Redistribute it to Replicate() first, or use the operation that returns a "
            "new tensor"
        )
    if _STRICT.get():
        raise ValueError(
            f"{name} has no sharding rule for a tensor placed {list(layout.placements)} of shape "
            f"{tuple(layout.shape)}, and strict() is on: redistribute the tensor to Replicate() yourself, or add a rule "
            "with register_sharding"
        )
    if func not in _WARNED:
        _WARNED.add(func)
        _LOG.warning("%s has no sharding rule: its operands are gathered on every rank (said once)", name)


def _dtensors(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _dtensors(item)
    elif isinstance(tree, dict):
        yield from _dtensors(tuple(tree.values()))
    elif getattr(tree, "_layout", None) is not None:
        yield tree


def _plain_tensors(tree: Any, platform: Platform) -> Iterator[Any]:
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _plain_tensors(item, platform)
    elif isinstance(tree, dict):
        yield from _plain_tensors(tuple(tree.values()), platform)
    elif platform.is_tensor(tree) and getattr(tree, "_layout", None) is None:
        yield tree


def _map_dtensors(tree: Any, convert: Any) -> Any:
    if isinstance(tree, (tuple, list)):
        items = [_map_dtensors(item, convert) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        return {key: _map_dtensors(value, convert) for key, value in tree.items()}
    return convert(tree) if getattr(tree, "_layout", None) is not None else tree


def _wrap_replicated(result: Any, mesh: Any, replicated: tuple) -> Any:
    platform = mesh.platform
    if isinstance(result, (tuple, list)):
        items = [_wrap_replicated(item, mesh, replicated) for item in result]
        return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
    if platform.is_tensor(result):
        if getattr(result, "_layout", None) is not None:
            return result
        return platform.wrap(result, get_layout(mesh, replicated, platform.shape_of(result)))
    return result
