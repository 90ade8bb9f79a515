"""Execution of an operation on distributed tensors: find the recipe, run it on local tensors, wrap the result.

The hot path looks up the recipe by the operands' layouts and static arguments. It redistributes operands where needed
(usually none), runs the native operation, and wraps the result. All other work happens once per recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hyper_parallel.core.caches import Cache, Table
from hyper_parallel.core.communication.host_reads import read_by_all
from hyper_parallel.core.communication.rank_check import check_replicated
from hyper_parallel.core.communication.redistribute import partial_grad_view, redistribute
from hyper_parallel.core.layouts.layout import Layout, replicated_layout
from hyper_parallel.core.layouts.memory_order import bind_order
from hyper_parallel.core.layouts.placement_types import Replicate
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.modes import is_implicit_replication
from hyper_parallel.core.observers import CHECKS
from hyper_parallel.core.operations.aliasing import Aliasing, aliasing_of
from hyper_parallel.core.operations.binding import bind_of
from hyper_parallel.core.operations.call_cache import call_key, remembered_call
from hyper_parallel.core.operations.custom_ops import find_custom_op
from hyper_parallel.core.operations.fallback import run_gathered, tell_of_failure_in
from hyper_parallel.core.operations.operands import (
    DTENSOR_CLASSES,
    check_parts,
    common_mesh,
    mixed_error,
    name_of,
    operand_key,
    operand_name,
    refuse_foreign,
    refuse_summed,
    write_error,
)
from hyper_parallel.core.operations.partial_sums import converts_linearly, kept_sums
from hyper_parallel.core.operations.strategy import Strategy, Unsized, solve
from hyper_parallel.core.operations.views import after_write, apart, before_write, forget_value
from hyper_parallel.core.rules import OPERATIONS, CanonicalOp
from hyper_parallel.core.rules.filling import bind_dense, bind_filled
from hyper_parallel.core.rules.loss_operands import distribute_targets
from hyper_parallel.core.rules.op_sharding import LocalCall, OpSharding
from hyper_parallel.platform.contract import NativeOp

_MAX_RECIPES, _MAX_CALLS = 1 << 16, 1 << 14
_RECIPES: dict[tuple, _Recipe] = Cache(_MAX_RECIPES, "recipes of operations")


class _Recipe:
    """All steps to run an operation on operands with given layouts. Calling a recipe runs the operation.

    Attributes:
        mesh: the mesh of the operands.
        canonical: the operation.
        call: the native operation, as its entry of the op table calls it.
        replacement: a rule's function in place of the native operation, or None.
        reads: (index of operand, function that reads it) for operands that need redistribution or another view.
        plain: indices of plain tensors that are promoted to DTensors for a read.
        mixes: index of a plain tensor with dimensions, which only `implicit_replication` allows, or None.
        static_args: static arguments of the local call; None to use those of the original call.
        operand_layouts, results: layouts of the operands after the reads, and of the results.
        inplace: whether the operation writes to operand 0.
        sums: indices of the operands whose partial sums are kept (see `partial_sums`).
        linear_for: see `OpSharding.linear_for`; None where no partial sums are kept.
        copies: function that returns whether the local operation must run on a copy of operand 0, or None (see
            `aliasing`).
        after: function that records aliasing of operands and result, or None (see `aliasing`).
        only_local: whether the recipe consists only of the reads, the native operation, the wrap, `copies` and `after`.
    """

    def __init__(
        self,
        op: NativeOp,
        canonical: CanonicalOp,
        layouts: tuple[Layout | None, ...],
        plain: tuple[int, ...],
        sharding: OpSharding,
        strategy: Strategy,
        static_args: Any,
        mesh: DeviceMesh,
        name: str,
    ) -> None:
        self.op, self.mesh, self.canonical = op, mesh, canonical
        self.call = op.call
        self.replacement = sharding.call
        if sharding.native_if is not None and sharding.native_if(strategy.operands):
            self.replacement = None
        self.reads = tuple(
            (i, _bind_read(have, target, dims, None if op.in_place else canonical))
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
        self.inplace = op.in_place
        localized = sharding.localize
        if mesh.get_coordinate() is not None:
            if sharding.filled:
                self.call = bind_filled(self.call, sharding, strategy.operands, mesh.platform)
            if not op.in_place and canonical.memory != "shared":  # a view must keep its base's autograd history
                self.call = bind_dense(self.call, strategy.results, mesh.platform)
        self.static_args = None if localized is None else localized(static_args, strategy.operands, strategy.results)
        unsized = any(isinstance(result, Unsized) for result in strategy.results)
        aliasing = None
        if not (self.inplace or unsized):
            aliasing = aliasing_of(canonical, layouts, static_args, strategy, name, self.replacement is not None)
        aliasing = aliasing or Aliasing(None, None)
        if aliasing.is_view:
            self.reads = tuple((i, _bind_alias(strategy.operands[i], mesh)) for i, _ in self.reads)
        self.copies, self.after = aliasing.copies, aliasing.after
        self.sums = kept_sums(canonical, layouts, strategy) if sharding.terms else ()
        self.linear_for = sharding.linear_for if self.sums else None
        more = self.inplace or self.replacement or self.plain or self.sums
        self.only_local = not more and self.mixes is None
        self.result: Any = self.results[0] if self.results else None
        self.no_dispatch, self.wrap = mesh.platform.no_dispatch, _wrap_sized if unsized else mesh.platform.wrap

    def wrap_several(self, results: Any) -> Any:
        """Return several results as DTensors, in the tuple or list that the operation returned.

        The rule may not describe the last results, such as the random seed of an operation. They are returned
        unchanged.
        """
        count = len(self.results)
        wrapped = map(self.wrap, results[:count], self.results)
        return type(results)(wrapped if len(results) == count else [*wrapped, *results[count:]])

    def _run_completed(self, func: Any, operands: tuple, static_args: Any, sums: Sequence[int]) -> Any:
        """Run the operation with the partial sums of some operands completed first.

        Raises:
            ValueError: when an operation in place would have to write another placement.
        """
        if self.inplace and 0 in sums:
            raise write_error(func, operands[0]._layout)
        new = list(operands)
        with self.no_dispatch():
            for i in sums:
                new[i] = redistribute(new[i], new[i]._layout.cotangent)
        layouts = tuple([operand_key(x) for x in new])
        # There is one: the rule that serves partial sums serves replicated tensors too.
        recipe: Any = _find_recipe(self.op, self.canonical, func, tuple(new), layouts, static_args)
        return recipe(func, tuple(new), static_args)

    def _not_linear(self, before: Sequence[Any], after: Any) -> list[int]:
        """Return the operands, of the tensors ``before``, whose partial sums a conversion to the dtype of ``after``
        would change."""
        platform = self.mesh.platform
        return [i for i in self.sums if not converts_linearly(platform, before[i].dtype, after.dtype)]

    def __call__(self, func: Any, operands: tuple, static_args: Any) -> Any:
        given = static_args
        if self.static_args is not None:
            static_args = self.static_args
        if self.linear_for is not None and not self.linear_for(operands):
            return self._run_completed(func, operands, given, self.sums)
        if self.inplace:
            if self.sums:
                with self.no_dispatch():
                    sums = self._not_linear(operands, operands[0])
                if sums:
                    return self._run_completed(func, operands, given, sums)
            before_write(operands[0])
        with self.no_dispatch():
            if self.mixes is not None:
                refuse_foreign(operands[self.mixes], self.mesh.platform, name_of(func))
                if not is_implicit_replication():
                    raise mixed_error(func, operands, self.mixes, self.canonical)
                refuse_summed(func, operands, self.mixes, self.mesh, self.canonical)
                if CHECKS:
                    called = operand_name(operands, self.mixes, self.mesh.platform, self.canonical)
                    what = f"{called}, of {name_of(func)}, which is a plain tensor"
                    check_replicated(operands[self.mixes], self.mesh, (Replicate(),) * self.mesh.ndim, what)
            local_operands = self._read(operands) if self.reads else operands
            if self.inplace and getattr(operands[0], "_family", None) is not None:  # a plain parameter has no family
                local_operands = apart(operands, local_operands, self.mesh.platform)
            if self.copies is not None and self.copies(operands[0]):
                local_operands = (self.mesh.platform.clone(local_operands[0]), *local_operands[1:])
            if self.replacement is None:
                result = self.call(func, local_operands, static_args)
            else:
                native = partial(self.call, func)
                layouts = self.operand_layouts, self.results
                result = self.replacement(LocalCall(self.mesh.platform, native, local_operands, static_args, *layouts))
            if not self.inplace:
                several = isinstance(result, (tuple, list))
                if self.sums and self._not_linear(local_operands, result[0] if several else result):
                    return self._run_completed(func, operands, given, self.sums)
                result = self.wrap_several(result) if several else self.wrap(result, self.result)
                return result if self.after is None else self.after(operands, result)
            forget_value(operands[0], self.mesh.platform)
        after_write(operands[0])
        return operands[0]

    def _read(self, operands: tuple) -> tuple:
        """Return the operands in the layouts that the recipe requires."""
        new = list(operands)
        for i in self.plain:
            new[i] = self._promote(new[i])
        for i, read in self.reads:
            new[i] = read(new[i])
        return tuple(new)

    def _promote(self, x: Any) -> Any:
        """Return a plain tensor, which is equal on every rank, as a DTensor."""
        platform = self.mesh.platform
        promoted = platform.wrap(platform.alias(x), replicated_layout(self.mesh, platform.shape_of(x)))
        promoted._origin = x
        return promoted


def _wrap_sized(local: Any, result: Layout | Unsized) -> Any:
    """Apply `Platform.wrap` to a result whose size may follow from the data."""
    platform = result.mesh.platform
    return platform.wrap(local, result.sized(platform.shape_of(local)) if isinstance(result, Unsized) else result)


def _bind_read(
    have: Layout | None, layout: Layout, partial_dims: tuple[int, ...], op: CanonicalOp | None
) -> Callable[[Any], Any]:
    """Return a function that reads a DTensor for a recipe. It redistributes to ``layout``, and applies
    `partial_grad_view` if the cotangent is partial.

    Args:
        have: layout of the operand.
        layout: layout that the operation reads.
        partial_dims: mesh dimensions over which the cotangent is partial.
        op: the operation, if the memory order of its results depends on the operand, else None.
    """
    requires_grad = layout.mesh.platform.requires_grad

    def read(x: Any) -> Any:
        if x._layout is not layout:
            x = redistribute(x, layout)
        return partial_grad_view(x, partial_dims) if partial_dims and requires_grad(x) else x

    if op is None or op.memory == "fresh" or have is None or have is layout:
        return read
    order = bind_order(have, layout, op.may_give_view)
    return read if order is None else lambda x: order(x, read(x))


def _bind_alias(layout: Any, mesh: DeviceMesh) -> Callable[[Any], Any]:
    """Return a function that reads a DTensor for an operation that returns a view.

    The operand's layout and ``layout`` differ at most in mesh dimensions of size 1, so no data moves. The result shares
    the memory of the DTensor, and so does the view.
    """
    wrap, alias = mesh.platform.wrap, mesh.platform.alias
    return lambda x: x if x._layout is layout else wrap(alias(x), layout)


class _Dispatch:
    """Function object that runs native operations with DTensor arguments. The platform's interception calls it."""

    def __call__(self, op: NativeOp | None, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run ``func(*args, **kwargs)``. ``op`` is its entry of the op table, or None if it has none."""
        return _RUNS[op](func, args, kwargs)

    def bind(self, op: NativeOp | None) -> Callable[[Any, tuple, dict], Any]:
        """Return the dispatch of one entry, as ``run(func, args, kwargs)``."""
        return _RUNS[op]

    def result_shapes(self, name: str, shapes: tuple, static_args: Any) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the results of a canonical operation on tensors of the given shapes."""
        sharding = OPERATIONS[name].rule(shapes, static_args)
        assert sharding is not None, f"{name} has no rule for {shapes}, {static_args}"
        return sharding.result_shapes


def _make_run(op: NativeOp | None) -> Callable[[Any, tuple, dict], Any]:
    if op is None:
        return _run_without_row
    calls = CALLS[op] = Cache(_MAX_CALLS, "calls of operations")
    find, by_function, varies, classes = calls.get, op.binds_by_function, op.varies, DTENSOR_CLASSES

    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        try:
            if varies is not None and varies():
                return _run_first(op, func, args, kwargs, None)
            which = func if by_function else None
            count = 0 if kwargs else len(args)
            if count == 2 and type(args[0]) in classes and type(args[1]) in classes:
                key: tuple = (which, args[0]._layout, args[1]._layout)  # fast path of `call_key`
            elif count == 1 and type(args[0]) in classes:
                key = (which, args[0]._layout)
            else:
                key = call_key(which, args, kwargs)
            remembered = find(key)
            if remembered is not None:
                return remembered(func, args, kwargs)
            return _run_first(op, func, args, kwargs, key)
        except Exception as error:
            tell_of_failure_in(error, func, args, kwargs)
            raise

    return partial(_read, run) if op.name == "replicate" else run


def _read(run: Callable[[Any, tuple, dict], Any], func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operation whose results are values for the program, such as ``item``."""
    call = partial(run, func, args, kwargs)
    layouts = [x._layout for x in args if getattr(x, "_layout", None) is not None and not x._layout.replicated]
    return read_by_all(f"{name_of(func)}()", layouts[0], call) if layouts else call()


#: entry of the op table -> `call_key` -> `remembered_call`.
CALLS: dict[NativeOp, dict[tuple, Callable[[Any, tuple, dict], Any]]] = {}
_RUNS = Table(_make_run, _MAX_RECIPES)


def _run_without_row(func: Any, args: tuple, kwargs: dict) -> Any:
    op = find_custom_op(func)
    if op is not None:
        return _RUNS[op](func, args, kwargs)
    try:
        return run_gathered(func, args, kwargs)
    except Exception as error:
        tell_of_failure_in(error, func, args, kwargs)
        raise


def _run_first(op: NativeOp, func: Any, args: tuple, kwargs: dict, key: tuple | None) -> Any:
    """Run a call that is not cached, and cache it under ``key``, unless ``key`` is None or ambiguous."""
    canonical = OPERATIONS.get(op.name)
    if canonical is None:
        raise ValueError(f"the op table maps {name_of(func)} to {op.name!r}, which is not a canonical operation")
    operands, static_args = bind_of(op)(func, args, kwargs)
    layouts = tuple([operand_key(x) for x in operands])
    if canonical.loss:
        operands = distribute_targets(operands)
        layouts = tuple([operand_key(x) for x in operands])
    recipe = _find_recipe(op, canonical, func, operands, layouts, static_args)
    if recipe is None:
        if canonical.elementwise:
            check_parts(func, layouts)
        return run_gathered(func, args, kwargs, op)
    if key is not None:
        remembered = remembered_call(key, canonical, args, kwargs, operands, recipe, static_args)
        if remembered is not None:
            CALLS[op][key] = remembered
    return recipe(func, operands, static_args)


def _find_recipe(
    op: NativeOp, canonical: CanonicalOp, func: Any, operands: tuple, layouts: tuple, static_args: Any
) -> _Recipe | None:
    """Return the recipe for operands of these layouts, or None where they must be gathered."""
    key = (op, layouts) if canonical.elementwise else (op, layouts, static_args)
    recipe = _RECIPES.get(key)
    if recipe is None and not canonical.gathers:
        recipe = _make_recipe(op, canonical, func, operands, layouts, static_args)
        if recipe is not None:
            _RECIPES[key] = recipe
    return recipe


#: The argument of `Platform.make_dtensor_class`.
dispatch = _Dispatch()


def _make_recipe(
    op: NativeOp, canonical: CanonicalOp, func: Any, operands: tuple, layouts: tuple, static_args: Any
) -> _Recipe | None:
    mesh = common_mesh(layouts, func)
    if mesh is None:
        return None
    if not canonical.elementwise:  # element-wise operations also run on the empty tensors of ranks outside the mesh
        mesh.require_member(name_of(func))
    plain = tuple(i for i, key in enumerate(layouts) if isinstance(key, tuple))
    for i in plain:
        refuse_foreign(operands[i], mesh.platform, name_of(func))
        if layouts[i] and not is_implicit_replication():
            raise mixed_error(func, operands, i, canonical)
    known = tuple(replicated_layout(mesh, key) if isinstance(key, tuple) else key for key in layouts)
    shapes = tuple(None if layout is None else tuple(layout.shape) for layout in known)
    sharding = canonical.rule(shapes, static_args)
    if sharding is None:
        return None
    strategy = solve(sharding, known, mesh, pinned=0 if op.in_place else None)
    if strategy is None:
        raise write_error(func, layouts[0])
    return _Recipe(op, canonical, known, plain, sharding, strategy, static_args, mesh, name_of(func))
