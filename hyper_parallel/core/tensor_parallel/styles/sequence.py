"""`SequenceParallel`, and norms on a shard of the sequence as the local operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.communication.redistribute import parameter_view
from hyper_parallel.core.dtensor.tensor import dtensor_class
from hyper_parallel.core.layouts.chunking import shard_sizes
from hyper_parallel.core.layouts.layout import Layout, get_layout
from hyper_parallel.core.layouts.placement_types import Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel.program.compiled import describe
from hyper_parallel.core.tensor_parallel.program.convert import check_tensor_dim
from hyper_parallel.core.tensor_parallel.program.local_forward import LocalForward
from hyper_parallel.core.tensor_parallel.program.planned_parameters import layouts_of
from hyper_parallel.core.tensor_parallel.program.uneven_shards import HANDED_OUT
from hyper_parallel.core.tensor_parallel.styles.base import ModuleStyle, check_flag, is_placed
from hyper_parallel.platform.contract import NOTHING_FASTER, CompiledForward


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

    def compiled_forward(self, module: Any, mesh: DeviceMesh) -> CompiledForward | None:
        normalized = mesh.platform.normalized_dims(module)
        if normalized is None:
            return describe(self, module, mesh, "distributed")
        return describe(self, module, mesh, "parts", normalized=normalized)

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

    def output_of(x: Any) -> Layout | None:
        """The layout itself; for a shape, the layout whose shards all have that size. None where it is not as
        described, or a rank has no elements: kernels for nothing are not to be relied on, and all ranks must go one
        way."""
        shape = tuple(x.shape) if isinstance(x, Layout) else x
        dim = given.dim + len(shape) if given.dim < 0 else given.dim
        if not 0 <= dim < len(shape) - normalized:
            return None
        if not isinstance(x, Layout):
            whole = (*shape[:dim], shape[dim] * mesh.size(), *shape[dim + 1 :])
            return None if 0 in shape else get_layout(mesh, (Shard(dim),), whole)
        if not is_placed(x, mesh, Shard(dim)) or 0 in shard_sizes(Shard(dim), shape[dim], mesh.size()):
            return None
        if use_local_output:
            HANDED_OUT[x]
        return x

    outputs = Table(output_of)
    distributed: Any = dtensor_class(platform)

    def run_with_views(module: Any, x: Any, own: Any) -> Any:
        """The module's own forward, which finds the views where its parameters are."""
        kept = tuple(own.items())
        try:
            for name, p in kept:
                own[name] = p if p is None else view(p)
            return forward(module, x)
        finally:
            own.update(kept)

    def run(module: Any, x: Any) -> Any:
        output = outputs[x._layout if type(x) is distributed else x.shape]
        if output is None:
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
            return y if use_local_output else wrap(y, output)

    return LocalForward(run, run, given, given)
