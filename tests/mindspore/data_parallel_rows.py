"""One row of the table of `tests.support.data_parallel_table`, on MindSpore."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

import hyper_parallel as hp
from hyper_parallel.mindspore import value_and_grad
from hyper_parallel.testing.comparisons import same
from hyper_parallel.testing.spmd import device_mesh
from tests.mindspore.decoder import batch, decoder, plan
from tests.mindspore.nets import whole
from tests.support import data_parallel_table

__all__ = ["run", "settle"]

SAMPLES = 2


def settle(row: dict[str, Any]) -> dict[str, Any]:
    """``row`` without features that MindSpore lacks."""
    row = data_parallel_table.settle(row)
    # A part of a unit cannot be differentiated by itself: refused. And MindSpore itself fails where a cell with casts
    # is computed again to restore the values of forward (docs/mindspore.md).
    refused = row["checkpoint"] == "reentrant" and row["units"] == "root"
    if refused or (row["checkpoint"] == "non-reentrant" and row["lower"] == "autocast"):
        row["checkpoint"] = "none"
    return row


def run(row: dict[str, Any]) -> None:
    """Two steps of descent, with gradients and parameters as on a single device."""
    dp, tp = _meshes(row["mesh"])
    single, sharded = _build(row), _build(row)
    if tp is not None:
        hp.parallelize_module(sharded, tp, plan(row["sequence"], row["loss_parallel"]))
    _shard(sharded, dp, row)
    size = dp.size()
    rank = int((dp.ranks.reshape(-1) == dp.get_rank()).argmax())
    mine = slice(SAMPLES * rank, SAMPLES * (rank + 1))
    tolerance = 1e-6 if row["lower"] == "no" else 3e-2
    for step in range(2):
        wanted: Any = None
        micro = 2 if row["accumulate"] else 1
        for i in range(micro):
            ids, targets = batch(row["sizes"], 10 * step + i, SAMPLES * size)
            grads = _gradients(single, lambda: _loss(single, Tensor(ids), Tensor(targets), row))  # noqa: B023
            wanted = grads if wanted is None else [a + b for a, b in zip(wanted, grads, strict=True)]
            sharded.set_requires_gradient_sync(i == micro - 1)
            got = _sharded_gradients(sharded, dp, ids, targets, mine, row)
        for p, a, b in zip(sharded.trainable_params(), wanted, got, strict=True):
            assert isinstance(b, hp.DTensor) and b.placements == p.placements, p.name
            same(whole(b), whole(a), f"gradient of {p.name} at step {step}", tolerance)
        # Not by an optimizer of MindSpore's, which compiles for a second: tests of training have those.
        for net, given in ((single, wanted), (sharded, got)):
            for p, g in zip(net.trainable_params(), given, strict=True):
                ops.assign(p, p - 0.1 * g)
    if row["lower"] == "no":
        for p, q in zip(single.get_parameters(), sharded.get_parameters(), strict=True):
            same(whole(q), whole(p), f"{p.name} at the end", tolerance)


def _meshes(name: str) -> tuple[Any, Any]:
    """The mesh of data parallelism, and that of tensor parallelism or None."""
    if name == "dp":
        return device_mesh(4, names=("dp",)), None
    if name == "replicate x shard":
        return device_mesh(2, 2, names=("dp_replicate", "dp_shard")), None
    if name == "dp x tp":
        mesh = device_mesh(2, 2, names=("dp", "tp"))
        return mesh["dp"], mesh["tp"]
    mesh = device_mesh(2, 1, 2, names=("dp_replicate", "dp_shard", "tp"))
    return mesh["dp_replicate", "dp_shard"], mesh["tp"]


def _build(row: dict[str, Any]) -> Any:
    net = decoder(
        row["sizes"], ms.float64 if row["lower"] == "no" else ms.float32, tied=row["tied"], scalar=row["scalar"]
    )
    if row["frozen"]:
        net.block.attention.wq.weight.requires_grad = False
        net.block.norm1.gamma.requires_grad = False
    if row["lower"] == "autocast":
        net.block.to_float(ms.float16)
    if row["checkpoint"] != "none":
        net.block.recompute(use_reentrant=row["checkpoint"] == "reentrant")
    return net


def _shard(net: Any, mesh: Any, row: dict[str, Any]) -> None:
    options = {"mesh": mesh, "reshard_after_forward": row["reshard"]}
    if row["offload"]:
        options["offload_policy"] = hp.CPUOffloadPolicy(pin_memory=False)
    policy, outermost = {}, {}
    if row["lower"] == "policy":
        policy["mp_policy"] = hp.MixedPrecisionPolicy(ms.float16, ms.float32)
        outermost["mp_policy"] = hp.MixedPrecisionPolicy(ms.float16, ms.float32, ms.float32)
    if row["units"] == "nested":
        hp.fully_shard(net.block.attention, **options, **policy)
        hp.fully_shard(net.block.feed_forward, **options, **policy)
    if row["units"] != "root":
        hp.fully_shard(net.block, **options, **policy)
    if row["empty"]:
        hp.fully_shard(net.nothing, **options)
    if row["idle"]:
        hp.fully_shard(net.idle, **options)
    hp.fully_shard(net, **options, **outermost)


def _loss(net: Any, ids: Any, targets: Any, row: dict[str, Any]) -> Any:
    loss = net(ids, targets)
    return loss if row["calls"] == 1 else loss + net(ids, targets)


def _gradients(net: Any, loss: Callable[[], Any]) -> list[Any]:
    weights = list(net.trainable_params())
    found = value_and_grad(loss, None, weights)()[1]
    # Of plain parameters that are not used MindSpore gives zeros in single precision.
    return [g if isinstance(g, hp.DTensor) else g.astype(p.dtype) for p, g in zip(weights, found, strict=True)]


def _sharded_gradients(
    net: Any, dp: Any, ids: np.ndarray, targets: np.ndarray, mine: slice, row: dict[str, Any]
) -> list[Any]:
    if row["distributed"]:
        layout = [hp.Shard(0)] * dp.ndim
        given = [hp.distribute_tensor(Tensor(x), dp, layout, src_data_rank=None) for x in (ids, targets)]
    else:
        given = [Tensor(x[mine]) for x in (ids, targets)]
    with contextlib.ExitStack() as stack:
        if row["coalesce"]:
            stack.enter_context(hp.coalesce_gradients())
        if row["loss_parallel"]:
            stack.enter_context(hp.loss_parallel())
        return _gradients(net, lambda: _loss(net, *given, row))
