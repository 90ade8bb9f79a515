"""Experts in cells that MindSpore computes again in backward, against a single device."""

from __future__ import annotations

from typing import Any

import numpy as np

from hyper_parallel import CommDebugMode
from hyper_parallel.testing import spmd
from hyper_parallel.testing.conformance.test_expert_training import (
    LENGTH,
    VOCABULARY,
    Case,
    Run,
    build,
    compare,
    distribute,
    near,
)


@spmd.on_mesh(2, 2, names=("rest", "ep"))
def computed_again(mesh: Any) -> None:
    rng = np.random.default_rng(1)
    ids, targets = (rng.integers(0, VOCABULARY, (4, LENGTH)).astype(np.int64) for _ in range(2))
    for how, reentrant, one_batch in (
        ("fully_shard", False, False),
        ("fully_shard", True, False),
        ("replicate", False, False),
        ("replicate", False, True),  # computed again outside of the forward that knows of the batch
    ):
        case = Case((2, 2), how)
        single, sharded = build(case), build(case)
        dp = distribute(sharded, mesh, case)
        for layer in sharded.layers:
            layer.recompute(use_reentrant=reentrant)
        rank = int(np.argwhere(dp.ranks.ravel() == dp.get_rank())[0][0])
        mine = slice(rank, rank + 1)
        runs = Run(single, ..., None, dp.size()), Run(sharded, mine, None, 1)
        if one_batch:
            runs = Run(single, ..., None, 1), Run(sharded, ..., dp, 1)
        with CommDebugMode() as comm:
            (_, y), (_, got) = (run.backward(ids, targets) for run in runs)
        what = f"{how}, {reentrant=}, {one_batch=}"
        near(got, y, f"output, {what}", 1e-12, mine)
        compare(runs[1].grads or {}, runs[0].grads or {}, f"gradient, {what}", 1e-12)
        # Two for each of two blocks: in forward, in the forward that comes again, and in backward.
        assert comm.get_comm_counts()["all_to_all"] == 2 * 2 * 3


def test_blocks_that_are_computed_again(pool: Any) -> None:
    pool.run(4, computed_again)
