"""HyperParallel: tensor-parallelise a model once, run it on PyTorch (CPU, CUDA, Ascend NPU) and on MindSpore.

The public names are those of ``torch.distributed.tensor`` and ``torch.distributed.tensor.parallel``; an import line is
all that changes. They are resolved when first used, so that ``import hyper_parallel`` imports no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hyper_parallel.namesake import refuse_namesake

refuse_namesake()

if TYPE_CHECKING:  # for type checkers and editors; `_HOME_OF` says the same at run time
    from hyper_parallel import checkpoint as checkpoint
    from hyper_parallel.core.data_parallel.forward_methods import (
        register_fsdp_forward_method as register_fsdp_forward_method,
    )
    from hyper_parallel.core.data_parallel.forward_methods import share_comm_ctx as share_comm_ctx
    from hyper_parallel.core.data_parallel.fully_shard import fully_shard as fully_shard
    from hyper_parallel.core.data_parallel.meshes import DataParallelMeshDims as DataParallelMeshDims
    from hyper_parallel.core.data_parallel.module_methods import FSDPModule as FSDPModule
    from hyper_parallel.core.data_parallel.module_methods import GradientReductionHandle as GradientReductionHandle
    from hyper_parallel.core.data_parallel.module_methods import UnshardHandle as UnshardHandle
    from hyper_parallel.core.data_parallel.policies import CPUOffloadPolicy as CPUOffloadPolicy
    from hyper_parallel.core.data_parallel.policies import MixedPrecisionPolicy as MixedPrecisionPolicy
    from hyper_parallel.core.data_parallel.policies import OffloadPolicy as OffloadPolicy
    from hyper_parallel.core.data_parallel.replicate import ReplicatedModule as ReplicatedModule
    from hyper_parallel.core.data_parallel.replicate import replicate as replicate
    from hyper_parallel.core.dtensor.communication.coalesce import coalesce_gradients as coalesce_gradients
    from hyper_parallel.core.dtensor.communication.errors import CollectiveError as CollectiveError
    from hyper_parallel.core.dtensor.communication.errors import RankMismatchError as RankMismatchError
    from hyper_parallel.core.dtensor.communication.rank_check import check_ranks as check_ranks
    from hyper_parallel.core.dtensor.device_mesh import DeviceMesh as DeviceMesh
    from hyper_parallel.core.dtensor.device_mesh import init_device_mesh as init_device_mesh
    from hyper_parallel.core.dtensor.dtensor import DTensor as DTensor
    from hyper_parallel.core.dtensor.dtensor import distribute_module as distribute_module
    from hyper_parallel.core.dtensor.dtensor import distribute_parameter as distribute_parameter
    from hyper_parallel.core.dtensor.dtensor import distribute_tensor as distribute_tensor
    from hyper_parallel.core.dtensor.factories import empty as empty
    from hyper_parallel.core.dtensor.factories import full as full
    from hyper_parallel.core.dtensor.factories import linspace as linspace
    from hyper_parallel.core.dtensor.factories import logspace as logspace
    from hyper_parallel.core.dtensor.factories import ones as ones
    from hyper_parallel.core.dtensor.factories import rand as rand
    from hyper_parallel.core.dtensor.factories import randn as randn
    from hyper_parallel.core.dtensor.factories import zeros as zeros
    from hyper_parallel.core.dtensor.local_map import local_map as local_map
    from hyper_parallel.core.dtensor.operations.custom_ops import register_sharding as register_sharding
    from hyper_parallel.core.dtensor.operations.modes import implicit_replication as implicit_replication
    from hyper_parallel.core.dtensor.operations.modes import strict as strict
    from hyper_parallel.core.dtensor.operations.op_sharding import OpSharding as OpSharding
    from hyper_parallel.core.dtensor.operations.random import manual_seed as manual_seed
    from hyper_parallel.core.dtensor.placement_types import PackedShard as PackedShard
    from hyper_parallel.core.dtensor.placement_types import Partial as Partial
    from hyper_parallel.core.dtensor.placement_types import Placement as Placement
    from hyper_parallel.core.dtensor.placement_types import Replicate as Replicate
    from hyper_parallel.core.dtensor.placement_types import Shard as Shard
    from hyper_parallel.core.dtensor.placement_types import StridedShard as StridedShard
    from hyper_parallel.core.dtensor.redistribution import (
        compute_local_shape_and_global_offset as compute_local_shape_and_global_offset,
    )
    from hyper_parallel.core.tensor_parallel.api import parallelize_module as parallelize_module
    from hyper_parallel.core.tensor_parallel.loss import loss_parallel as loss_parallel
    from hyper_parallel.core.tensor_parallel.loss import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from hyper_parallel.core.tensor_parallel.overlap import overlap_collectives as overlap_collectives
    from hyper_parallel.core.tensor_parallel.style import ColwiseParallel as ColwiseParallel
    from hyper_parallel.core.tensor_parallel.style import HeadNormParallel as HeadNormParallel
    from hyper_parallel.core.tensor_parallel.style import ModuleStyle as ModuleStyle
    from hyper_parallel.core.tensor_parallel.style import NoParallel as NoParallel
    from hyper_parallel.core.tensor_parallel.style import ParallelStyle as ParallelStyle
    from hyper_parallel.core.tensor_parallel.style import ParameterParallel as ParameterParallel
    from hyper_parallel.core.tensor_parallel.style import PrepareModuleInput as PrepareModuleInput
    from hyper_parallel.core.tensor_parallel.style import PrepareModuleInputOutput as PrepareModuleInputOutput
    from hyper_parallel.core.tensor_parallel.style import PrepareModuleOutput as PrepareModuleOutput
    from hyper_parallel.core.tensor_parallel.style import RowwiseParallel as RowwiseParallel
    from hyper_parallel.core.tensor_parallel.style import SequenceParallel as SequenceParallel
    from hyper_parallel.core.tensor_parallel.style import register_style as register_style
    from hyper_parallel.debug import CommDebugMode as CommDebugMode
    from hyper_parallel.debug import visualize_sharding as visualize_sharding
    from hyper_parallel.debug.comm_trace import CommTrace as CommTrace
    from hyper_parallel.debug.description import describe as describe
    from hyper_parallel.debug.plan_picture import visualize_plan as visualize_plan
    from hyper_parallel.planning.estimate import dry_run as dry_run
    from hyper_parallel.planning.explanation import explain as explain
    from hyper_parallel.platform import Platform as Platform
    from hyper_parallel.platform import available_platforms as available_platforms
    from hyper_parallel.platform import get_platform as get_platform
    from hyper_parallel.platform import register_platform as register_platform
    from hyper_parallel.testing.plan_check import check_plan as check_plan

__version__ = "0.1.0.dev0"  # the only place that says it: pyproject.toml reads it here

_HOME_OF = {
    "CPUOffloadPolicy": "hyper_parallel.core.data_parallel.policies",
    "CollectiveError": "hyper_parallel.core.dtensor.communication.errors",
    "ColwiseParallel": "hyper_parallel.core.tensor_parallel.style",
    "CommDebugMode": "hyper_parallel.debug",
    "CommTrace": "hyper_parallel.debug.comm_trace",
    "DTensor": "hyper_parallel.core.dtensor.dtensor",
    "DataParallelMeshDims": "hyper_parallel.core.data_parallel.meshes",
    "DeviceMesh": "hyper_parallel.core.dtensor.device_mesh",
    "FSDPModule": "hyper_parallel.core.data_parallel.module_methods",
    "GradientReductionHandle": "hyper_parallel.core.data_parallel.module_methods",
    "HeadNormParallel": "hyper_parallel.core.tensor_parallel.style",
    "MixedPrecisionPolicy": "hyper_parallel.core.data_parallel.policies",
    "ModuleStyle": "hyper_parallel.core.tensor_parallel.style",
    "NoParallel": "hyper_parallel.core.tensor_parallel.style",
    "OffloadPolicy": "hyper_parallel.core.data_parallel.policies",
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
    "ReplicatedModule": "hyper_parallel.core.data_parallel.replicate",
    "RowwiseParallel": "hyper_parallel.core.tensor_parallel.style",
    "SequenceParallel": "hyper_parallel.core.tensor_parallel.style",
    "Shard": "hyper_parallel.core.dtensor.placement_types",
    "StridedShard": "hyper_parallel.core.dtensor.placement_types",
    "UnshardHandle": "hyper_parallel.core.data_parallel.module_methods",
    "available_platforms": "hyper_parallel.platform",
    "check_plan": "hyper_parallel.testing.plan_check",
    "check_ranks": "hyper_parallel.core.dtensor.communication.rank_check",
    "checkpoint": "hyper_parallel",
    "coalesce_gradients": "hyper_parallel.core.dtensor.communication.coalesce",
    "compute_local_shape_and_global_offset": "hyper_parallel.core.dtensor.redistribution",
    "describe": "hyper_parallel.debug.description",
    "distribute_module": "hyper_parallel.core.dtensor.dtensor",
    "distribute_parameter": "hyper_parallel.core.dtensor.dtensor",
    "distribute_tensor": "hyper_parallel.core.dtensor.dtensor",
    "dry_run": "hyper_parallel.planning.estimate",
    "empty": "hyper_parallel.core.dtensor.factories",
    "explain": "hyper_parallel.planning.explanation",
    "full": "hyper_parallel.core.dtensor.factories",
    "fully_shard": "hyper_parallel.core.data_parallel.fully_shard",
    "get_platform": "hyper_parallel.platform",
    "implicit_replication": "hyper_parallel.core.dtensor.operations.modes",
    "init_device_mesh": "hyper_parallel.core.dtensor.device_mesh",
    "linspace": "hyper_parallel.core.dtensor.factories",
    "local_map": "hyper_parallel.core.dtensor.local_map",
    "logspace": "hyper_parallel.core.dtensor.factories",
    "loss_parallel": "hyper_parallel.core.tensor_parallel.loss",
    "manual_seed": "hyper_parallel.core.dtensor.operations.random",
    "ones": "hyper_parallel.core.dtensor.factories",
    "overlap_collectives": "hyper_parallel.core.tensor_parallel.overlap",
    "parallelize_module": "hyper_parallel.core.tensor_parallel.api",
    "rand": "hyper_parallel.core.dtensor.factories",
    "randn": "hyper_parallel.core.dtensor.factories",
    "register_fsdp_forward_method": "hyper_parallel.core.data_parallel.forward_methods",
    "register_platform": "hyper_parallel.platform",
    "register_sharding": "hyper_parallel.core.dtensor.operations.custom_ops",
    "register_style": "hyper_parallel.core.tensor_parallel.style",
    "replicate": "hyper_parallel.core.data_parallel.replicate",
    "share_comm_ctx": "hyper_parallel.core.data_parallel.forward_methods",
    "strict": "hyper_parallel.core.dtensor.operations.modes",
    "visualize_plan": "hyper_parallel.debug.plan_picture",
    "visualize_sharding": "hyper_parallel.debug",
    "vocab_parallel_cross_entropy": "hyper_parallel.core.tensor_parallel.loss",
    "zeros": "hyper_parallel.core.dtensor.factories",
}

__all__ = sorted(_HOME_OF)

if not TYPE_CHECKING:  # type checkers must not take any name for one that exists

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'hyper_parallel' has no attribute {name!r}")
        if _HOME_OF[name] == __name__:
            return importlib.import_module(f"{__name__}.{name}")
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
