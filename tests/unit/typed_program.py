"""A user's program that `make lint` type-checks and that never runs: every public name, and types that are more than
Any.

``assert_type`` fails for Any, so each line below would notice a name whose type got lost on the way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import assert_type

from hyper_parallel import (
    CollectiveError,
    ColwiseParallel,
    CommDebugMode,
    CommTrace,
    ContextParallel,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    DeviceMesh,
    DTensor,
    ExpertParallel,
    FSDPModule,
    GradientReductionHandle,
    HeadNormParallel,
    MixedPrecisionPolicy,
    ModuleStyle,
    NoParallel,
    OffloadPolicy,
    OpSharding,
    PackedShard,
    ParallelStyle,
    ParameterParallel,
    Partial,
    Placement,
    Platform,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RankMismatchError,
    Replicate,
    ReplicatedModule,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    StridedShard,
    UnshardHandle,
    available_platforms,
    balance_loss,
    check_plain_code,
    check_plan,
    check_ranks,
    checkpoint,
    coalesce_gradients,
    compute_local_shape_and_global_offset,
    describe,
    distribute_module,
    distribute_parameter,
    distribute_tensor,
    dry_run,
    empty,
    explain,
    full,
    fully_shard,
    get_platform,
    implicit_replication,
    init_device_mesh,
    linspace,
    local_map,
    logspace,
    loss_parallel,
    manual_seed,
    ones,
    overlap_collectives,
    parallelize_module,
    rand,
    randn,
    register_fsdp_forward_method,
    register_platform,
    register_sharding,
    register_style,
    replicate,
    shard_sequence,
    share_comm_ctx,
    strict,
    token_mean,
    tokens_per_expert,
    visualize_plan,
    visualize_sharding,
    vocab_parallel_cross_entropy,
    zeros,
)
from hyper_parallel.debug import compare, record
from hyper_parallel.mindspore import grad, value_and_grad

STYLES: tuple[ParallelStyle, ...] = (
    ColwiseParallel(),
    ContextParallel(),
    ExpertParallel(),
    HeadNormParallel(),
    ModuleStyle(),
    NoParallel(),
    ParameterParallel({"weight": Shard(0)}),
    PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),)),
    PrepareModuleInputOutput(output_layouts=Shard(0), desired_output_layouts=Replicate()),
    PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate()),
    RowwiseParallel(),
    SequenceParallel(),
)
FACTORIES = (empty, full, linspace, logspace, ones, rand, randn, zeros)
OTHERS = (
    CommTrace,
    local_map,
    check_plain_code,
    check_plan,
    describe,
    dry_run,
    explain,
    visualize_plan,
    visualize_sharding,
    compute_local_shape_and_global_offset,
    distribute_parameter,
    register_sharding,
    register_style,
    register_platform,
    vocab_parallel_cross_entropy,
    balance_loss,
    shard_sequence,
    token_mean,
    tokens_per_expert,
)


OFFLOAD: OffloadPolicy = CPUOffloadPolicy()


def train(model: Any, x: Any) -> None:
    """One step, with the names that a program of a user touches."""
    mesh = init_device_mesh(mesh_shape=(2, 4), mesh_dim_names=("dp", "tp"))
    assert_type(mesh, DeviceMesh)
    assert_type(mesh["tp"], DeviceMesh)
    assert_type(mesh.size(), int)
    assert_type(get_platform(), Platform)
    assert_type(available_platforms(), dict[str, str | None])
    assert_type(Shard(0).is_shard(), bool)
    placements: list[Placement] = [Shard(0), Replicate(), Partial(), PackedShard(0, (4, 2)), StridedShard(0, 2)]
    assert_type(mesh["tp"].get_root_mesh(), DeviceMesh)
    manual_seed(0)
    parallelize_module(model, mesh["tp"], {"up": STYLES[0], "down": "rowwise"})
    copied = replicate(model, mesh["dp"], bucket_cap_mb=25)
    assert isinstance(copied, ReplicatedModule)
    with copied.no_sync():
        copied.set_requires_gradient_sync(True)
    distribute_module(model, mesh)
    unit = fully_shard(model, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(), offload_policy=OFFLOAD)
    assert isinstance(unit, FSDPModule)
    fully_shard([model], mesh=mesh, reshard_after_forward=2, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    unit.set_requires_gradient_sync(False)
    assert_type(unit.unshard(async_op=True), UnshardHandle | None)
    assert_type(unit.finalize_backward(async_op=True), GradientReductionHandle | None)
    register_fsdp_forward_method(unit, "generate")
    share_comm_ctx([unit])
    y = distribute_tensor(x, mesh, placements)
    assert isinstance(y, DTensor)
    assert_type(y, DTensor)
    assert_type(y.placements, tuple[Placement, ...])
    assert_type(y.device_mesh, DeviceMesh)
    with CommDebugMode() as comm, loss_parallel(), strict(), implicit_replication():
        assert_type(comm, CommDebugMode)
    with CommTrace(model) as trace:
        assert_type(trace.table(), str)
    assert_type(describe(model).local_bytes, int)
    assert_type(visualize_plan(model, path="plan.svg"), str)
    assert_type(explain(model, {"dp": 2, "tp": 4}, None, x).to_json(), str)
    assert_type(dry_run(model, 8, None, x).fits, bool | None)
    assert_type(bool(check_plan(model, 2, None, x)), bool)
    with record("run-a", model, largest=None) as recorder:
        assert_type(recorder, record)
        recorder.step({"up.weight": x})
    assert_type(compare("run-a", Path("run-b"), "run-c", {"up": "fc1"}).departs, bool)
    with check_plain_code(model) as checked:
        assert_type(bool(checked), bool)
    with coalesce_gradients(), overlap_collectives(chunks=2), check_ranks():
        pass
    assert_type(OpSharding, type[OpSharding])
    try:
        grad(model)(x)
    except (CollectiveError, RankMismatchError) as error:
        assert_type(error, CollectiveError | RankMismatchError)
    assert_type(value_and_grad(model)(x), tuple[Any, Any])
    assert_type(checkpoint.save({"model": model, "step": 2}, "run/step-2", keep=3), Path)
    assert_type(checkpoint.async_save(model, "run/step-3").result(), Path)
    assert_type(checkpoint.latest("run"), Path | None)
