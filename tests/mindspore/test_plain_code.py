"""Corners of following plain code on MindSpore: joined pieces, unknown operations, the program's own collectives."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, mint, nn, ops
from mindspore.mint import distributed as dist

from hyper_parallel import DTensor, PackedShard, Partial, Replicate, Shard
from hyper_parallel.core.plain_code.contexts import follow
from hyper_parallel.core.plain_code.marks import Joined, Lost
from hyper_parallel.platform import get_platform
from hyper_parallel.testing.spmd import on_mesh
from tests.support.plain_marks import part as shard_of
from tests.support.plain_marks import placed, ways


@on_mesh(2, 2, names=("dp", "tp"))
def corners(mesh: Any) -> None:
    tp, dp = mesh["tp"], mesh["dp"]

    def part(x: Any, dim: int, on: Any = tp) -> Any:
        return shard_of(x, dim, on)

    data = mint.ones((2, 3, 4, 6))
    with follow(nn.Cell(), get_platform()) as following:
        x = part(data, 2)
        # Sizes that are local: stretched, a slice of all that is here, pieces of packed parts.
        assert placed(x[:, :1].expand((2, 5, 4, 6))) == [(Shard(2),)] and placed(x[:, :, :4]) == [(Shard(2),)]
        packed = DTensor.from_local(data, tp, [PackedShard(3, 3)]).to_local()
        assert all(placed(piece) == [(Shard(3),)] for piece in mint.split(packed, 2, -1))
        # One head on each rank: cut at the heads, or at their features.
        flat = part(mint.ones((2, 3, 6)), 2)
        assert len(ways(flat.reshape((2, 3, 1, 6)))) == 2
        # Pieces with other gradients are taken apart again, by split and by slices.
        whole = mint.ones((2, 3, 4))
        summed = DTensor.from_local(whole, tp, [Replicate()]).to_local(grad_placements=[Partial()])
        joined = mint.cat([whole * 1, summed], -1)
        assert isinstance(ways(joined), Joined)
        assert ways(mint.split(joined, [4, 4], -1)[1]) == ways(summed) and ways(joined[..., 5:7])[0].summed == (0,)
        for lost in (joined[..., 3:5], joined[..., None], joined[0], mint.split(joined, [3, 5], -1)[0]):
            assert isinstance(ways(lost), Lost)
        assert not following.findings, following
        # Two meshes, and an operation without a rule.
        assert isinstance(ways(x * part(data, 0, dp)), Lost)
        lost = ops.unsorted_segment_prod(part(mint.ones((4, 4)), 1), Tensor([0, 1, 0, 1]), 2)
        assert isinstance(ways(lost), Lost) and isinstance(ways(lost + 1), Lost) and "not followed" in str(ways(lost))
        # The program combines the parts itself: a finding about them is withdrawn.
        total = part(data, 3).mean(-1)
        count = len(following.findings)
        dist.all_reduce(total, group=tp.get_group())
        assert len(following.findings) == count - 1 and isinstance(ways(total), Lost)
    assert isinstance(data, Tensor)


def test_corners(pool: Any) -> None:
    pool.run(4, corners)
