"""Balance of experts over all tokens of a batch, and `ExpertCounts`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    CommDebugMode,
    DTensor,
    ExpertParallel,
    ParameterParallel,
    Partial,
    Replicate,
    balance_loss,
    explain,
    parallelize_module,
    tokens_per_expert,
)
from hyper_parallel.debug import ExpertCounts
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import same
from hyper_parallel.testing.conformance.checks import needs_gradients

EXPERTS, K = 5, 2
#: Tokens of each rank.
SHARES = (3, 1, 4, 2)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def balanced(mesh: Any) -> None:
    """Check the gradients of a router's logits, with a loss for each rank, or one for each tp group."""
    adapter, rng, rank = get_adapter(), np.random.default_rng(3), mesh.get_rank()
    logits = rng.standard_normal((sum(SHARES), EXPERTS))
    indices = np.argsort(-logits, -1)[:, :K].astype(np.int64)
    mine = slice(sum(SHARES[:rank]), sum(SHARES[: rank + 1]))

    def formula(x: Any) -> Any:
        probabilities = adapter.softmax(x, -1)
        shares = np.bincount(indices.ravel(), minlength=EXPERTS) / indices.size
        loss = adapter.weighted_sum(adapter.mean(probabilities, 0), adapter.tensor(shares)) * float(EXPERTS)
        return loss, loss

    loss, (grad,) = adapter.value_and_grads(formula, [logits])
    for losses in (None, 2):
        average = 4 if losses is None else losses

        def share(x: Any, losses: Any = losses) -> Any:
            part = balance_loss(adapter.softmax(x, -1), adapter.tensor(indices[mine]), mesh, losses=losses)
            return part, part

        part, (got,) = adapter.value_and_grads(share, [logits[mine]])
        same(got / average, grad[mine], f"gradient of the logits, {losses=}", 1e-12)
        total = DTensor.from_local(adapter.detach(part), mesh, [Partial(), Partial()])
        assert abs(float(adapter.numpy(total)) / average - float(adapter.numpy(loss))) < 1e-12
    counts = tokens_per_expert(adapter.tensor(indices[mine]), EXPERTS, mesh)
    assert adapter.numpy(counts).tolist() == np.bincount(indices.ravel(), minlength=EXPERTS).tolist()
    assert adapter.numpy(tokens_per_expert(adapter.tensor(indices[:0]), EXPERTS, mesh)).tolist() == [0] * EXPERTS


@spmd.on_mesh()
def refusals(mesh: Any) -> None:
    adapter = get_adapter()
    first, of_two = mesh.get_local_rank() == 0, adapter.tensor(np.zeros((2, 1), np.int64))
    outside = adapter.tensor(np.full((2, 1), 3 if first else 0, np.int64))
    with pytest.raises(ValueError, match="2 indices on the ranks"):
        tokens_per_expert(outside, 3, mesh)
    probabilities = adapter.tensor(np.ones((2, 3), np.float32))
    with pytest.raises(TypeError, match="a plain tensor of integers"):
        tokens_per_expert(probabilities, 3, mesh)
    with pytest.raises(TypeError, match="a plain tensor of integers"):
        balance_loss(probabilities, DTensor.from_local(of_two, mesh, [Replicate()]), mesh)
    for wrong in (DTensor.from_local(probabilities, mesh, [Replicate()]), probabilities[0], None):
        with pytest.raises(ValueError, match="as a plain tensor \\(tokens, experts\\)"):
            balance_loss(wrong, of_two, mesh)


@spmd.on_mesh()
def looked_at(mesh: Any) -> str:
    adapter, rank = get_adapter(), mesh.get_local_rank()
    kind = adapter.SortedExperts
    module = parallelize_module(adapter.load(kind(3, 4, 4), np.random.default_rng(5)), mesh, ExpertParallel())
    numbers = np.array([[2, 0, 1], [0, 0, 3]])
    x, counts = adapter.tensor(np.ones((3, 4), np.float32)), adapter.tensor(numbers[rank])
    with CommDebugMode() as without:
        adapter.call(module, x, counts)
    with CommDebugMode() as comm, ExpertCounts() as seen:
        adapter.call(module, x, counts)
        adapter.call(module, x, counts)
    assert comm.get_total_counts() == 2 * without.get_total_counts()
    adapter.call(module, x, counts)
    (path,) = seen.counts
    assert seen.counts[path].tolist() == (2 * numbers).tolist()
    assert seen.calls == {path: 2}
    assert seen.imbalance() == {path: 2.0}
    return str(seen)


def test_counts_that_are_looked_at(pool: Any) -> None:
    first, second = pool.run(2, looked_at)
    assert first == second
    assert first.splitlines()[0].endswith(": 12 tokens in 2 calls, the most of an expert 2.00 times the mean")
    assert [line.split() for line in first.splitlines()[1:]] == [
        ["expert", "tokens", "of", "rank", "0", "of", "rank", "1"],
        ["0", "4", "4", "0", "#" * 12],
        ["1", "0", "0", "0"],
        ["2", "8", "2", "6", "#" * 24],
    ]


def test_foreseen() -> None:
    """Check that a dry run assumes even routes."""
    needs_gradients()
    adapter = get_adapter()

    def forward(module: Any, x: Any, indices: Any) -> Any:
        mesh = module.weight.device_mesh
        return balance_loss(adapter.softmax(adapter.matmul(x, module.weight.to_local()), -1), indices, mesh)

    kind = type(adapter.linear_module(EXPERTS, EXPERTS, False))
    router = type("Router", (kind,), {"forward": forward, "construct": forward})(EXPERTS, EXPERTS, bias=False)
    x, indices = adapter.tensor(np.ones((4, EXPERTS), np.float32)), adapter.tensor(np.zeros((4, 2), np.int64))
    seen = explain(
        router,
        2,
        ParameterParallel({"weight": Replicate()}, input_layouts=(None, None), output_layouts=(None,)),
        x,
        indices,
    )
    assert [c.bytes for c in seen.collectives if c.kind == "all_reduce" and c.direction == "forward"] == [
        (EXPERTS + 2) * 8
    ]


def test_balance(pool: Any) -> None:
    pool.run(4, balanced)


def test_refusals(pool: Any) -> None:
    pool.run(2, refusals)
