"""Messages and bytes of experts, counted at the process group, against those of a dispatcher written by hand."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch

from benchmarks.torch_experts import ByHand, Gathered, Mixture
from benchmarks.torch_traffic import count_collectives
from hyper_parallel import DTensor, ExpertParallel, parallelize_module
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close

COUNT, BEST, FEATURES, TOKENS, INTEGER = 8, 2, 4, 16, 8


@on_mesh()
def counted(mesh: Any) -> list[Any]:
    """Count messages of each version in forward and in backward, and the bytes that this rank gives."""
    torch.manual_seed(0)
    whole = Mixture(COUNT, BEST, FEATURES, 6).double()
    ours = parallelize_module(copy.deepcopy(whole), mesh, {"experts": ExpertParallel()})
    x = torch.randn(mesh.size(), TOKENS, FEATURES, dtype=torch.float64)[mesh.get_local_rank()].requires_grad_()
    found, results = [], []
    for model in (ours, ByHand(whole), Gathered(whole)):
        x.grad = None
        with count_collectives() as forward:
            y = model(x)
        with count_collectives() as backward:
            y.square().sum().backward()
        found.append([(dict(t.counts), dict(t.sizes)) for t in (forward, backward)])
        grads = {name.removeprefix("experts."): p.grad for name, p in model.named_parameters()}
        parameters = [grads[name] for name in ("router.weight", "gate_up", "down")]
        results.append([y.detach(), x.grad, *(g.to_local() if isinstance(g, DTensor) else g for g in parameters)])
    for others in results[1:]:
        for got, wanted in zip(others, results[0], strict=True):
            close(got, wanted, "by hand", 1e-12)
    return found


@pytest.mark.skipif(
    os.environ["HYPER_PARALLEL_PLATFORM"] != "torch-cpu", reason="the process groups of gloo are counted"
)
@pytest.mark.nightly
def test_messages_and_bytes(pool: Any) -> None:
    ranks = 4  # of the world, over which the versions by hand send
    rows = TOKENS * BEST * FEATURES * 8  # of all routes of a rank, in double precision
    found = pool.run(ranks, counted)
    for ours, hand, gathered in found:
        forward, backward = ours
        assert forward == (
            {"all_gather": 1, "all_to_all": 2},
            {"all_gather": (1 + COUNT) * INTEGER // 2, "all_to_all": forward[1]["all_to_all"]},
        )
        # The numbers of tokens, of 8 bytes by hand, of 4 here. One more is a digest of the call.
        assert hand[0][0] == {"all_to_all": 3}
        assert forward[1]["all_to_all"] == hand[0][1]["all_to_all"] - COUNT * INTEGER
        assert backward == hand[1] and backward[0] == {"all_to_all": 2}
        # There exactly the routed tokens, and back what has arrived; in backward the other way round.
        assert backward[1]["all_to_all"] == forward[1]["all_to_all"]
        assert gathered[0][0] == {"all_gather": 3, "reduce_scatter": 1}
        assert gathered[0][1]["reduce_scatter"] == ranks * TOKENS * FEATURES * 8
    given = [ours[0][1]["all_to_all"] for ours, *_ in found]
    assert sum(given) == 2 * ranks * rows  # each route once there, and once back
