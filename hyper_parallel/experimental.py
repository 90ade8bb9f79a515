"""The names of ``torch.distributed.tensor.experimental``, and further functions for long sequences."""

from hyper_parallel.core.dtensor.context_parallel import (
    context_parallel,
    context_parallel_unshard,
    set_rotate_method,
)
from hyper_parallel.core.dtensor.local_map import local_map
from hyper_parallel.core.modes import implicit_replication
from hyper_parallel.core.operations.custom_ops import register_sharding

__all__ = [
    "context_parallel",
    "context_parallel_unshard",
    "implicit_replication",
    "local_map",
    "register_sharding",
    "set_rotate_method",
]
