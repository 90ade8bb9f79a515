"""`PrepareModuleInput` and similar styles with a batch that is a DTensor over data-parallel ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    PackedShard,
    Partial,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    StridedShard,
    distribute_tensor,
    fully_shard,
    parallelize_module,
    replicate,
)
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import difference, same
from hyper_parallel.testing.conformance.test_errors import fails
from hyper_parallel.testing.conformance.test_fully_shard_batches import compare
from hyper_parallel.testing.conformance.test_fully_shard_units import block_of, shard_block
from hyper_parallel.testing.extent import in_gate

R, SEQUENCE = Replicate(), Shard(1)


def of_sequence(local: bool) -> dict[str, Any]:
    """Return a plan with sequence parallelism between all modules, by plain tensors or by DTensors."""
    return {
        "": PrepareModuleInputOutput(
            input_layouts=R,
            desired_input_layouts=SEQUENCE,
            use_local_input=local,
            output_layouts=SEQUENCE,
            desired_output_layouts=R,
        ),
        "norm[12]": SequenceParallel(use_local_output=local),
        "attention": PrepareModuleInput(input_layouts=SEQUENCE, desired_input_layouts=R, use_local_output=local),
        "attention.w[qkv]": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=SEQUENCE, use_local_output=local),
        "feed_forward": PrepareModuleInputOutput(
            input_layouts=SEQUENCE,
            desired_input_layouts=R,
            use_local_input=local,
            output_layouts=R,
            desired_output_layouts=SEQUENCE,
            use_local_output=local,
        ),
        "feed_forward.w[13]": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(),
    }


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def sequence_parallel(mesh: Any, rows: int, replicated: bool, local: bool) -> Any:
    adapter = get_adapter()

    def shard(model: Any) -> None:
        parallelize_module(model, mesh["tp"], of_sequence(local))
        (replicate if replicated else shard_block)(model, mesh["dp"])

    seen = compare(
        mesh["dp"],
        lambda: block_of((8, 12)),
        shard,
        np.random.default_rng(3).standard_normal((rows, 4, 8)).astype(np.float32),
        lambda y, _: adapter.mean(adapter.square(y)),
    )
    # Units that watch their inputs hide that these were gathered.
    watches = not replicated and mesh.platform.frees_storage and not mesh.platform.tells_beginning
    return seen, not local and not watches


@pytest.mark.parametrize("local", [False, True], ids=["distributed", "local"])
@pytest.mark.parametrize(
    ("rows", "replicated"),
    in_gate([(8, False), (7, False), (1, False), (7, True)], [(7, False), (1, False), (7, True)], unpack=True),
)
def test_sequence_parallel_block(pool: Any, rows: int, replicated: bool, local: bool) -> None:
    for seen, to_parts in pool.run(4, sequence_parallel, rows, replicated, local):
        if rows == 1:
            continue  # operations gather a single sample, and ranks without one communicate less
        units = 0 if replicated else 3
        # In addition to those of the units: the inputs of attention and feed-forward, and the block's output; of the
        # row-parallel layers one reduces to parts, and one to whole results, which are cut.
        assert seen["forward"] == {"all_gather": units + 3, "reduce_scatter": 1, "all_reduce": 1}
        backward = difference(seen["all"], seen["forward"])
        # Attention, and feed-forward, has one sum for all layers that read its input; it goes to the parts at once
        # where DTensors say that they were gathered. The weights and biases of the norms have four sums, and the bucket
        # of `replicate`, and the loss, one each.
        assert backward.get("reduce_scatter", 0) == units + 2 * to_parts
        assert backward["all_reduce"] == 4 + 1 + replicated + 2 * (not to_parts)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def prepared(mesh: Any, rows: int) -> None:
    """Check the styles without a model: placements over dp are unchanged, and no parameters are needed."""
    adapter, dp, tp, everyone = get_adapter(), mesh["dp"], mesh["tp"], mesh._flatten("everyone")
    whole = np.random.default_rng(3).standard_normal((rows, 4, 2)).astype(np.float32)

    def styled(style: Any) -> Any:
        return parallelize_module(adapter.Probe(), tp, style)

    def batch(placements: Any, where: Any = dp) -> Any:
        return distribute_tensor(adapter.tensor(whole), where, placements, src_data_rank=None)

    def lies(x: Any, where: Any, *placements: Any) -> None:
        assert x.device_mesh is where and x.placements == placements
        same(adapter.numpy(x.full_tensor()), whole, "values")

    inside = styled(PrepareModuleInput(input_layouts=R, desired_input_layouts=SEQUENCE))
    for over_dp in (Shard(0), Shard(2), R):
        adapter.call(inside, batch([over_dp]))
        lies(inside.seen[0][0], mesh, over_dp, SEQUENCE)
        # A tensor on both dimensions is converted from there, whatever input_layouts says.
        adapter.call(inside, batch([over_dp, Shard(2) if over_dp is Shard(0) else Shard(0)], mesh))
        lies(inside.seen[0][0], mesh, over_dp, SEQUENCE)

    # The dimension of the batch may be cut once more, by position and by keyword; as parts, where that says how.
    again = {"input_layouts": (None, R), "desired_input_layouts": (None, Shard(0))}
    named = {"input_kwarg_layouts": {"x": R}, "desired_input_kwarg_layouts": {"x": Shard(0)}}
    inside = styled(PrepareModuleInput(**again, **named))
    adapter.call(inside, 3, batch([Shard(0)]), x=batch([Shard(0)]))
    for x in (inside.seen[0][1], inside.seen[1]["x"]):
        lies(x, mesh, Shard(0), Shard(0))
    outside = styled(PrepareModuleOutput(output_layouts=SEQUENCE, desired_output_layouts=R))
    lies(adapter.call(outside, inside.seen[0][1]), dp, Shard(0))
    outside = styled(
        PrepareModuleInputOutput(
            **again,
            output_layouts=(None, R),
            desired_output_layouts=(None, SEQUENCE),
            use_local_output=False,
        )
    )
    number, x = adapter.call(outside, 3, batch([Shard(0)]))
    assert number == 3
    lies(x, mesh, Shard(0), SEQUENCE)

    # A part of a part is no part of the batch that a plain tensor could be; sums over dp are no batch.
    inside = styled(PrepareModuleInput(input_layouts=R, desired_input_layouts=Shard(0), use_local_output=True))
    with fails(ValueError, "also places it [Shard(dim=0)]", "use_local_output=False"):
        adapter.call(inside, batch([Shard(0)]))
    first_tp, packed = [StridedShard(0, 2), Shard(0)], [StridedShard(2, 2), PackedShard(2, (1, 1))]
    for x in (batch([Partial()]), batch(first_tp, mesh), batch(packed, mesh), batch([R], everyone)):
        with fails(ValueError, "but the style is applied to"):
            adapter.call(inside, x)


@pytest.mark.parametrize("rows", in_gate([8, 7, 1], [7, 1]))
def test_inputs_and_outputs(pool: Any, rows: int) -> None:
    pool.run(4, prepared, rows)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def between_modules(mesh: Any, rows: int) -> None:
    """Check DTensors on both dimensions between styled modules, with an input sharded along the sequence."""
    adapter = get_adapter()

    def shard(mlp: Any) -> None:
        plan = {
            "up": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=Shard(-1), use_local_output=False),
            "down": RowwiseParallel(output_layouts=SEQUENCE, use_local_output=False),
        }
        parallelize_module(mlp, mesh["tp"], plan)
        fully_shard(mlp.up, mesh=mesh["dp"])
        fully_shard(mlp, mesh=mesh["dp"])

    seen = []

    def loss_of(y: Any, _: Any) -> Any:
        seen.append(y)
        return adapter.mean(adapter.square(y))

    x = np.random.default_rng(3).standard_normal((rows, 3, 6)).astype(np.float32)
    for over_dp in (Shard(0), R):  # a replicated input is cut
        compare(mesh, lambda: adapter.Mlp(6, 5), shard, x, loss_of, cut=[over_dp, SEQUENCE])
        assert seen[-1].device_mesh is mesh and seen[-1].placements == (Shard(0), SEQUENCE)
    alone = parallelize_module(adapter.Mlp(6, 5), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(alone, mesh=mesh["dp"])
    with pytest.raises(ValueError, match="but the style is applied to"):
        adapter.call(alone, distribute_tensor(adapter.tensor(x), mesh, [R, Shard(0)], src_data_rank=None))


@pytest.mark.parametrize("rows", in_gate([4, 3, 1], [3, 1]))
def test_distributed_tensors_between_modules(pool: Any, rows: int) -> None:
    pool.run(4, between_modules, rows)
