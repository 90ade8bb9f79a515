"""Fast eager path of programs, which computes on local tensors without operator dispatch.

It replaces the style's conversions and the dispatch of the operation. It takes plain tensors, and DTensors with the
placement that the operation needs. Layouts are computed once for each shape and cached. The path takes the module as
an argument, so a copy of the module computes with its own parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.communication.collectives import bind_all_reduce
from hyper_parallel.core.communication.read_past import made_with
from hyper_parallel.core.communication.redistribute import parameter_view, partial_grad_view, redistribution_steps
from hyper_parallel.core.communication.transitions import identity_reduce_grad, linear_key, one_summand, summation
from hyper_parallel.core.dtensor.tensor import DTensor, dtensor_class
from hyper_parallel.core.layouts.chunking import shard_sizes
from hyper_parallel.core.layouts.layout import Layout, get_layout
from hyper_parallel.core.layouts.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.plain_code.marks import is_even
from hyper_parallel.core.tensor_parallel.program.local_forward import LocalForward
from hyper_parallel.core.tensor_parallel.program.programs import placement_of
from hyper_parallel.core.tensor_parallel.program.uneven_shards import HANDED_OUT
from hyper_parallel.platform.contract import NOTHING_FASTER, cached_view
from hyper_parallel.platform.contract.programs import KEPT, SUMMANDS, Program, are_planned

_FIRST = (0,)
_WHOLE = Replicate()


def short_way(program: Program, module: Any, forward: Callable[[Any, Any], Any]) -> LocalForward | None:
    """Return the fast path of a linear layer with a sharded weight, or of a norm on a sharded input.

    The result is None for all other modules, linear layers of user-defined classes, and conversions without a fast
    path.

    Args:
        program: program of the module.
        module: the module.
        forward: forward of the class of ``module``.
    """
    mesh, platform, gives, wanted = program.mesh, program.mesh.platform, program.gives, program.wanted
    of_weight = program.layouts.get("weight")
    if gives == KEPT:
        fits = program.parameters_for_parts and program.takes == program.given and wanted == KEPT
    else:
        fits = bool(program.sizes) and (platform.fast or NOTHING_FASTER).is_plain_linear(module)
        fits = fits and (wanted != KEPT if gives == SUMMANDS else wanted in (-1, KEPT))
    if not fits or program.partial_features:
        return None
    cut: Any = Shard(0) if gives == KEPT else of_weight.placements[0]  # type: ignore[union-attr]
    takes: Any = program.takes
    sums, local, planned = gives == SUMMANDS, program.local, tuple(program.layouts.items())
    desired = placement_of(wanted) if sums else None  # type: ignore[arg-type]

    def output_of(x: Any) -> tuple[Any, Layout] | None:
        """Return the step that converts this rank's partial result to the output, and the layout of the output.

        ``x`` is the layout of a DTensor input, or the shape of a plain input. The result is None for an input that the
        path does not support, or if a rank's shard is empty. Kernels may fail for empty tensors, and all ranks must
        take the same path.
        """
        given, shape = isinstance(x, Layout), tuple(x.shape) if isinstance(x, Layout) else tuple(x)
        dims = len(shape) - program.whole_dims
        at: Any = None if takes is None else takes + len(shape) if takes < 0 else takes
        if not shape or (at is not None and not 0 <= at < dims):
            return None
        needed = _WHOLE if at is None else cut.with_dim(at)
        if given and (x.mesh is not mesh or x.placements[0] is not needed):
            return None
        step: Any = None
        if gives == KEPT:
            output = x if given else get_layout(mesh, (needed,), _whole_shape(shape, at, mesh))
            if 0 in shape or 0 in shard_sizes(needed, output.shape[at], mesh.size()):
                return None
        else:
            shape = (*shape[:-1], of_weight.shape[0])  # type: ignore[union-attr]
            if isinstance(desired, Shard) and not 0 <= desired.dim % len(shape) < len(shape) - 1:
                return None
            result = get_layout(mesh, (Partial() if sums else cut.with_dim(len(shape) - 1),), shape)
            output = result.with_placements((desired,)) if sums else result  # type: ignore[arg-type]
            if sums and desired is not _WHOLE:
                step = redistribution_steps(result, output)[0].bind()
        if local:
            HANDED_OUT[output]
        return step, output

    outputs, count, distributed = Table(output_of), len(planned), dtensor_class(platform)
    own_parameters, no_dispatch, wrap, fast = (
        platform.own_parameters, platform.no_dispatch, platform.wrap, platform.fast or NOTHING_FASTER
    )  # fmt: skip
    linear, view, view_of_parameter = fast.linear, _input_view(mesh), parameter_view(mesh, 0)
    all_reduce, of_one_rank = summation(mesh, 0).in_place, one_summand(mesh, 0)
    looks_up = gives != -1 or not local  # a plain column-parallel output needs no layout
    normalizes, whole, call = gives == KEPT, desired is _WHOLE, fast.norm_call(module)

    def run(module: Any, x: Any) -> Any:
        is_distributed = type(x) is distributed
        if is_distributed or looks_up:
            output = outputs[x._layout if is_distributed else x.shape]
            if output is None:
                return NotImplemented
        own: Any = own_parameters(module)
        if len(own) != count or not are_planned(own, planned, DTensor):
            return NotImplemented
        with no_dispatch():
            if normalizes:
                # The parameters' gradients are partial, because the input is sharded. They are all-reduced.
                views = {name: p if p is None else view_of_parameter(p) for name, p in own.items()}
                y = _run_with(views, forward, module, x, own) if call is None else call(module, x, views)
            elif whole:
                y, bias = all_reduce(linear(x, own["weight"], None)), own.get("bias")
                y = y if bias is None else _add(y, bias, platform)
            elif sums:
                # One rank's partial result includes the bias. Every rank gets the full gradient of the bias.
                bias = own.get("bias")
                y = output[0](linear(x, own["weight"], None if bias is None else of_one_rank(bias)))
            else:
                weight = own["weight"]
                if not is_distributed:
                    rows = view(x, weight)
                elif x._summands is not None:
                    rows = partial_grad_view(x, _FIRST)
                elif x._gathered is not None:
                    rows = made_with(x)
                    rows = partial_grad_view(x, _FIRST) if rows is None else rows
                elif x._origin is None:
                    rows = view(x, weight)
                else:
                    x._read_past = x._version
                    rows = view(x._origin, weight)
                y, ndim = (
                    linear(rows, weight, own.get("bias")),
                    len(output[1].local_shape) if is_distributed else x.ndim,
                )
                y = y if rows.ndim == ndim else y.view(*(output if is_distributed else outputs[x.shape])[1].local_shape)
            return y if local else wrap(y, output[1])

    takes_plain = program.given == takes
    compared = placement_of(program.given) if takes_plain and not sums else None
    followed: Placement | None = placement_of(program.given) if gives == KEPT else desired
    if gives == -1 and is_even(of_weight):  # type: ignore[arg-type]
        followed = cut.with_dim(-1)
    return LocalForward(run if takes_plain else None, run, compared, followed)


def _whole_shape(shape: tuple[int, ...], dim: int, mesh: DeviceMesh) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] * mesh.size(), *shape[dim + 1 :])


def _add(y: Any, bias: Any, platform: Any) -> Any:
    # Not ``y + bias``: Python would call the reflected operator of the bias, whose class is a subclass.
    z = y.add(bias)
    # With automatic mixed precision, the dtype of the result differs from that of the parameters.
    return z if z.dtype == y.dtype else y.add(platform.to_dtype(bias, y.dtype))


def _run_with(views: dict[str, Any], forward: Callable[[Any, Any], Any], module: Any, x: Any, own: Any) -> Any:
    """Run the module's forward with ``views`` in place of its parameters."""
    kept = dict(own)
    try:
        own.update(views)
        return forward(module, x)
    finally:
        own.update(kept)


def _input_view(mesh: DeviceMesh) -> Callable[[Any, Any], Any]:
    """Return ``view(x, weight)``, which all-reduces the cotangent of a replicated plain ``x`` over the 1-D ``mesh``.

    This is Megatron's function f. Linear layers that read the same ``x`` share the all-reduce. The view may be 2-D; see
    `Fast.linear_view`.
    """
    if mesh.size() == 1:
        return lambda x, weight: x
    platform = mesh.platform
    reduce, contiguous = bind_all_reduce(mesh, 0), platform.contiguous
    kept = cached_view(platform, identity_reduce_grad(mesh, _FIRST), (mesh, _FIRST))

    def reduced(cotangent: Any) -> Any:
        return reduce(contiguous(cotangent))

    fast = platform.fast or NOTHING_FASTER
    return fast.linear_view(reduced, summation(mesh, 0), linear_key(mesh, _FIRST), kept) or kept
