"""`fully_shard` and MindSpore's `recompute` and `to_float`, in whichever order they are called."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from hyper_parallel import CommDebugMode, fully_shard
from hyper_parallel.mindspore import value_and_grad
from hyper_parallel.testing.comparisons import same
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.decoder import Decoder, batch, decoder
from tests.mindspore.nets import error_of, whole


def gradients(net: Decoder, ids: np.ndarray, targets: np.ndarray) -> dict[str, Any]:
    weights = [p for p in net.trainable_params() if not p.name.startswith("idle")]
    found = value_and_grad(lambda: net(Tensor(ids), Tensor(targets)), None, weights)()[1]
    return {p.name: g for p, g in zip(weights, found, strict=True)}


@on_mesh()
def computed_again(mesh: Any, first: bool, reentrant: bool, low: bool) -> dict[str, int]:
    """A unit that is computed again: its gradients equal those of the cell alone; returns the collectives of a step."""
    dtype = ms.float32 if low else ms.float64
    ids, targets = batch("uneven", 0, 2 * mesh.size())
    mine = slice(2 * mesh.get_local_rank(), 2 * mesh.get_local_rank() + 2)
    single, sharded = decoder("uneven", dtype), decoder("uneven", dtype)
    if low:
        single.block.to_float(ms.float16)
        sharded.block.to_float(ms.float16)
    if first:
        sharded.block.recompute(use_reentrant=reentrant)
    fully_shard(sharded.block, mesh=mesh)
    if not first:
        sharded.block.recompute(use_reentrant=reentrant)
    fully_shard(sharded, mesh=mesh)
    wanted = gradients(single, ids, targets)
    for _ in range(2):
        with CommDebugMode() as comm:
            got = gradients(sharded, ids[mine], targets[mine])
        for name, g in wanted.items():
            same(whole(got[name]), whole(g), f"gradient of {name}", 5e-3 if low else 1e-6)
    return comm.get_comm_counts()


@pytest.mark.parametrize(
    ("reentrant", "low"), [(True, False), (False, False), (True, True)], ids=["reentrant", "non-reentrant", "low"]
)
@pytest.mark.parametrize("first", [True, False], ids=["recompute first", "fully_shard first"])
def test_a_unit_that_is_computed_again(pool: Any, first: bool, reentrant: bool, low: bool) -> None:
    for counts in pool.run(2, computed_again, first, reentrant, low):
        # Of each unit one in forward, and of the block one in backward; two where it is differentiated by itself, which
        # is a forward and a backward.
        assert counts == {"all_gather": 4 if reentrant else 3, "reduce_scatter": 2}, counts


@on_mesh()
def refused(mesh: Any) -> list[str]:
    """Parts of units."""
    ids, targets = (Tensor(x) for x in batch("even", 0, 2))
    net = decoder("even", ms.float32)
    net.block.attention.recompute()
    fully_shard(net, mesh=mesh)
    with CommDebugMode() as comm:
        messages = [error_of(net, ids, targets)]
    assert not comm.events
    net = decoder("even", ms.float32)
    fully_shard(net.block, mesh=mesh)
    net.block.feed_forward.recompute()
    fully_shard(net, mesh=mesh)
    return [*messages, error_of(net, ids, targets)]


def test_a_part_of_a_unit_is_refused(pool: Any) -> None:
    for of_root, of_block in pool.run(2, refused):
        assert of_root.startswith(
            "ValueError: Decoder under fully_shard: 'block.attention' is recomputed in backward"
        ), of_root
        assert of_block.startswith("ValueError: Block under fully_shard: 'feed_forward' is recomputed in backward"), (
            of_block
        )
        assert "use_reentrant=False" in of_root and "Apply fully_shard to 'feed_forward'" in of_block


@on_mesh()
def function_inside_a_unit(mesh: Any) -> str:
    """`mindspore.recompute` of a part of a unit."""
    net = decoder("even", ms.float32)
    block = net.block
    net.block = None
    ids, targets = batch("even", 0, 2)

    class Around(Decoder):
        def construct(self, ids: Any, targets: Any) -> Any:
            logits = self.head(self.norm(ms.recompute(self.part, self.embedding(ids))))
            return ms.ops.cross_entropy(logits.reshape(-1, self.vocabulary), targets.reshape(-1))

    around = Around("even")
    around.part = block
    fully_shard(around, mesh=mesh)
    return error_of(gradients, around, ids, targets)


def test_the_function_inside_a_unit(pool: Any) -> None:
    """An error, not gradients of zeros."""
    for message in pool.run(2, function_inside_a_unit):
        assert message.startswith("ValueError: mindspore.recompute(Block) gives no gradient of '"), message
        assert "use_reentrant=False" in message
