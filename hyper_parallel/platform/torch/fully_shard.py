"""torch's `fully_shard` (FSDP2) on modules with distributed parameters: refused until data parallelism is built.

It takes a parameter for a plain tensor of the global shape and cuts it by rank, with operations on DTensors that differ
from rank to rank, so that ranks wait for each other or crash.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from hyper_parallel.platform.torch.tensor import is_dtensor

__all__ = ["FSDP_PARAMETERS", "refuse_distributed_parameters"]

#: The module whose class makes a parameter torch's own. Importing it takes seconds, so nobody does it for this alone.
FSDP_PARAMETERS = "torch.distributed.fsdp._fully_shard._fsdp_param"


def refuse_distributed_parameters(module: Any = None) -> None:
    """Let `fully_shard` refuse DTensors, on all ranks, before it communicates. Does nothing when called again.

    Args:
        module: `FSDP_PARAMETERS`; by default what is imported under that name, if it is.
    """
    cls = getattr(module or sys.modules.get(FSDP_PARAMETERS), "FSDPParam", None)
    make = getattr(cls, "_init_sharded_param", None)
    if make is None or hasattr(make, "_refuses_dtensors"):
        return

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

    init_sharded_param._refuses_dtensors = True  # type: ignore[attr-defined]
    cls._init_sharded_param = init_sharded_param  # type: ignore[union-attr]
