"""`RowwiseParallel`, and row-parallel linear layers as the local operation and the collectives that the plan fixed.

As `colwise`. With the output sharded along the sequence: Korthikanti et al. 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.communication.redistribute import plan_redistribution
from hyper_parallel.core.communication.transitions import one_summand, summation
from hyper_parallel.core.dtensor.tensor import dtensor_class
from hyper_parallel.core.layouts.layout import Layout, get_layout
from hyper_parallel.core.layouts.placement_types import PackedShard, Partial, Placement, Replicate, Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel.program.compiled import describe_weight
from hyper_parallel.core.tensor_parallel.program.local_forward import LocalForward
from hyper_parallel.core.tensor_parallel.program.overlap import overlapped_first
from hyper_parallel.core.tensor_parallel.program.uneven_shards import HANDED_OUT
from hyper_parallel.core.tensor_parallel.styles.base import is_placed
from hyper_parallel.core.tensor_parallel.styles.weight import WeightParallel
from hyper_parallel.platform.contract import NOTHING_FASTER, CompiledForward


class RowwiseParallel(WeightParallel):
    """Shard the input features of a linear module, or the vocabulary of an embedding.

    The weight (out, in) of a linear module is sharded on ``in``, its bias replicated. The weight (vocabulary, features)
    of an embedding is sharded on ``vocabulary``. Each rank computes a summand of the output: one all-reduce in forward
    (or a reduce-scatter, with a sharded ``output_layouts``), none in backward.

    Args:
        input_layouts: placement of a plain input; default ``Shard(-1)``. A DTensor brings its own.
        output_layouts: placement of the output; default ``Replicate()``.
        use_local_output: give the output as a plain local tensor.
        packed: for a weight whose input features are several groups one after the other: the size of each group, or the
            number of equal ones. Each is sharded on its own, and ``Shard(-1)`` as ``input_layouts`` then means
            `PackedShard`.
        heads: number of attention heads in the input features: checked, so that every rank gets whole heads.

    Raises:
        TypeError: when a layout is no placement, or a number no int. ValueError: for more than one layout, or numbers
            that contradict each other; when applied, for heads that the ranks cannot share evenly.

    Example:
        >>> from hyper_parallel import RowwiseParallel, Shard
        >>> RowwiseParallel(output_layouts=Shard(1)).input_layouts
        (Shard(dim=-1),)

    Source: ``torch.distributed.tensor.parallel.RowwiseParallel``; Megatron-LM (Shoeybi et al. 2019).
    """

    _splits_outputs = False
    _embedding = Shard(0)
    input_layouts: tuple[Placement] = (Shard(-1),)
    desired_input_layouts: tuple[Placement] = (Shard(-1),)
    output_layouts: tuple[Placement] = (Replicate(),)

    def compiled_forward(self, module: Any, mesh: DeviceMesh) -> CompiledForward | None:
        return describe_weight(self, module, mesh, "row")

    def local_forward(self, module: Any, forward: Callable[..., Any], mesh: DeviceMesh) -> LocalForward | None:
        given, desired, use_local = self.input_layouts[0], self.output_layouts[0], self.use_local_output
        unknown = desired.is_partial() or type(desired) is PackedShard
        layouts = None if unknown else self._known_layouts(module, mesh)
        if layouts is None:
            return None
        local = _row_forward(mesh, *layouts, desired, given is Shard(-1), use_local)
        return overlapped_first(local, mesh, *layouts, given, desired, use_local)


def _row_forward(
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

    def output_of(x: Any) -> tuple[Any, Layout] | None:
        """Return the function that makes the output of this rank's summand, and the layout of the output.

        ``x`` is the global shape or the layout of the input. None where its placement is another than planned.
        """
        shape = tuple(x.shape) if isinstance(x, Layout) else x
        ndim = len(shape)
        if isinstance(x, Layout) and not is_placed(x, mesh, shard.with_dim(ndim - 1)):  # type: ignore[attr-defined]
            return None
        if isinstance(desired, Shard) and not 0 <= desired.dim % max(ndim, 1) < ndim - 1:
            return None
        summands = get_layout(mesh, (Partial(),), (*shape[:-1], features))
        output = summands.with_placements((desired,))
        if use_local_output:
            HANDED_OUT[output]
        return None if whole else plan_redistribution(summands, output)[0].bind(), output

    outputs = Table(output_of)
    distributed: Any = dtensor_class(platform)

    def run(module: Any, x: Any) -> Any:
        output = outputs[x._layout if type(x) is distributed else x.shape]
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

    return LocalForward(run if takes_plain else None, run, gives=desired)


def _add(y: Any, bias: Any, platform: Any) -> Any:
    # Not the operator: Python would ask the class of the distributed bias first.
    z = y.add(bias)
    # Automatic mixed precision computes in another dtype than that of the parameters.
    return z if z.dtype == y.dtype else y.add(platform.to_dtype(bias, y.dtype))
