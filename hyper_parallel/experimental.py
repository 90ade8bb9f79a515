"""The names of ``torch.distributed.tensor.experimental``: `implicit_replication`, `local_map`, `register_sharding`."""

from hyper_parallel.core.dtensor.local_map import local_map
from hyper_parallel.core.dtensor.operations.custom_ops import register_sharding
from hyper_parallel.core.dtensor.operations.modes import implicit_replication

__all__ = ["implicit_replication", "local_map", "register_sharding"]
