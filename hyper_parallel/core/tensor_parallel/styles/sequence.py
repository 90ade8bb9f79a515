"""`SequenceParallel`: norms and dropout on an input that is sharded along the sequence."""

from __future__ import annotations

from hyper_parallel.core.layouts.placement_types import Shard
from hyper_parallel.core.tensor_parallel.program.convert import check_tensor_dim
from hyper_parallel.core.tensor_parallel.styles.base import ModuleStyle, check_flag


class SequenceParallel(ModuleStyle):
    """Run a module, such as a norm or dropout, on an input that is sharded along the sequence.

    The parameters of the module are replicated. Their gradients are reduced over the mesh automatically. The output is
    sharded like the input.

    Args:
        sequence_dim: tensor dimension of the sequence, which is sharded.
        use_local_output: return the output as a plain local tensor.

    Raises:
        TypeError: if ``sequence_dim`` is not an int.
        ValueError: for a dimension that no tensor has.

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
