"""`SequenceParallel`, and norms on a shard of the sequence as the local operation."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.dtensor.communication.redistribute import parameter_view
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.layouts.chunking import shard_sizes
from hyper_parallel.core.dtensor.layouts.layout import Layout, get_layout
from hyper_parallel.core.dtensor.placement_types import Placement, Shard
from hyper_parallel.core.tensor_parallel.base import LocalForward, ModuleStyle, check_flag, is_placed
from hyper_parallel.core.tensor_parallel.convert import check_tensor_dim
from hyper_parallel.core.tensor_parallel.planned_parameters import layouts_of
from hyper_parallel.core.tensor_parallel.uneven_shards import HANDED_OUT
from hyper_parallel.platform.contract import NOTHING_FASTER

__all__ = ["SequenceParallel"]

_shape_of, _layout_of = attrgetter("shape"), attrgetter("_layout")


class SequenceParallel(ModuleStyle):
    """Run a module whose parameters are replicated on an input that is sharded along the sequence.

    For norms and dropout. The gradients of the parameters are reduced over the mesh without any user code.

    Args:
        sequence_dim: tensor dimension that is sharded.
        use_local_output: give the output as a plain local tensor.

    Raises:
        TypeError: when ``sequence_dim`` is no int. ValueError: for a dimension that no tensor has.

    Example:
        >>> from hyper_parallel import SequenceParallel
        >>> SequenceParallel()
        SequenceParallel(sequence_dim=1, use_local_output=False)

    Source: ``torch.distributed.tensor.parallel.SequenceParallel``; Korthikanti et al. 2022.
    """

    output_layouts = None

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        if not isinstance(sequence_dim, int) or isinstance(sequence_dim, bool):
            raise TypeError(f"SequenceParallel(sequence_dim=...) takes a tensor dimension, got {sequence_dim!r}")
        check_tensor_dim(sequence_dim, f"SequenceParallel(sequence_dim={sequence_dim})")
        self.sequence_dim = sequence_dim
        self.sequence_sharding = self.input_layouts = self.desired_input_layouts = (Shard(sequence_dim),)
        self.use_local_output = check_flag(use_local_output, "use_local_output", type(self).__name__)

    def local_forward(self, module: Any, forward: Callable[..., Any], mesh: DeviceMesh) -> LocalForward | None:
        normalized = mesh.platform.normalized_dims(module)
        if normalized is None:
            return None
        return _norm_forward(mesh, module, forward, self.sequence_sharding[0], normalized, self.use_local_output)


def _norm_forward(
    mesh: DeviceMesh,
    norm: Any,
    forward: Callable[[Any, Any], Any],
    given: Shard,
    normalized: int,
    use_local_output: bool,
) -> LocalForward:
    """A norm of replicated parameters on a shard of a dimension, which is none of those that it normalises.

    A shard gives a part of the parameters' gradients, which are all-reduced.

    Args:
        mesh: 1-D mesh.
        norm: the module.
        forward: forward of its class.
        given: placement of the input.
        normalized: how many of the last dimensions are normalised.
        use_local_output: give a plain tensor.
    """
    platform = mesh.platform
    no_dispatch, own_parameters, wrap = platform.no_dispatch, platform.own_parameters, platform.wrap
    view, call = parameter_view(mesh, 0), (platform.fast or NOTHING_FASTER).norm_call(norm)
    planned = tuple(layouts_of(own_parameters(norm)).items())

    def shard_of(ndim: int) -> Placement | None:
        dim = given.dim + ndim if given.dim < 0 else given.dim
        return Shard(dim) if 0 <= dim < ndim - normalized else None

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
        if placement is None or not is_placed(layout, mesh, placement):
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

    return LocalForward(with_layout_from(by_shape, _shape_of), with_layout_from(by_layout, _layout_of), given)
