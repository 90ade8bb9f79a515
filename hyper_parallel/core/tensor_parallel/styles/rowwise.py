"""`RowwiseParallel`: the row-parallel layer of Megatron (Shoeybi et al. 2019).

An output that is sharded along the sequence is described by Korthikanti et al. 2022.
"""

from __future__ import annotations

from hyper_parallel.core.layouts.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.tensor_parallel.styles.weight import WeightParallel


class RowwiseParallel(WeightParallel):
    """Shard the input features of a linear module, or the vocabulary of an embedding.

    The weight (out, in) of a linear module is sharded on ``in``, and its bias is replicated. The weight (vocabulary,
    features) of an embedding is sharded on ``vocabulary``. Each rank computes a partial output. Forward has one
    all-reduce, or one reduce-scatter with a sharded ``output_layouts``. The all-reduce needs no communication in
    backward.

    Args:
        input_layouts: placement of a plain input; default ``Shard(-1)``. A DTensor input has its own placement.
        output_layouts: placement of the output; default ``Replicate()``.
        use_local_output: return the output as a plain local tensor.
        packed: for a weight whose input features are several consecutive groups. Give the size of each group, or the
            number of groups if they have equal sizes. Each group is sharded separately, and ``Shard(-1)`` as
            ``input_layouts`` means `PackedShard`.
        heads: number of attention heads in the input features. The style checks that every rank gets complete heads.

    Raises:
        TypeError: for a layout that is not a placement, or a number that is not an int.
        ValueError: for more than one layout, or numbers that contradict each other. When the style is applied, for
            heads that the ranks cannot share evenly.

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
