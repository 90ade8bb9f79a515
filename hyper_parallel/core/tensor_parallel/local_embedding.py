"""Parallel embeddings: the local look-up and the collective that the plan fixed, as in `colwise`.

The weight is sharded along the features, or along the vocabulary (Shoeybi et al. 2019).
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.communication.redistribute import plan_redistribution
from hyper_parallel.core.dtensor.communication.transitions import summation
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.layouts.layout import Layout, get_layout
from hyper_parallel.core.dtensor.operations.rules.embedding import look_up
from hyper_parallel.core.dtensor.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.core.tensor_parallel.base import LocalForward
from hyper_parallel.core.tensor_parallel.uneven_shards import HANDED_OUT
from hyper_parallel.platform.contract import NOTHING_FASTER


def embedding_forward(
    mesh: DeviceMesh, embedding: Any, weight: Layout, desired: Placement, takes_plain: bool, use_local_output: bool
) -> LocalForward:
    """Ids (...), the same on every rank -> (..., features).

    Features sharded: this rank's, without communication. Vocabulary sharded: zeros for the ids of others, summed over
    the ranks, by an all-reduce or, for a sharded output, a reduce-scatter.

    Args:
        mesh: 1-D mesh.
        embedding: the module.
        weight: layout of the weight (vocabulary, features).
        desired: placement of the output.
        takes_plain: whether plain ids are as described.
        use_local_output: give a plain tensor.
    """
    platform = mesh.platform
    fast = platform.fast or NOTHING_FASTER
    own_parameters, no_dispatch = platform.own_parameters, platform.no_dispatch
    all_reduce, wrap = summation(mesh, 0).in_place, platform.wrap
    name = platform.kind_of(embedding).weight
    by_features = weight.placements[0] is Shard(1)
    layouts = (None, weight)

    def native(operands: tuple, static_args: tuple) -> Any:
        return fast.embedding(*operands)

    def forward(module: Any, ids: Any) -> Any:
        matrix = own_parameters(module).get(name)
        if getattr(matrix, "_layout", None) is not weight:  # something else has taken its place, or computes it
            return NotImplemented
        shape = (*ids.shape, weight.shape[1])
        ndim = len(shape)
        if by_features:
            output = get_layout(mesh, (Shard(ndim - 1),), shape)
        elif isinstance(desired, Shard) and not 0 <= desired.dim % ndim < ndim - 1:
            return NotImplemented
        else:
            summands = get_layout(mesh, (Partial(),), shape)
            output = summands.with_placements((desired,))
            if use_local_output:
                HANDED_OUT[output]
        with no_dispatch():
            if by_features:
                y = fast.embedding(ids, matrix)
            else:
                y = look_up(platform, native, (ids, matrix), (None,), layouts, (output,))
                y = all_reduce(y) if desired is Replicate() else plan_redistribution(summands, output)[0](y)
            return y if use_local_output else wrap(y, output)

    def distributed(module: Any, ids: Any) -> Any:
        layout = ids._layout
        return forward(module, ids) if layout.mesh is mesh and layout.replicated else NotImplemented

    return LocalForward(forward if takes_plain else None, distributed)
