"""`ColwiseParallel`, and column-parallel linear layers as the local operation and the collectives that the plan fixed.

The layer of Megatron (Shoeybi et al. 2019). It does the work of the style's conversions and of the operation's dispatch
at once. It does so for a plain input and for a distributed one that is placed as the style wants it. Values that these
look up in every call are looked up once for each shape. It is a function of the module, so that a copy of the module
computes with its own parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.communication.collectives import bind_all_reduce
from hyper_parallel.core.communication.redistribute import made_with, partial_grad_view
from hyper_parallel.core.communication.transitions import identity_reduce_grad, linear_key, summation
from hyper_parallel.core.dtensor.tensor import dtensor_class
from hyper_parallel.core.layouts.layout import Layout, get_layout
from hyper_parallel.core.layouts.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.plain_code.marks import is_even
from hyper_parallel.core.rules.logit_shards import part_of_classes
from hyper_parallel.core.tensor_parallel.program.compiled import describe_weight
from hyper_parallel.core.tensor_parallel.program.convert import to_output
from hyper_parallel.core.tensor_parallel.program.heads import local_heads
from hyper_parallel.core.tensor_parallel.program.local_forward import LocalForward
from hyper_parallel.core.tensor_parallel.program.overlap import overlapped_first
from hyper_parallel.core.tensor_parallel.styles.base import is_placed
from hyper_parallel.core.tensor_parallel.styles.weight import WeightParallel
from hyper_parallel.platform.contract import NOTHING_FASTER, CompiledForward, cached_view

_FIRST = (0,)


class ColwiseParallel(WeightParallel):
    """Shard the output features of a linear module, or the features of an embedding.

    Weight (out, in) and bias (out,) of a linear module are sharded on ``out``. The weight (vocabulary, features) of an
    embedding is sharded on ``features``. No communication in forward, one all-reduce of the input's gradient in
    backward.

    Args:
        input_layouts: placement of a plain input; default ``Replicate()``. A DTensor brings its own.
        output_layouts: placement of the output; default ``Shard(-1)``.
        use_local_output: give the output as a plain local tensor.
        packed: for a weight that is several matrices in one (query, key and value; gate and up): the output features of
            each, or the number of equal ones. Each is sharded on its own, and ``Shard(-1)`` as ``output_layouts`` means
            `PackedShard`: taken apart with ``split`` or ``chunk``, each part is ``Shard(-1)``. ``packed=1`` says that
            the weight is one matrix though its shape looks like several: for example where query, key and value
            alternate head by head, so that consecutive features belong together.
        heads: number of attention heads in the output features: checked, so that every rank gets whole heads. A tuple
            is for a packed weight, one number for each part, and implies ``packed``.
        replicate_heads: for keys and values of fewer heads than there are ranks. Every rank keeps the whole weight, and
            a local output holds the one head that this rank's query heads use: each head is on ``ranks / heads`` ranks.

    Raises:
        TypeError: when a layout is no placement, or a number no int. ValueError: for more than one layout, or numbers
            that contradict each other; when applied, for heads that the ranks cannot share evenly.

    Example:
        >>> from hyper_parallel import ColwiseParallel, Replicate
        >>> ColwiseParallel(output_layouts=Replicate()).output_layouts
        (Replicate(),)

    Source: ``torch.distributed.tensor.parallel.ColwiseParallel``; Megatron-LM (Shoeybi et al. 2019).
    """

    _splits_outputs = True
    #: Whether the module returns a summand of its input's cotangent.
    reads_for_parts = True
    _embedding = Shard(1)
    input_layouts = desired_input_layouts = (Replicate(),)
    output_layouts = (Shard(-1),)

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        packed: int | Sequence[int] | None = None,
        heads: int | Sequence[int] | None = None,
        replicate_heads: bool = False,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
            packed=packed,
            heads=heads,
        )
        if replicate_heads and not isinstance(self.heads, int):
            raise ValueError(f"ColwiseParallel(replicate_heads=True) needs the number of heads, got heads={heads!r}")
        if replicate_heads:
            self.replicate_heads = replicate_heads

    def prepare_output(self, module: Any, y: Any, i: int, what: str, mesh: DeviceMesh) -> Any:
        desired: Placement | None = self.output_layouts[0]
        if desired is Shard(-1):
            whole = self._keeps_whole(mesh)
            if whole and self.use_local_output:
                return local_heads(y, self.heads, mesh)
            desired = None if whole or self._is_packed else desired
        return to_output(y, mesh, desired, self.use_local_output, what)

    def _new_forward(self, module: Any, forward: Callable[..., Any], mesh: DeviceMesh) -> Callable[..., Any]:
        new, head = super()._new_forward(module, forward, mesh), part_of_classes(module)
        return new if head is None else head.noting(new, module)

    def compiled_forward(self, module: Any, mesh: DeviceMesh) -> CompiledForward | None:
        return describe_weight(self, module, mesh, "column")

    def local_forward(self, module: Any, forward: Callable[..., Any], mesh: DeviceMesh) -> LocalForward | None:
        given, desired, use_local = self.input_layouts[0], self.output_layouts[0], self.use_local_output
        whole = self._keeps_whole(mesh) or desired is not Shard(-1)
        layouts = None if whole else self._known_layouts(module, mesh)
        if layouts is None:
            return None
        local = _column_forward(mesh, *layouts, given is Replicate(), use_local)
        return overlapped_first(local, mesh, *layouts, given, desired, use_local)


def _column_forward(
    mesh: DeviceMesh, of_weight: Layout, of_bias: Layout | None, takes_plain: bool, use_local_output: bool
) -> LocalForward:
    """``x`` (..., in), the same on every rank -> this rank's features (..., out / ranks).

    The gradient of ``x`` is all-reduced, once for all such layers that read it. It is reduce-scattered where ``x`` was
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
    wrap, view = platform.wrap, _input_view(mesh)
    (shard,), features = of_weight.placements, of_weight.shape[0]

    def output_of(shape: tuple[int, ...]) -> Layout:
        placement = shard.with_dim(len(shape) - 1)  # type: ignore[attr-defined]
        return get_layout(mesh, (placement,), (*shape[:-1], features))

    by_shape = Table(output_of)
    by_layout = Table(lambda x: output_of(tuple(x.shape)) if x.ndim and is_placed(x, mesh, Replicate()) else None)
    distributed: Any = dtensor_class(platform)

    def run(module: Any, x: Any) -> Any:
        output = None
        if type(x) is distributed:
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
            if output is None:
                rows, ndim = view(x, weight), x.ndim
            else:
                ndim = len(output.local_shape)
                gathered = x._gathered
                if x._summands is not None:
                    rows = partial_grad_view(x, _FIRST)
                elif gathered is None:
                    rows = view(x if x._origin is None else x._origin, weight)
                else:
                    rows = made_with(x, gathered)
                    rows = partial_grad_view(x, _FIRST) if rows is None else rows
            y = linear(rows, weight, bias)
            if rows.ndim == ndim and use_local_output:
                return y
            output = by_shape[x.shape] if output is None else output
            y = y if rows.ndim == ndim else y.view(*output.local_shape)
            return y if use_local_output else wrap(y, output)

    gives = shard.with_dim(-1) if is_even(of_weight) else None  # type: ignore[attr-defined]
    return LocalForward(run if takes_plain else None, run, Replicate() if takes_plain else None, gives)


def _input_view(mesh: DeviceMesh) -> Callable[[Any, Any], Any]:
    """`partial_grad_view` as ``view(x, weight)`` of plain tensors ``x`` that are the same on all ranks of the 1-D
    ``mesh``: Megatron's f, for linear layers, which share its all-reduce. It may be 2-D, see `Fast.linear_view`."""
    if mesh.size() == 1:
        return lambda x, weight: x
    platform = mesh.platform
    reduce, contiguous = bind_all_reduce(mesh, 0), platform.contiguous
    kept = cached_view(platform, identity_reduce_grad(mesh, _FIRST), (mesh, _FIRST))

    def reduced(cotangent: Any) -> Any:
        return reduce(contiguous(cotangent))

    fast = platform.fast or NOTHING_FASTER
    return fast.linear_view(reduced, summation(mesh, 0), linear_key(mesh, _FIRST), kept) or kept
