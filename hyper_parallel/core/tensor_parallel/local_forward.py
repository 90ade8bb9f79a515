"""Parallel linear layers as the local operation and the collectives that the plan fixed, nothing else.

Megatron's column- and row-parallel linear layers (Shoeybi et al. 2019; with the sequence sharded Korthikanti et al.
2022) as functions of the module, so that a copy of the module computes with its own parameters. They stand for the
conversions of the style and the dispatch of the operation where both are known beforehand: for a plain input, and for
a distributed one that is placed as the style wants it. What either would look up is looked up once for each shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.dtensor.communication.redistribute import (
    linear_input_view,
    linear_key,
    parameter_view,
    partial_grad_view,
    plan_redistribution,
)
from hyper_parallel.core.dtensor.communication.transitions import one_summand, summation
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.layouts.chunking import shard_sizes
from hyper_parallel.core.dtensor.layouts.layout import Layout, get_layout
from hyper_parallel.core.dtensor.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.core.tensor_parallel.held import layouts_held
from hyper_parallel.core.tensor_parallel.lengths import HANDED_OUT
from hyper_parallel.platform.contract import NOTHING_FASTER

__all__ = ["LocalForward", "column_forward", "norm_forward", "row_forward"]

_FIRST = (0,)
_shape_of, _layout_of = attrgetter("shape"), attrgetter("_layout")


@dataclass(frozen=True)
class LocalForward:
    """What a module runs in place of its forward, by what its only input is.

    Both give NotImplemented, having done nothing, for an input that they do not know, and for a module whose parameters
    are not those of the plan any more: something else was put in their place, or computes them (a parametrization).

    Attributes:
        plain: ``plain(module, x)`` for a plain tensor, None where the style must look at it.
        distributed: ``distributed(module, x)`` for a DTensor.
    """

    plain: Callable[[Any, Any], Any] | None
    distributed: Callable[[Any, Any], Any]


def column_forward(
    mesh: DeviceMesh, of_weight: Layout, of_bias: Layout | None, takes_plain: bool, use_local_output: bool
) -> LocalForward:
    """``x`` (..., in), the same on every rank -> this rank's features (..., out / ranks).

    The gradient of ``x`` is all-reduced, once for all such layers that read it; or reduce-scattered, where ``x`` was
    gathered from shards.

    Args:
        mesh: 1-D mesh.
        of_weight, of_bias: layouts of the weight and of the bias, None without one.
        takes_plain: whether a plain input is as described.
        use_local_output: give a plain tensor.
    """
    platform = mesh.platform
    linear, no_dispatch = (platform.fast or NOTHING_FASTER).linear, platform.no_dispatch
    own_parameters = platform.own_parameters
    wrap, view = platform.wrap, linear_input_view(mesh, _FIRST)
    read_cache, key = platform.read_cache, linear_key(mesh, _FIRST)
    (shard,), features = of_weight.placements, of_weight.shape[0]

    def output_of(shape: tuple[int, ...]) -> Layout:
        placement = shard.with_dim(len(shape) - 1)  # type: ignore[attr-defined]
        return get_layout(mesh, (placement,), (*shape[:-1], features))

    by_shape = Table(output_of)
    by_layout = Table(lambda x: output_of(tuple(x.shape)) if x.ndim and _is_placed(x, mesh, Replicate()) else None)

    def plain(module: Any, x: Any) -> Any:
        own: Any = own_parameters(module)
        weight, bias = own.get("weight"), own.get("bias")
        try:
            if weight._layout is not of_weight or (bias is not of_bias and bias._layout is not of_bias):
                return NotImplemented
        except AttributeError:  # plain, or not there
            return NotImplemented
        with no_dispatch():
            rows = view(x, weight)
            y = linear(rows, weight, bias)
            y = y if rows.ndim == x.ndim else y.view(*by_shape[x.shape].local_shape)
            return y if use_local_output else wrap(y, by_shape[x.shape])

    def distributed(module: Any, x: Any) -> Any:
        output = by_layout[x._layout]
        if output is None:
            return NotImplemented
        own: Any = own_parameters(module)
        weight, bias = own.get("weight"), own.get("bias")
        try:
            if weight._layout is not of_weight or (bias is not of_bias and bias._layout is not of_bias):
                return NotImplemented
        except AttributeError:  # plain, or not there
            return NotImplemented
        with no_dispatch():
            if x._gathered is None:
                rows = view(x if x._origin is None else x._origin, weight)
            else:
                rows = read_cache(x, key)
                rows = partial_grad_view(x, _FIRST) if rows is None else rows
            y, local_shape = linear(rows, weight, bias), output.local_shape
            y = y if rows.ndim == len(local_shape) else y.view(*local_shape)
            return y if use_local_output else wrap(y, output)

    return LocalForward(plain if takes_plain else None, distributed)


def row_forward(
    mesh: DeviceMesh,
    of_weight: Layout,
    of_bias: Layout | None,
    desired: Placement,
    takes_plain: bool,
    use_local_output: bool,
) -> LocalForward:
    """``x`` (..., in / ranks), this rank's features -> (..., out), summed over the ranks: the same on every rank by one
    all-reduce, or sharded by one reduce-scatter. The bias is added once.

    Args:
        mesh: 1-D mesh.
        of_weight, of_bias: layouts of the weight and of the bias, None without one.
        desired: `Replicate`, or a `Shard` of another dimension than the features.
        takes_plain: whether a plain input is as described.
        use_local_output: give a plain tensor.
    """
    platform = mesh.platform
    linear, no_dispatch = (platform.fast or NOTHING_FASTER).linear, platform.no_dispatch
    own_parameters = platform.own_parameters
    whole = desired is Replicate()
    all_reduce, of_one_rank, wrap = summation(mesh, 0).in_place, one_summand(mesh, 0), platform.wrap
    (shard,), features = of_weight.placements, of_weight.shape[0]

    def output_of(shape: tuple[int, ...]) -> tuple[Any, Layout] | None:
        """For the global shape of an input: the function from summands to shards, and the layout of the output; None
        where they are not as described."""
        ndim = len(shape)
        if isinstance(desired, Shard) and not 0 <= desired.dim % max(ndim, 1) < ndim - 1:
            return None
        summands = get_layout(mesh, (Partial(),), (*shape[:-1], features))
        output = summands.with_placements((desired,))
        if use_local_output:
            HANDED_OUT[output]
        return None if whole else plan_redistribution(summands, output)[0].bind(), output

    def output_of_layout(x: Layout) -> tuple[Any, Layout] | None:
        return output_of(tuple(x.shape)) if _is_placed(x, mesh, shard.with_dim(x.ndim - 1)) else None  # type: ignore[attr-defined]

    by_shape, by_layout = Table(output_of), Table(output_of_layout)

    def with_output_from(table: Table, key_of: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        def run(module: Any, x: Any) -> Any:
            output = table[key_of(x)]
            if output is None:
                return NotImplemented
            own: Any = own_parameters(module)
            weight, bias = own.get("weight"), own.get("bias")
            try:
                if weight._layout is not of_weight or (bias is not of_bias and bias._layout is not of_bias):
                    return NotImplemented
            except AttributeError:  # plain, or not there
                return NotImplemented
            with no_dispatch():
                if whole:
                    y = all_reduce(linear(x, weight, None))
                    y = y if bias is None else _add(y, bias, platform)
                else:
                    # In one of the summands, of which every rank gets the whole gradient back.
                    y = output[0](linear(x, weight, None if bias is None else of_one_rank(bias)))
                return y if use_local_output else wrap(y, output[1])

        return run

    return LocalForward(
        with_output_from(by_shape, _shape_of) if takes_plain else None, with_output_from(by_layout, _layout_of)
    )


def norm_forward(
    mesh: DeviceMesh, norm: Any, forward: Callable[[Any, Any], Any], dim: int, normalized: int, use_local_output: bool
) -> LocalForward:
    """A norm of replicated parameters on a shard of dimension ``dim``, which is none of those that it normalises.

    A shard gives a part of the parameters' gradients, which are all-reduced.

    Args:
        mesh: 1-D mesh.
        norm: the module.
        forward: forward of its class.
        dim: sharded dimension of the input.
        normalized: how many of the last dimensions are normalised.
        use_local_output: give a plain tensor.
    """
    platform = mesh.platform
    no_dispatch, own_parameters, wrap = platform.no_dispatch, platform.own_parameters, platform.wrap
    view, call = parameter_view(mesh, 0), (platform.fast or NOTHING_FASTER).norm_call(norm)
    planned = tuple(layouts_held(own_parameters(norm)).items())

    def shard_of(ndim: int) -> Placement | None:
        place = dim + ndim if dim < 0 else dim
        return Shard(place) if 0 <= place < ndim - normalized else None

    def layout_of_shards(shape: tuple[int, ...]) -> Layout | None:
        """The layout of which ``shape`` is a shard of the same size as all others."""
        shard: Any = shard_of(len(shape))
        if shard is None or 0 in shape:
            return None
        whole = (*shape[: shard.dim], shape[shard.dim] * mesh.size(), *shape[shard.dim + 1 :])
        return get_layout(mesh, (shard,), whole)

    def known_layout(layout: Layout) -> Layout | None:
        """``layout`` itself, or None where a rank has no elements: kernels for nothing are not to be relied on, and all
        ranks must go one way."""
        placement: Any = shard_of(layout.ndim)
        if placement is None or not _is_placed(layout, mesh, placement):
            return None
        if 0 in shard_sizes(placement, layout.shape[placement.dim], mesh.size()):
            return None
        if use_local_output:
            HANDED_OUT[layout]
        return layout

    by_shape = Table(layout_of_shards)
    by_layout = Table(known_layout)

    def run_with_views(module: Any, x: Any, own: Any) -> Any:
        """The module's own forward, which finds the views where its parameters are."""
        kept = tuple(own.items())
        try:
            for name, p in kept:
                own[name] = p if p is None else view(p)
            return forward(module, x)
        finally:
            own.update(kept)

    def with_layout_from(table: Table, key_of: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        def run(module: Any, x: Any) -> Any:
            layout = table[key_of(x)]
            if layout is None:
                return NotImplemented
            own: Any = own_parameters(module)
            if len(own) != len(planned):
                return NotImplemented
            for name, wanted in planned:
                p = own.get(name, own)
                if p is not None and getattr(p, "_layout", p) is not wanted:
                    return NotImplemented
            with no_dispatch():
                if call is None:
                    y = run_with_views(module, x, own)
                else:
                    y = call(module, x, {name: p if p is None else view(p) for name, p in own.items()})
                return y if use_local_output else wrap(y, layout)

        return run

    return LocalForward(with_layout_from(by_shape, _shape_of), with_layout_from(by_layout, _layout_of))


def _add(y: Any, bias: Any, platform: Any) -> Any:
    # Not the operator: Python would ask the class of the distributed bias first.
    z = y.add(bias)
    # Automatic mixed precision computes in another dtype than that of the parameters.
    return z if z.dtype == y.dtype else y.add(platform.to_dtype(bias, y.dtype))


def _is_placed(layout: Layout, mesh: DeviceMesh, placement: Placement) -> bool:
    return layout.mesh is mesh and layout.placements[0] is placement
