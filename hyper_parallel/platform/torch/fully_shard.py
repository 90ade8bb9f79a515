"""torch's `fully_shard` (FSDP2) on modules with distributed parameters: refused until data parallelism is built.

It takes a parameter for a plain tensor of the global shape and cuts it by rank, with operations on DTensors that differ
from rank to rank, so that ranks wait for each other or crash.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hyper_parallel.platform.torch.tensor import is_dtensor

__all__ = ["refuse_distributed_parameters"]


def refuse_distributed_parameters(make: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for ``FSDPParam._init_sharded_param``: it refuses DTensors, on all ranks, before it communicates."""

    @functools.wraps(make)
    def init_sharded_param(self: Any, param: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dtensor(param):
            raise TypeError(
                f"fully_shard cannot take over a parameter of shape {tuple(param.shape)} that is placed "
                f"{list(param.placements)} on {param.device_mesh}: hyper_parallel has no data parallelism that shards "
                "parameters. Use DistributedDataParallel over the data-parallel dimension of the mesh, or apply "
                "fully_shard to modules that parallelize_module does not touch"
            )
        return make(self, param, *args, **kwargs)

    return init_sharded_param
