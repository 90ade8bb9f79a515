"""Running an operation on distributed tensors: look the plan up, run on the locals, wrap the result.

The hot path is one dictionary look-up under the operands' layouts and static arguments, the reads that the plan names
(usually none), the native operation and the wrap. Everything else happens once per plan.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.bounded import Bounded
from hyper_parallel.core.dtensor.custom_ops import find_custom_op
from hyper_parallel.core.dtensor.device_mesh import CACHES, DeviceMesh
from hyper_parallel.core.dtensor.gathered import run_gathered
from hyper_parallel.core.dtensor.layout import Layout, get_layout
from hyper_parallel.core.dtensor.loss_operands import distribute_labels
from hyper_parallel.core.dtensor.modes import is_implicit_replication, is_loss_parallel
from hyper_parallel.core.dtensor.op_sharding import OpSharding
from hyper_parallel.core.dtensor.operands import (
    DTENSOR_CLASSES,
    all_replicated,
    common_mesh,
    mixed_error,
    name_of,
    operand_key,
)
from hyper_parallel.core.dtensor.redistribute import partial_grad_view, redistribute
from hyper_parallel.core.dtensor.rules import RULES
from hyper_parallel.core.dtensor.strategy import Strategy, solve
from hyper_parallel.platform.base import NativeOp

__all__ = ["dispatch"]

_ELEMENTWISE = frozenset({"pointwise", "add", "mul", "linear_unary", "like", "pointwise_", "add_", "mul_", "linear_"})
_LOSSES = frozenset({"cross_entropy", "nll_loss"})
#: Operations whose canonical form follows from their positional arguments alone.
_REPEATABLE = _ELEMENTWISE | {"reshape", "permute", "squeeze", "unsqueeze", "matmul", "chunk", "split", "expand"}
_VALUES = frozenset({int, bool, str, type(None)})
_OTHER: Any = object()
_MAX_PLANS = 1 << 16
_PLANS: dict[tuple, _Plan] = Bounded(_MAX_PLANS)
#: (operation, native function, layouts and values of its arguments) -> plan, static arguments, number of operands.
_CALLS: dict[tuple, tuple[_Plan, Any, int]] = Bounded(_MAX_PLANS)
CACHES += [_PLANS.clear, _CALLS.clear]


class _Plan:
    """How an operation with given layouts runs; calling it runs it.

    Attributes:
        mesh: the mesh of the operands.
        call: the native operation as its row of the op table calls it.
        replacement: what a rule calls in its place, or None.
        reads: (index of operand, layout to read it with, mesh dims of its partial gradient) for the operands that are
            not simply their local tensor.
        plain: indices of plain tensors that are promoted for that.
        mixes: index of a plain tensor with dimensions, which only `implicit_replication` allows, or None.
        statics: static arguments of the local call, None to use the call's own.
        operand_layouts, results: layouts after the reads.
        inplace: whether operand 0 is written.
    """

    __slots__ = (
        "call",
        "inplace",
        "mesh",
        "mixes",
        "no_dispatch",
        "operand_layouts",
        "plain",
        "reads",
        "replacement",
        "result",
        "results",
        "simple",
        "statics",
        "wrap",
    )

    def __init__(
        self,
        op: NativeOp,
        layouts: tuple[Layout | None, ...],
        plain: tuple[int, ...],
        sharding: OpSharding,
        strategy: Strategy,
        statics: Any,
        mesh: DeviceMesh,
    ) -> None:
        self.mesh = mesh
        self.call = op.call
        self.replacement = sharding.call
        if sharding.native_if is not None and sharding.native_if(strategy.operands):
            self.replacement = None
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
        self.mixes = next((i for i in plain if (layout := layouts[i]) is not None and layout.ndim), None)
        self.operand_layouts = strategy.operands
        self.results = strategy.results
        self.inplace = op.name.endswith("_")
        localized = sharding.localize
        self.statics = None if localized is None else localized(statics, strategy.operands, strategy.results)
        # The common case, decided once: operands are their locals, the native operation runs, its result is wrapped.
        self.simple = not (self.reads or self.inplace or self.replacement or self.mixes is not None)
        self.result = self.results[0] if self.results else None
        self.no_dispatch, self.wrap = mesh.platform.no_dispatch, mesh.platform.wrap

    def run_simply(self, func: Any, operands: tuple, statics: Any) -> Any:
        """Run a plan that is `simple`, with the static arguments of the local call."""
        with self.no_dispatch():
            result = self.call(func, operands, statics)
            if isinstance(result, (tuple, list)):
                return self._wrapped(result)
            return self.wrap(result, self.result)

    def _wrapped(self, results: Any) -> Any:
        """Several results in what the operation returned them in. Those that the rule does not speak of, which come
        last, stay as they are: numbers such as the seed of an operation."""
        wrap, count = self.wrap, len(self.results)
        tensors = [wrap(r, layout) for r, layout in zip(results[:count], self.results, strict=True)]
        return type(results)(tensors if len(results) == count else [*tensors, *results[count:]])

    def __call__(self, func: Any, operands: tuple, statics: Any) -> Any:
        if self.statics is not None:
            statics = self.statics
        if self.simple:
            return self.run_simply(func, operands, statics)
        with self.no_dispatch():
            if self.mixes is not None and not is_implicit_replication():
                raise mixed_error(func, tuple(map(operand_key, operands)), self.mixes)
            local_operands = self._read(operands) if self.reads else operands
            if self.replacement is None:
                result = self.call(func, local_operands, statics)
            else:
                result = self.replacement(
                    self.mesh.platform,
                    lambda operands, statics: self.call(func, operands, statics),
                    local_operands,
                    statics,
                    self.operand_layouts,
                    self.results,
                )
            if self.inplace:
                return self._written(operands[0])
            if isinstance(result, (tuple, list)):
                return self._wrapped(result)
            return self.wrap(result, self.result)

    def _read(self, operands: tuple) -> tuple:
        """The operands as the plan wants them."""
        new = list(operands)
        for i in self.plain:
            new[i] = self._promote(new[i])
        for i, layout, partial_dims in self.reads:
            x = redistribute(new[i], layout)
            new[i] = partial_grad_view(x, partial_dims) if partial_dims else x
        return tuple(new)

    def _promote(self, x: Any) -> Any:
        """A plain tensor, the same on every rank, as a DTensor."""
        platform = self.mesh.platform
        layout = get_layout(self.mesh, all_replicated(self.mesh), platform.shape_of(x))
        promoted = platform.wrap(platform.alias(x), layout)
        promoted._origin = x
        return promoted

    def _written(self, x: Any) -> Any:
        """Operand 0 after an operation in place: what was computed from its old value is void."""
        self.mesh.platform.clear_cache(x)
        x._gathered = None
        return x


def dispatch(op: NativeOp | None, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run a native operation of which some argument is a DTensor. Called by the platform's interception."""
    call: tuple | None = None
    if not kwargs and op is not None:
        which = func if op.binds_by_function else None
        if len(args) == 1 and type(args[0]) in DTENSOR_CLASSES:
            call = (op, which, args[0]._layout)
        else:
            classes = DTENSOR_CLASSES
            call = (
                op,
                which,
                *[x if type(x) is int else x._layout if type(x) in classes else _argument_key(x) for x in args],
            )
        known = _CALLS.get(call)
        if known is not None:
            remembered, statics, count = known
            return remembered.run_simply(func, args if count == len(args) else args[:count], statics)
    if op is None:
        op = find_custom_op(func)
        if op is None:
            return run_gathered(func, args, kwargs)
    operands, statics = op.bind(func, args, kwargs)
    layouts = tuple([operand_key(x) for x in operands])
    if op.name in _ELEMENTWISE:
        key: tuple = (op, layouts)
    else:
        if op.name in _LOSSES and is_loss_parallel():
            operands = distribute_labels(operands)
            layouts = tuple([operand_key(x) for x in operands])
        key = (op, layouts, statics)
    plan = _PLANS.get(key)
    if plan is None:
        plan = None if op.name == "replicate" else _make_plan(op, func, operands, layouts, statics)
        if plan is None:
            return run_gathered(func, args, kwargs, op.name)
        _PLANS[key] = plan
    if call is not None and plan.simple and op.name in _REPEATABLE:
        _remember(call, op, args, operands, plan, statics)
    return plan(func, operands, statics)


def _argument_key(x: Any) -> Any:
    """What of an argument that is no DTensor a remembered call depends on: its value; of a number with digits after the
    point the type, since only operands of element-wise operations are such."""
    kind = type(x)
    if kind is float:
        return float
    if kind is tuple:
        return x if all(type(n) is int for n in x) else _OTHER
    return x if kind in _VALUES else _OTHER


def _remember(call: tuple, op: NativeOp, args: tuple, operands: tuple, plan: _Plan, statics: Any) -> None:
    """Keep ``plan`` for calls with the same arguments, so that these are neither bound nor looked at again."""
    count = len(operands)
    if count > len(args) or any(x is not y for x, y in zip(operands, args, strict=False)):
        return
    if _OTHER in call:
        return
    if op.name in _ELEMENTWISE:
        if statics is not None or count != len(args):
            return
    elif float in call:
        return
    _CALLS[call] = (plan, plan.statics if plan.statics is not None else statics, count)


def _make_plan(op: NativeOp, func: Any, operands: tuple, layouts: tuple, statics: Any) -> _Plan | None:
    mesh = common_mesh(layouts, func)
    if mesh is None:
        return None
    plain = tuple(i for i, key in enumerate(layouts) if isinstance(key, tuple))
    for i in plain:
        if layouts[i] and not is_implicit_replication():
            raise mixed_error(func, layouts, i)
    known = tuple(get_layout(mesh, all_replicated(mesh), key) if isinstance(key, tuple) else key for key in layouts)
    rule = RULES.get(op.name)
    if rule is None:
        raise ValueError(f"the op table maps {name_of(func)} to {op.name!r}, which is no canonical operation")
    shapes = tuple(None if layout is None else tuple(layout.shape) for layout in known)
    sharding = rule(shapes, statics)
    if sharding is None:
        return None
    strategy = solve(sharding, known, mesh, pinned=0 if op.name.endswith("_") else None)
    if strategy is None:
        raise ValueError(
            f"{name_of(func)} cannot write into a tensor placed {list(layouts[0].placements)} on {mesh}: the other "
            "operands do not fit that placement. Redistribute it first, or use the operation that returns a new tensor"
        )
    return _Plan(op, known, plain, sharding, strategy, statics, mesh)
