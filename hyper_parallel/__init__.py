"""HyperParallel: tensor-parallelise a model once, run it on PyTorch (CPU, CUDA, Ascend NPU) and on MindSpore.

The public names are those of ``torch.distributed.tensor`` and ``torch.distributed.tensor.parallel``; an import line is
all that changes. They are resolved when first used, so that ``import hyper_parallel`` imports no framework.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME_OF = {
    "CollectiveError": "hyper_parallel.core.dtensor.communication.errors",
    "CommDebugMode": "hyper_parallel.debug",
    "ColwiseParallel": "hyper_parallel.core.tensor_parallel.style",
    "DTensor": "hyper_parallel.core.dtensor.dtensor",
    "DeviceMesh": "hyper_parallel.core.dtensor.device_mesh",
    "HeadNormParallel": "hyper_parallel.core.tensor_parallel.style",
    "ModuleStyle": "hyper_parallel.core.tensor_parallel.style",
    "NoParallel": "hyper_parallel.core.tensor_parallel.style",
    "OpSharding": "hyper_parallel.core.dtensor.operations.op_sharding",
    "PackedShard": "hyper_parallel.core.dtensor.placement_types",
    "ParallelStyle": "hyper_parallel.core.tensor_parallel.style",
    "ParameterParallel": "hyper_parallel.core.tensor_parallel.style",
    "Partial": "hyper_parallel.core.dtensor.placement_types",
    "Placement": "hyper_parallel.core.dtensor.placement_types",
    "Platform": "hyper_parallel.platform",
    "PrepareModuleInput": "hyper_parallel.core.tensor_parallel.style",
    "PrepareModuleInputOutput": "hyper_parallel.core.tensor_parallel.style",
    "PrepareModuleOutput": "hyper_parallel.core.tensor_parallel.style",
    "RankMismatchError": "hyper_parallel.core.dtensor.communication.errors",
    "Replicate": "hyper_parallel.core.dtensor.placement_types",
    "RowwiseParallel": "hyper_parallel.core.tensor_parallel.style",
    "SequenceParallel": "hyper_parallel.core.tensor_parallel.style",
    "Shard": "hyper_parallel.core.dtensor.placement_types",
    "available_platforms": "hyper_parallel.platform",
    "check_ranks": "hyper_parallel.core.dtensor.communication.rank_check",
    "coalesce_gradients": "hyper_parallel.core.dtensor.communication.coalesce",
    "distribute_module": "hyper_parallel.core.dtensor.dtensor",
    "distribute_parameter": "hyper_parallel.core.dtensor.dtensor",
    "distribute_tensor": "hyper_parallel.core.dtensor.dtensor",
    "empty": "hyper_parallel.core.dtensor.factories",
    "full": "hyper_parallel.core.dtensor.factories",
    "get_platform": "hyper_parallel.platform",
    "implicit_replication": "hyper_parallel.core.dtensor.operations.modes",
    "init_device_mesh": "hyper_parallel.core.dtensor.device_mesh",
    "loss_parallel": "hyper_parallel.core.tensor_parallel.loss",
    "manual_seed": "hyper_parallel.core.dtensor.operations.random",
    "ones": "hyper_parallel.core.dtensor.factories",
    "overlap_collectives": "hyper_parallel.core.tensor_parallel.overlap",
    "parallelize_module": "hyper_parallel.core.tensor_parallel.api",
    "rand": "hyper_parallel.core.dtensor.factories",
    "randn": "hyper_parallel.core.dtensor.factories",
    "register_platform": "hyper_parallel.platform",
    "register_sharding": "hyper_parallel.core.dtensor.operations.custom_ops",
    "register_style": "hyper_parallel.core.tensor_parallel.style",
    "strict": "hyper_parallel.core.dtensor.operations.modes",
    "vocab_parallel_cross_entropy": "hyper_parallel.core.tensor_parallel.loss",
    "zeros": "hyper_parallel.core.dtensor.factories",
}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hyper_parallel' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
