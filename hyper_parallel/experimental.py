"""The names of ``torch.distributed.tensor.experimental``: `implicit_replication`, `local_map`, `register_sharding`."""

from hyper_parallel.core.dtensor.local_map import local_map
from hyper_parallel.core.modes import implicit_replication
from hyper_parallel.core.operations.custom_ops import register_sharding

__all__ = ["implicit_replication", "local_map", "register_sharding"]
