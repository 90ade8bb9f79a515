"""A Llama spread over ranks by the strings of Hugging Face's plans: logits, loss, all gradients and generated tokens
equal the single process's, with the collectives of hand-written code."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops
from mindspore.experimental.optim import AdamW

from hyper_parallel import CommDebugMode, DTensor, Shard, implicit_replication, loss_parallel, parallelize_module
from hyper_parallel.mindspore import value_and_grad
from hyper_parallel.testing.comparisons import same
from hyper_parallel.testing.extent import everything, in_gate, on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.llama import CASES, FEW_HEADS, PLAN, Case, Config, make, tokens
from tests.mindspore.nets import error_of, on_first_rank, whole


def loss_of(logits: Any, targets: Tensor) -> Any:
    """Cross entropy of the token after each token."""
    classes = logits.shape[-1]
    return ops.cross_entropy(logits[:, :-1].reshape(-1, classes), targets[:, 1:].reshape(-1))


def run(model: Any, case: Case, ids: Tensor) -> tuple[Any, Any, dict[str, Any], dict[str, dict[str, int]]]:
    """Loss, logits, gradients by name, and the collectives of forward, loss and backward."""
    counts = {}

    def function() -> tuple[Any, Any]:
        with CommDebugMode() as comm, implicit_replication() if case.distributed_inside else contextlib.nullcontext():
            logits = model(ids)
        counts["forward"] = comm.get_comm_counts()
        with CommDebugMode() as comm, loss_parallel() if case.sharded_loss else contextlib.nullcontext():
            loss = loss_of(logits, ids)
        counts["loss"] = comm.get_comm_counts()
        return loss, logits

    parameters = model.trainable_params()
    with CommDebugMode() as comm:
        (loss, logits), gradients = value_and_grad(function, None, parameters, has_aux=True)()
    rest = {kind: counts["forward"].get(kind, 0) + counts["loss"].get(kind, 0) for kind in comm.get_comm_counts()}
    counts["backward"] = {kind: n - rest[kind] for kind, n in comm.get_comm_counts().items() if n > rest[kind]}
    return loss, logits, {p.name: g for p, g in zip(parameters, gradients, strict=True)}, counts


def reference(case: Case, ids: Tensor) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Loss, logits and gradients of the model in one process."""
    loss, logits, gradients, _ = run(make(case), case, ids)
    return loss.asnumpy(), logits.asnumpy(), {name: g.asnumpy() for name, g in gradients.items()}


@on_mesh()
def compare(mesh: Any, case: Case) -> dict[str, dict[str, int]]:
    """Raise AssertionError for a difference from the single process's model; return the collectives."""
    ids = tokens(case.config)
    loss, logits, gradients = on_first_rank(mesh, lambda: reference(case, ids))
    got_loss, got_logits, got, counts = run(make(case, mesh), case, ids)
    assert isinstance(got_logits, DTensor) == case.sharded_loss
    if case.sharded_loss:
        assert got_logits.placements == (Shard(2),)
    same(whole(got_logits), logits, "logits")
    same(whole(got_loss), loss, "loss")
    assert set(got) == set(gradients)
    for name, gradient in gradients.items():
        same(whole(got[name]), gradient, f"gradient of {name}")
    return counts


def expected(case: Case) -> dict[str, dict[str, int]]:
    return {"forward": case.forward, "loss": {"all_reduce": 2} if case.sharded_loss else {}, "backward": case.backward}


#: The gate has a row with tied weights and the distributed loss, and rows with neither.
NIGHTLY = ("tied", "untied, loss_parallel")


@on_ranks(2, 4, gate=(2,), name="world")
@pytest.mark.parametrize("name", in_gate(CASES, [name for name in CASES if name not in NIGHTLY]))
def test_gradients_and_collectives(pool: Any, name: str, world: int) -> None:
    assert pool.run(world, compare, CASES[name]) == [expected(CASES[name])] * world


def test_fewer_key_value_heads_than_ranks(pool: Any) -> None:
    assert pool.run(4, compare, FEW_HEADS) == [expected(FEW_HEADS)] * 4


@on_mesh()
def too_few_heads(mesh: Any) -> tuple[str, bool]:
    model = make(FEW_HEADS)
    error = error_of(parallelize_module, model, mesh, PLAN)
    return error, any(isinstance(p, DTensor) for p in model.get_parameters())


def test_key_value_heads_that_ranks_cannot_share_are_refused(pool: Any) -> None:
    for error, changed in pool.run(4, too_few_heads):
        assert "ValueError: 'model.layers.0.self_attn.k_proj' has 2 heads" in error
        assert "replicate_heads=True" in error
        assert not changed


# ------------------------------------------------------------------ generation
@on_mesh()
def generated(mesh: Any, cases: list[Case]) -> list[bool]:
    results = []
    for case in cases:
        prompt = tokens(case.config, length=3)
        wanted = on_first_rank(mesh, lambda case=case, prompt=prompt: make(case).generate(prompt, 8).asnumpy())
        assert wanted.shape == (2, 11) and len(set(wanted.ravel().tolist())) > 6  # not the same token all over
        results.append(bool((make(case, mesh).generate(prompt, 8).asnumpy() == wanted).all()))
    return results


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        pytest.param(2, [CASES["untied"], CASES["tied"]], marks=pytest.mark.nightly),
        pytest.param(4, [CASES["norms in heads"]], marks=pytest.mark.nightly),
        (4, [CASES["fused"], FEW_HEADS]),
    ],
)
def test_greedy_generation_is_identical(pool: Any, world: int, cases: list[Case]) -> None:
    assert pool.run(world, generated, cases) == [[True] * len(cases)] * world


@on_mesh()
def with_and_without_cache(mesh: Any) -> bool:
    model, prompt = make(CASES["norms in heads"]), tokens(Config(), length=3)
    ids = prompt.asnumpy()
    for _ in range(8):
        latest = model(Tensor(ids)).asnumpy()[:, -1].argmax(-1)
        ids = np.concatenate([ids, latest[:, None].astype(np.int32)], 1)
    return model.generate(prompt, 8).asnumpy().tolist() == ids.tolist()


def test_cache_of_keys_and_values_changes_nothing(pool: Any) -> None:
    assert pool.run(1, with_and_without_cache) == [True]


@on_mesh()
def unusable(mesh: Any) -> list[str]:
    local_head = make(Case(Config(), {**PLAN, "lm_head": "colwise"}, {}, {}), mesh)
    return [
        error_of(local_head.generate, tokens(Config()), 2),
        error_of(local_head.generate, tokens(Config(), length=25), 2),
    ]


def test_generation_refuses_parts_of_logits_and_too_many_tokens(pool: Any) -> None:
    for part, long in pool.run(2, unusable):
        assert "logits of 45: to generate, it has to gather them" in part
        assert "max_position_embeddings" in long


# ------------------------------------------------------------------ training
#: Every moment has been used after two.
STEPS = 10 if everything() else 4


def train(model: Any, case: Case) -> tuple[list[float], dict[str, np.ndarray]]:
    """Steps of AdamW: their losses, and the weights in the end."""
    optimizer = AdamW(model.trainable_params(), lr=0.01, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        loss, _, gradients, _ = run(model, case, tokens(case.config, seed=step % 2))
        optimizer(tuple(gradients.values()))
        losses.append(float(loss))
    return losses, {p.name: whole(p) for p in model.trainable_params()}


@on_mesh()
def trained(mesh: Any, case: Case) -> None:
    losses, weights = on_first_rank(mesh, lambda: train(make(case), case))
    assert losses[-2] < losses[0] - STEPS / 10  # it learns
    got_losses, got = train(make(case, mesh), case)
    np.testing.assert_allclose(got_losses, losses, rtol=2e-4)
    assert set(got) == set(weights)
    for name, wanted in weights.items():
        same(got[name], wanted, name, tolerance=2e-4)


@pytest.mark.parametrize(
    ("world", "name"),
    [(2, "tied, loss_parallel"), pytest.param(4, "norms in heads", marks=pytest.mark.nightly)],
)
def test_steps_of_adamw(pool: Any, world: int, name: str) -> None:
    pool.run(world, trained, CASES[name])


@on_mesh()
def kept_ties(mesh: Any) -> list[bool]:
    model = make(CASES["tied"], mesh)
    head = model.lm_head.weight
    local = ms.grad(lambda: loss_of(model(tokens(Config())), tokens(Config())), None, [head])()[0]
    return [
        head is model.model.embed_tokens.weight,
        head.placements == (Shard(0),),
        local.shape == head.to_local().shape,
    ]


def test_tied_weights_stay_tied(pool: Any) -> None:
    assert pool.run(2, kept_ties) == [[True] * 3] * 2


@on_mesh()
def documented(mesh: Any) -> tuple[float, list, list]:
    page = (Path(__file__).parents[2] / "docs" / "mindspore.md").read_text()
    names: dict[str, Any] = {"__name__": "documentation"}
    exec(page.split("## Llama")[1].split("```python\n")[1].split("```")[0], names)
    parameters = names["model"].trainable_params()
    shapes = [tuple(g.shape) == tuple(p.shape) for g, p in zip(names["gradients"], parameters, strict=True)]
    return float(names["loss"]), names["generated"].asnumpy().tolist(), shapes


def test_snippet_of_the_documentation(pool: Any) -> None:
    first, *others = pool.run(4, documented)
    assert 4 < first[0] < 8 and [len(row) for row in first[1]] == [12, 12] and all(first[2])
    assert others == [first] * 3
