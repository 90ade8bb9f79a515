"""The setups of the trainers of both frameworks, and the pairs of them that save and resume."""

from __future__ import annotations

from typing import Any, NamedTuple

from hyper_parallel.testing.spmd import device_mesh

__all__ = ["PAIRS", "SETUPS", "Setup"]


class Setup(NamedTuple):
    """Ranks along each dimension, and the variations around them."""

    replicate: int = 1
    shard: int = 1
    tp: int = 1
    sequence: bool = False
    recompute: bool = False
    reshard: bool | int | None = None
    own_replicate: bool = False

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.tp

    @property
    def batch_ranks(self) -> int:
        return self.replicate * self.shard

    def mesh(self) -> Any:
        """The mesh; None on a rank outside of it. All ranks of the pool call it."""
        return device_mesh(self.replicate, self.shard, self.tp, names=("dp_replicate", "dp_shard", "tp"))


SETUPS = {
    "one": Setup(),
    "tp": Setup(tp=2, sequence=True),
    "tp 3": Setup(tp=3, sequence=True, recompute=True),
    "dp": Setup(shard=2, reshard=True),
    "dp 3": Setup(shard=3),
    "dp 4": Setup(shard=4, reshard=2),
    "replicas": Setup(replicate=2, own_replicate=True),
    "dp x tp": Setup(shard=2, tp=2, recompute=True),
    "sequence": Setup(shard=2, tp=2, sequence=True),
    "hsdp": Setup(replicate=2, shard=2, recompute=True),
    "hsdp x tp": Setup(replicate=2, tp=2),
}
#: Each of the jobs that saves with the one that goes on.
PAIRS = [("dp x tp", "hsdp"), *zip([*SETUPS][1:], [*SETUPS][2:] + [*SETUPS][:1], strict=True)]
