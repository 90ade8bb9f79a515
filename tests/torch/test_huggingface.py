"""Models of transformers, parallelised by their own plans, equal the same models in a single process."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest

from hyper_parallel import Replicate, Shard
from hyper_parallel.testing.extent import in_gate
from tests.torch.huggingface_models import CASES

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None,
    reason="transformers is not installed: platform/torch-cpu/requirements.txt has the version that the gate uses",
)

#: On a simulated device everything takes several times as long, and the number of ranks changes little.
DEVICE = os.environ["HYPER_PARALLEL_PLATFORM"].removeprefix("torch-")
JOBS = "tests.torch.huggingface_jobs"
LAYERS = 2
#: Heads that this number of ranks can share only by computing attention in full on each.
GATHERED = {"gather_heads": True}
ON_TWO = ["llama", "llama, few key-value heads", "qwen3", "gpt2", "mixtral", "apertus"]
ON_FOUR = (
    ["llama"]
    if DEVICE != "cpu"
    else [case for case in CASES if case not in ("apertus", "llama, heads that do not divide", "gpt2, three heads")]
)


#: Of `fully_shard` on top.
SHARDED = ["llama", "llama, odd sizes", "qwen3", "gpt2", "mixtral"] if DEVICE == "cpu" else ["llama"]
#: On four ranks: shared heads, norms in heads, two kinds of experts, layers of Conv1D; the others are built of these.
IN_GATE = {
    "llama, one key-value head",
    "llama, odd sizes",
    "gemma 3",
    "gpt2, heads that do not divide",
    "mixtral",
    "qwen3 moe",
    "qwen3, heads that do not divide",
    *(ON_FOUR if DEVICE != "cpu" else ()),
}


@pytest.mark.parametrize("case", ON_TWO)
def test_two_ranks(pool: Any, case: str) -> None:
    pool.run(2, f"{JOBS}:equals", case, {})


@pytest.mark.parametrize("case", in_gate(ON_FOUR, [case for case in ON_FOUR if case in IN_GATE]))
def test_four_ranks(pool: Any, case: str) -> None:
    pool.run(4, f"{JOBS}:equals", case, GATHERED if "do not divide" in case else {})


@pytest.mark.parametrize("case", ["llama, heads that do not divide", "gpt2, three heads"])
def test_three_ranks_and_a_vocabulary_that_does_not_divide(pool: Any, case: str) -> None:
    pool.run(3, f"{JOBS}:equals", case, {})


@pytest.mark.parametrize("case", ["llama", "llama, odd sizes", "qwen3"])
def test_fully_shard_of_torch(pool: Any, case: str) -> None:
    pool.run(4, f"{JOBS}:fully_sharded", case)


@pytest.mark.parametrize("case", SHARDED)
def test_fully_shard(pool: Any, case: str) -> None:
    pool.run(4, f"{JOBS}:sharded_on_both", case, {})


@pytest.mark.parametrize(("world_size", "case"), list(zip((2, 3, 4, 2, 3), SHARDED, strict=False)))
def test_fully_shard_without_tensor_parallelism(pool: Any, world_size: int, case: str) -> None:
    pool.run(world_size, f"{JOBS}:sharded_alone", case)


def test_llama_communicates_as_megatron_does(pool: Any) -> None:
    """One all-reduce for the embedding, two a layer, one all-gather for the logits. In backward there are two a layer,
    and one for the head."""
    (counts, _) = pool.run(2, f"{JOBS}:equals", "llama, tied", {})
    assert counts == {
        "forward": {"all_reduce": 1 + 2 * LAYERS, "all_gather": 1},
        "backward": {"all_reduce": 2 * LAYERS + 1},
    }


def test_norms_in_heads_and_shared_heads_reduce_their_gradients(pool: Any) -> None:
    """Two norms a layer, two projections of shared heads a layer."""
    (counts, *_) = pool.run(4, f"{JOBS}:equals", "qwen3", {})
    assert counts["backward"] == {"all_reduce": 2 * LAYERS + 1 + 2 * LAYERS + 2 * LAYERS}


def test_experts_add_the_gradient_of_the_routing_weights(pool: Any) -> None:
    (counts, _) = pool.run(2, f"{JOBS}:equals", "mixtral", {})
    assert counts == {
        "forward": {"all_reduce": 1 + 2 * LAYERS, "all_gather": 1},
        "backward": {"all_reduce": 2 * LAYERS + 1 + LAYERS},
    }


def test_what_is_sharded(pool: Any) -> None:
    layer = "model.layers.1."
    wanted = {
        "lm_head.weight": Shard(0),
        "model.embed_tokens.weight": Shard(0),
        f"{layer}self_attn.q_proj.weight": Shard(0),
        f"{layer}self_attn.k_proj.weight": Replicate(),
        f"{layer}self_attn.o_proj.weight": Shard(1),
        f"{layer}mlp.down_proj.weight": Shard(1),
        f"{layer}input_layernorm.weight": None,
        "model.norm.weight": None,
    }
    assert pool.run(4, f"{JOBS}:placements", "gemma", list(wanted)) == [list(wanted.values())] * 4


@pytest.mark.parametrize("case", ["llama, odd sizes", "gemma 2", "gpt2"])
def test_logits_stay_sharded_for_loss_parallel(pool: Any, case: str) -> None:
    """Two all-reduces of a few numbers for each word in place of the all-gather."""
    (counts, *_) = pool.run(4, f"{JOBS}:sharded_logits", case)
    shared_heads = 2 * LAYERS if case == "gemma 2" else 0
    assert counts == {
        "forward": {"all_reduce": 1 + 2 * LAYERS + 2},
        "backward": {"all_reduce": 2 * LAYERS + 1 + shared_heads},
    }


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("case", ["gpt2", "mixtral"])
def test_gradient_checkpointing(pool: Any, case: str, use_reentrant: bool) -> None:
    pool.run(2, f"{JOBS}:checkpointing", case, use_reentrant)


def test_dropout(pool: Any) -> None:
    pool.run(2, f"{JOBS}:dropout")


def test_ranks_draw_the_same_numbers(pool: Any) -> None:
    """Otherwise dropout would silently give each rank other hidden states."""
    assert len(set(pool.run(2, f"{JOBS}:generators"))) == 1


@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral"])
def test_bfloat16(pool: Any, case: str) -> None:
    pool.run(2, f"{JOBS}:low_precision", case)


def test_training(pool: Any) -> None:
    pool.run(2, f"{JOBS}:training", "mixtral")


@pytest.mark.parametrize("case", ["gemma 3", "gpt2"])
def test_generating(pool: Any, case: str) -> None:
    pool.run(2, f"{JOBS}:generating", case)


@pytest.mark.parametrize("case", ["llama, tied", "gpt2"])
def test_saving(pool: Any, case: str) -> None:
    pool.run(2, f"{JOBS}:saving", case)


@pytest.mark.parametrize("job", ["from_one_rank", "changed_plans", "errors", "twice"])
def test_use(pool: Any, job: str) -> None:
    pool.run(2, f"{JOBS}:{job}")


def test_copies(pool: Any) -> None:
    pool.run(2, f"{JOBS}:copies", "mixtral")


def test_the_share_that_is_sharded(pool: Any) -> None:
    pool.run(2, f"{JOBS}:says_its_share")
