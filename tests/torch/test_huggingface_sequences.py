"""Models of transformers whose sequences are cut: logits, loss and gradients of a single process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import DTensor, Partial, check_ranks, fully_shard, shard_sequence, token_mean
from hyper_parallel.experimental import context_parallel_unshard
from hyper_parallel.testing import spmd
from tests.torch.huggingface_models import build
from tests.torch.support import device

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None,
    reason="transformers is not installed: platform/torch-cpu/requirements.txt has the version that the gate uses",
)

IGNORED = -100


def data(length: int) -> tuple[Any, Any]:
    ids = torch.arange(2 * length).reshape(2, length).mul(7).remainder(40).add(3).to(device())
    labels = ids.clone()
    labels[0, :3] = IGNORED
    return ids, labels


def single(model: Any, length: int) -> tuple[Any, Any]:
    ids, labels = data(length)
    logits = model(input_ids=ids).logits
    shifted = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)
    loss = F.cross_entropy(logits.float().flatten(0, 1), shifted.flatten())
    loss.backward()
    return logits, loss


def cut(model: Any, mesh: Any, length: int, averaged: bool) -> tuple[Any, Any]:
    ids, labels = data(length)
    batch = shard_sequence({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}, mesh)
    labels = batch.pop("labels")
    logits = model(**batch).logits
    losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    loss = token_mean(losses, labels, mesh, averaged=averaged)
    loss.backward()
    return context_parallel_unshard(mesh, [logits], [1])[0], loss


def whole_gradient(p: Any, mesh: Any, averaged: bool) -> Any:
    """The gradient of a parameter, added over the ranks of ``mesh`` where nothing has done so."""
    if averaged:
        return p.grad.full_tensor()
    own = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
    total = DTensor.from_local(own, mesh, [Partial()]).full_tensor()
    if isinstance(p.grad, DTensor):
        x = p.grad
        return DTensor.from_local(total, x.device_mesh, x.placements, shape=tuple(x.shape)).full_tensor()
    return total


def compare(mesh: Any, case: str, length: int, sharded: bool = False, reentrant: bool | None = None) -> None:
    from hyper_parallel.integrations.huggingface import parallelize_model

    reference, model = (build(case, attn_implementation="eager" if case == "gpt oss" else "sdpa") for _ in range(2))
    wanted, wanted_loss = single(reference, length)
    assert parallelize_model(model, mesh) is model
    sequences = mesh["cp"]
    if reentrant is not None:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if sharded:
        for layer in model.model.layers:
            fully_shard(layer, mesh=sequences)
        fully_shard(model, mesh=sequences)
    logits, loss = cut(model, sequences, length, sharded)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4, msg=f"{case}: logits")
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-5, atol=1e-5, msg=f"{case}: loss")
    named = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        found = whole_gradient(p, sequences, sharded)
        torch.testing.assert_close(found, named[name].grad, rtol=1e-3, atol=1e-4, msg=f"{case}: gradient of {name}")
    ids, _ = data(7)
    lengths: list[int] = []
    watch = model.get_input_embeddings().register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    ways: tuple[dict[str, Any], ...] = ({}, {"cache_implementation": "static"})
    for more in ways:
        lengths.clear()
        words = (m.generate(ids, max_new_tokens=3, do_sample=False, **more) for m in (model.eval(), reference.eval()))
        assert torch.equal(*words)
        # A part of the prompt, then a word each. Some static caches come with masks: then the prompt is whole.
        part = 4 - sequences.get_local_rank()
        assert lengths[1:] == [1, 1] and lengths[0] in ({part, 7} if more else {part}), (case, more, lengths)
    watch.remove()


@spmd.on_mesh(2, names=("cp",))
def on_two(mesh: Any) -> None:
    compare(mesh, "llama, few key-value heads", 9)
    compare(mesh, "gemma 3", 8, sharded=True)
    compare(mesh, "mixtral", 9)
    compare(mesh, "gpt oss", 9, sharded=True)
    for reentrant in (True, False):
        compare(mesh, "qwen3", 8, reentrant=reentrant)


def test_two_ranks(pool: Any) -> None:
    pool.run(2, on_two)


@spmd.on_mesh(2, 2, names=("cp", "tp"))
def with_heads(mesh: Any, *cases: str) -> None:
    for case in cases:
        compare(mesh, case, 9)


def test_sequences_and_heads(pool: Any) -> None:
    pool.run(4, with_heads, "gemma 3")


@pytest.mark.nightly
def test_sequences_and_heads_of_more_models(pool: Any) -> None:
    pool.run(4, with_heads, "llama", "llama, one key-value head", "qwen3", "mistral", "mixtral", "gpt oss")


def one_position(mesh: Any, length: int, changes: dict[str, Any]) -> None:
    """A rank with one token of a causal sequence: the token sees none after it."""
    from hyper_parallel.integrations.huggingface import parallelize_model

    reference, model = build("llama", **changes), parallelize_model(build("llama", **changes), mesh)
    wanted, _ = single(reference, length)
    logits, _ = cut(model, mesh["cp"], length, False)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        found = whole_gradient(p, mesh["cp"], False)
        torch.testing.assert_close(found, q.grad, rtol=1e-3, atol=1e-4, msg=f"{length} tokens: gradient of {name}")


def window_to_both_sides(mesh: Any) -> None:
    """T5Gemma's encoder, whose window has its ends inside."""
    from transformers import T5GemmaConfig, T5GemmaEncoderModel

    from hyper_parallel.integrations.huggingface import parallelize_model

    part: dict[str, Any] = {
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 3,
        "attn_logit_softcapping": None,
        "query_pre_attn_scalar": 8,
    }
    torch.manual_seed(0)
    config = T5GemmaConfig(encoder=part, decoder=part, is_encoder_decoder=False, attn_implementation="eager")
    reference = T5GemmaEncoderModel(config).eval().to(device())
    model = parallelize_model(copy.deepcopy(reference), mesh)
    ids, _ = data(9)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    wanted = reference(**batch).last_hidden_state
    y = model(**shard_sequence(batch, mesh["cp"])).last_hidden_state
    torch.testing.assert_close(context_parallel_unshard(mesh["cp"], [y], [1])[0], wanted, rtol=1e-4, atol=1e-4)


@spmd.on_mesh(2, names=("cp",))
def of_parts(mesh: Any) -> None:
    one_position(mesh, 2, {})
    one_position(mesh, 3, {"num_key_value_heads": 2, "head_dim": 264})  # torch's kernels take 256 features
    window_to_both_sides(mesh)


def test_parts_of_one_position_and_windows(pool: Any) -> None:
    pool.run(2, of_parts)


@spmd.on_mesh(2, names=("cp",))
def whole_prompts(mesh: Any) -> None:
    """Prompts that hide tokens, that are shorter than the ranks, and that are another on each rank are not cut. Neither
    are those whose hidden states or weights of attention the caller wants."""
    from hyper_parallel.integrations.huggingface import parallelize_model

    reference, model = (build("llama", attn_implementation="eager") for _ in range(2))
    parallelize_model(model, mesh)
    ids, _ = data(6)
    hiding = torch.ones_like(ids)
    hiding[0, :2] = 0
    own = ids + mesh.get_local_rank("cp")
    for prompt, mask in ((ids, hiding), (ids[:, :1], None), (own, None)):
        words = [m.generate(prompt, attention_mask=mask, max_new_tokens=3, do_sample=False) for m in (model, reference)]
        assert torch.equal(*words)
    for key in ("hidden_states", "attentions"):
        more: dict[str, Any] = {f"output_{key}": True, "return_dict_in_generate": True, "do_sample": False}
        found, wanted = (m.generate(ids, max_new_tokens=2, **more)[key] for m in (model, reference))
        torch.testing.assert_close(found, wanted)


def test_prompts_that_are_not_cut(pool: Any) -> None:
    pool.run(2, whole_prompts)


@spmd.on_mesh(2, names=("cp",))
def wrong(mesh: Any) -> None:
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForSequenceClassification

    from hyper_parallel.integrations.huggingface import parallelize_model

    model = parallelize_model(build("llama"), mesh)
    ids, _ = data(6)
    batch = shard_sequence({"input_ids": ids}, mesh)
    part, positions, whole = batch["input_ids"], batch["position_ids"], torch.ones_like(ids)
    hiding, same = whole.clone(), torch.arange(3, device=device())[None]
    hiding[0, 0] = 0
    packed = {"input_ids": ids, "position_ids": torch.arange(6, device=device())[None] % 4}
    x, tables = torch.zeros(2, 3, 32, device=device()), (torch.ones(2, 3, 8, device=device()),) * 2
    copied = copy.deepcopy(model)
    capped = parallelize_model(build("gemma 2"), mesh)
    routed = parallelize_model(build("mixtral"), mesh)
    sinking = build("llama")  # as gpt-oss has them
    sinking.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(4, device=device()))
    convolved, by_length, odd = build("llama"), build("llama"), build("llama")
    convolved.model.further = nn.Conv1d(2, 2, 3)
    by_length.model.rotary_emb.rope_type = "dynamic"
    odd.model.layers[0].config = copy.deepcopy(odd.config)
    odd.model.layers[0].config.layer_types = ["linear_attention"]
    other = build("llama")
    other._supports_attention_backend = False
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    pools = BertModel(BertConfig(**sizes, intermediate_size=8))
    classifies = LlamaForSequenceClassification(LlamaConfig(**sizes, intermediate_size=8))
    refusals: list[tuple[str, Callable[[], Any]]] = [
        ("Leave labels out", lambda: model(input_ids=part, position_ids=positions, labels=part)),
        ("without position_ids", lambda: model(part)),
        ("the same position_ids", lambda: model(input_ids=part, position_ids=same)),
        ("Leave start_positions", lambda: model(input_ids=part, position_ids=positions, start_positions=part)),
        ("do not count up", lambda: model(**shard_sequence(packed, mesh))),
        ("do not count up", lambda: model(**shard_sequence({"input_ids": ids}, mesh, balance=False))),
        ("do not count up", lambda: model(part, position_ids=torch.cat([positions, positions * 2]))),
        ("do not count up", lambda: model(part, position_ids=positions * 3)),
        ("hides tokens", lambda: model(part, hiding, positions)),
        ("hides tokens", lambda: model.model(part, hiding, positions)),
        ("must cover the full sequence", lambda: model(part, whole[:, :3], positions)),
        ("must cover the full sequence", lambda: model(part, hiding[:, None, None], positions)),
        ("belongs to a copy", lambda: copied.model.layers[0](x, position_embeddings=tables)),
        ("softcap", lambda: capped(input_ids=part, position_ids=positions)),
        (
            "a mask, which is not supported",
            lambda: model.model.layers[0](x, hiding[:, None, None], position_embeddings=tables),
        ),
        (
            "an unknown window to both sides",
            lambda: model.model.layers[0](x, position_embeddings=tables, sliding_window=2, is_causal=False),
        ),
        ("'pooler' reads one position", lambda: parallelize_model(pools, mesh)),
        ("from one position", lambda: parallelize_model(classifies, mesh)),
        ("has attention sinks", lambda: parallelize_model(sinking, mesh)),
        ("balance its experts", lambda: routed(part, position_ids=positions, output_router_logits=True)),
        ("mixes positions", lambda: parallelize_model(convolved, mesh)),
        ("largest position", lambda: parallelize_model(by_length, mesh)),
        ("of the kinds", lambda: parallelize_model(odd, mesh)),
        ("the attention interface of transformers", lambda: parallelize_model(other, mesh)),
    ]
    for words, call in refusals:
        with check_ranks(mesh), pytest.raises(ValueError, match=words):
            call()
    model(**shard_sequence({"input_ids": ids}, mesh))  # the ranks compare it, and later calls if positions are given
    with pytest.raises(ValueError, match="do not count up"):
        model(**shard_sequence(packed, mesh))
    ones = shard_sequence({**packed, "attention_mask": whole}, mesh)
    wanted = build("llama")(**packed, attention_mask=whole).logits
    torch.testing.assert_close(context_parallel_unshard(mesh, [model(**ones).logits], [1])[0], wanted)


def test_wrong_use(pool: Any) -> None:
    pool.run(2, wrong)


@spmd.on_mesh(1, 2, 2, names=("cp", "dp", "tp"))
def wrong_mesh(mesh: Any) -> None:
    from hyper_parallel.integrations.huggingface import parallelize_model

    with pytest.raises(ValueError, match="a 2-D mesh with the dimension 'cp'"):
        parallelize_model(build("llama"), mesh)


def test_a_mesh_with_other_dimensions(pool: Any) -> None:
    pool.run(4, wrong_mesh)
