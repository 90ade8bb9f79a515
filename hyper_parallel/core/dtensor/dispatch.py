"""Running an operation on distributed tensors: look the plan up, run on the locals, wrap the result.

The hot path is one dictionary look-up under the operands' layouts and static arguments, the reads that the plan names
(usually none), the native operation and the wrap. Everything else happens once per plan.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.custom_ops import find_custom_op
from hyper_parallel.core.dtensor.gathered import run_gathered
from hyper_parallel.core.dtensor.layout import Layout, get_layout
from hyper_parallel.core.dtensor.modes import is_implicit_replication
from hyper_parallel.core.dtensor.operands import all_replicated, common_mesh, mixed_error, name_of, operand_key
from hyper_parallel.core.dtensor.redistribute import partial_grad_view, redistribute
from hyper_parallel.core.dtensor.rules import RULES
from hyper_parallel.core.dtensor.strategy import solve
from hyper_parallel.platform.base import NativeOp, Platform

__all__ = ["dispatch"]

_ELEMENTWISE = frozenset({"pointwise", "add", "mul", "linear_unary", "like", "pointwise_", "add_", "mul_", "linear_"})
_PLANS: dict[tuple, _Plan] = {}
_MAX_PLANS = 1 << 16


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
            if target is not None
            and (target is not have or dims)
            and not (i in sharding.unread and have is not None and target is have.cotangent)
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
        op = find_custom_op(func)
        if op is None:
            return run_gathered(func, args, kwargs)
    if op.name == "replicate":
        return run_gathered(func, args, kwargs, expected=True)
    operands, statics = op.bind(func, args, kwargs)
    layouts = tuple([operand_key(x) for x in operands])
    key = (op, layouts) if op.name in _ELEMENTWISE else (op, layouts, statics)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _make_plan(op, func, operands, layouts, statics)
        if plan is None:
            return run_gathered(func, args, kwargs)
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
            locals_[i] = platform.wrap(platform.alias(origin), get_layout(plan.mesh, all_replicated(plan.mesh), shape))
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


def _make_plan(op: NativeOp, func: Any, operands: tuple, layouts: tuple, statics: Any) -> _Plan | None:
    mesh = common_mesh(layouts, func)
    if mesh is None:
        return None
    plain = tuple(i for i, key in enumerate(layouts) if isinstance(key, tuple))
    for i in plain:
        if layouts[i] and not is_implicit_replication():
            raise mixed_error(func, operands, layouts, i)
    known = tuple(get_layout(mesh, all_replicated(mesh), key) if isinstance(key, tuple) else key for key in layouts)
    rule = RULES.get(op.name)
    if rule is None:
        raise ValueError(f"the op table maps {name_of(func)} to {op.name!r}, which is no canonical operation")
    shapes = tuple(None if layout is None else tuple(layout.shape) for layout in known)
    sharding = rule(shapes, statics)
    if sharding is None:
        return None
    inplace = op.name.endswith("_")
    strategy = solve(sharding, known, mesh, pinned=0 if inplace else None)
    if strategy is None:
        raise ValueError(
            f"{name_of(func)} cannot write into a tensor placed {list(layouts[0].placements)} on {mesh}: the other "
            "operands do not fit that placement. Redistribute it first, or use the operation that returns a new tensor"
        )
    return _Plan(known, plain, sharding, strategy, statics, mesh, inplace)
