"""One rank of the case `planning`: a real step next to its dry run.

``python -m benchmarks.planning_rank RANK RANKS FOLDER``
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import write_result
from benchmarks.report import Goal, Result, Table
from hyper_parallel import CommTrace, DTensor, fully_shard, init_device_mesh, parallelize_module
from hyper_parallel.planning import dry_run
from hyper_parallel.planning.llama import MODELS, llama_plan
from hyper_parallel.platform.torch.basics.decoder import make_decoder
from hyper_parallel.platform.torch.basics.usage import UsageMode

__all__ = ["CHECKED", "TOKENS", "model"]

#: Ranks of the comparison.
CHECKED = 4
TOKENS = torch.arange(4 * 64).reshape(4, 64) % 128
_KINDS = ("parameters", "gradients", "optimizer", "buffers")


def model() -> torch.nn.Module:
    """The Llama that is compared, with the same values on every rank."""
    torch.manual_seed(0)
    return make_decoder(MODELS["llama-tiny"])


def _size(tensors: Any) -> int:
    return sum(x.to_local().nbytes if isinstance(x, DTensor) else x.nbytes for x in tensors)


def _bytes(rank: int) -> tuple[dict[str, int], dict[str, int]]:
    """The bytes of a real step on dp=2 x tp=2, and those of its dry run."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours, tokens = model(), TOKENS[:2]
    foreseen = dry_run(ours, mesh, llama_plan(), tokens, rank=rank)
    parallelize_module(ours, mesh["tp"], llama_plan())
    for layer in ours.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(ours, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(ours.parameters())
    with CommTrace(ours) as trace:
        torch.sum(ours(tokens)).backward()
    optimizer.step()
    state = [x for held in optimizer.state.values() for x in held.values()]
    held = (ours.parameters(), (p.grad for p in ours.parameters()), state, ours.buffers())
    real = dict(zip(_KINDS, map(_size, held), strict=True))
    real |= {f"collectives over {d}": sum(c.bytes for c in trace.collectives if c.mesh_dim == d) for d in ("dp", "tp")}
    memory = vars(foreseen.memory)
    said = {kind: memory[kind] for kind in _KINDS}
    return real, {**said, **{f"collectives over {d}": foreseen.traffic[d].bytes for d in ("dp", "tp")}}


def _peak() -> tuple[int, int]:
    """The peak that a real step on one rank adds to the memory before it, and the prediction."""
    ours = model()
    memory = dry_run(ours, 1, None, TOKENS).memory
    with UsageMode() as used:
        torch.sum(ours(TOKENS)).backward()
    assert memory.peak is not None and memory.optimizer is not None
    return used.peak, memory.peak - memory.parameters - memory.buffers - memory.optimizer


def main() -> None:
    """Compare, and let rank 0 write the result."""
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    real, said = _bytes(rank)
    dist.destroy_process_group()
    if rank:
        return
    peak, foreseen = _peak()
    table = Table(f"Foreseen and real, bytes of rank 0 of {ranks}", ["what", "foreseen", "real"])
    table.rows += [[what, said[what], real[what]] for what in real]
    table.rows.append(["peak of a step on one rank, beyond the memory held before it", foreseen, peak])
    goals = [
        Goal(f"{what}: bytes foreseen against those of a real step", abs(said[what] - real[what]), 0.0, strict=True)
        for what in real
    ]
    goals.append(Goal("peak: share that was foreseen wrongly", abs(peak - foreseen) / peak, 0.05, strict=True))
    write_result(folder, [Result("planning", "", [table], goals)])


if __name__ == "__main__":
    main()
