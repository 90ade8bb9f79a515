"""HyperParallel: parallelise a model once, and run it on PyTorch (CPU, CUDA, Ascend NPU) and on MindSpore.

The public names are those of ``torch.distributed.tensor`` and ``torch.distributed.tensor.parallel``, so that only an
import line changes. They are resolved at their first use: ``import hyper_parallel`` imports no framework.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from hyper_parallel.namesake import refuse_namesake
from hyper_parallel.platform.rank_messages import VARIABLE, leave_messages
from hyper_parallel.public_names import HOME_OF

refuse_namesake()
if VARIABLE in os.environ:
    leave_messages(os.environ)

if TYPE_CHECKING:  # for type checkers and editors; `HOME_OF` has the same names at run time
    from hyper_parallel import checkpoint as checkpoint
    from hyper_parallel.core.communication.coalesce import coalesce_gradients as coalesce_gradients
    from hyper_parallel.core.communication.errors import CollectiveError as CollectiveError
    from hyper_parallel.core.communication.errors import RankMismatchError as RankMismatchError
    from hyper_parallel.core.communication.rank_check import check_ranks as check_ranks
    from hyper_parallel.core.data_parallel.fully_shard import fully_shard as fully_shard
    from hyper_parallel.core.data_parallel.fully_shard import (
        register_fsdp_forward_method as register_fsdp_forward_method,
    )
    from hyper_parallel.core.data_parallel.fully_shard import share_comm_ctx as share_comm_ctx
    from hyper_parallel.core.data_parallel.module_methods import FSDPModule as FSDPModule
    from hyper_parallel.core.data_parallel.module_methods import GradientReductionHandle as GradientReductionHandle
    from hyper_parallel.core.data_parallel.module_methods import UnshardHandle as UnshardHandle
    from hyper_parallel.core.data_parallel.options import CPUOffloadPolicy as CPUOffloadPolicy
    from hyper_parallel.core.data_parallel.options import DataParallelMeshDims as DataParallelMeshDims
    from hyper_parallel.core.data_parallel.options import MixedPrecisionPolicy as MixedPrecisionPolicy
    from hyper_parallel.core.data_parallel.options import OffloadPolicy as OffloadPolicy
    from hyper_parallel.core.data_parallel.replicate import ReplicatedModule as ReplicatedModule
    from hyper_parallel.core.data_parallel.replicate import replicate as replicate
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
    from hyper_parallel.core.dtensor.redistribution import (
        compute_local_shape_and_global_offset as compute_local_shape_and_global_offset,
    )
    from hyper_parallel.core.dtensor.sequence_batches import shard_sequence as shard_sequence
    from hyper_parallel.core.dtensor.sequence_batches import token_mean as token_mean
    from hyper_parallel.core.layouts.placement_types import PackedShard as PackedShard
    from hyper_parallel.core.layouts.placement_types import Partial as Partial
    from hyper_parallel.core.layouts.placement_types import Placement as Placement
    from hyper_parallel.core.layouts.placement_types import Replicate as Replicate
    from hyper_parallel.core.layouts.placement_types import Shard as Shard
    from hyper_parallel.core.layouts.placement_types import StridedShard as StridedShard
    from hyper_parallel.core.layouts.placement_types import _StridedShard as _StridedShard
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh as DeviceMesh
    from hyper_parallel.core.mesh.device_mesh import init_device_mesh as init_device_mesh
    from hyper_parallel.core.modes import implicit_replication as implicit_replication
    from hyper_parallel.core.modes import strict as strict
    from hyper_parallel.core.operations.custom_ops import register_sharding as register_sharding
    from hyper_parallel.core.plain_code.api import check_plain_code as check_plain_code
    from hyper_parallel.core.rules.op_sharding import OpSharding as OpSharding
    from hyper_parallel.core.rules.random import manual_seed as manual_seed
    from hyper_parallel.core.tensor_parallel.api import parallelize_module as parallelize_module
    from hyper_parallel.core.tensor_parallel.balance import balance_loss as balance_loss
    from hyper_parallel.core.tensor_parallel.balance import tokens_per_expert as tokens_per_expert
    from hyper_parallel.core.tensor_parallel.loss import loss_parallel as loss_parallel
    from hyper_parallel.core.tensor_parallel.loss import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from hyper_parallel.core.tensor_parallel.program.overlap import overlap_collectives as overlap_collectives
    from hyper_parallel.core.tensor_parallel.style import ColwiseParallel as ColwiseParallel
    from hyper_parallel.core.tensor_parallel.style import ContextParallel as ContextParallel
    from hyper_parallel.core.tensor_parallel.style import ExpertParallel as ExpertParallel
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

__version__ = "0.1.0.dev0"  # the only definition; pyproject.toml reads it here

__all__ = sorted(name for name in HOME_OF if not name.startswith("_"))

if not TYPE_CHECKING:  # hidden from type checkers, which would accept any name

    def __getattr__(name: str) -> Any:
        if name not in HOME_OF:
            raise AttributeError(f"module 'hyper_parallel' has no attribute {name!r}")
        if HOME_OF[name] == __name__:
            return importlib.import_module(f"{__name__}.{name}")
        value = getattr(importlib.import_module(HOME_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*globals(), *HOME_OF])
