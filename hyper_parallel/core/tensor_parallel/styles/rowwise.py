"""`RowwiseParallel`. With the output sharded along the sequence: Korthikanti et al. 2022."""

from __future__ import annotations

from hyper_parallel.core.layouts.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.tensor_parallel.styles.weight import WeightParallel


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
