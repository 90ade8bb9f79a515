"""`SequenceParallel`: norms and dropout on a shard of the sequence."""

from __future__ import annotations

from hyper_parallel.core.layouts.placement_types import Shard
from hyper_parallel.core.tensor_parallel.program.convert import check_tensor_dim
from hyper_parallel.core.tensor_parallel.styles.base import ModuleStyle, check_flag


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
