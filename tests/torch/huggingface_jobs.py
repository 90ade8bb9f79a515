"""Jobs of the test pool for `test_huggingface`: each compares a parallelised model with the single-process one."""

from __future__ import annotations

import copy
import tempfile
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    NoParallel,
    Replicate,
    Shard,
    fully_shard,
    loss_parallel,
)
from hyper_parallel.core.rules.random import _SYNCHRONIZED
from hyper_parallel.integrations.huggingface import full_state_dict, parallelize_model
from hyper_parallel.integrations.huggingface.shares import shares_of
from hyper_parallel.testing.spmd import device_mesh, on_mesh
from tests.torch.huggingface_models import batch, build
from tests.torch.support import close, device, full

TOLERANCE = 2e-5


def pair(mesh: Any, case: str, changes: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Any]:
    """The model of a case, and a parallelised copy."""
    single = build(case, **(changes or {}))
    return single, parallelize_model(copy.deepcopy(single), mesh, **options)


def compare_steps(single: Any, model: Any, context: AbstractContextManager | None = None) -> dict[str, Any]:
    """Loss, logits and all gradients of one step; the collectives of forward and backward.

    Both draw random numbers from the same state.
    """
    inputs = batch(single.config.vocab_size)
    results, counts = [], {}
    for one in (single, model):
        torch.manual_seed(5)
        with (context or nullcontext()) if one is model else nullcontext():
            with CommDebugMode() as forward:
                result = one(**inputs)
            with CommDebugMode() as backward:
                result.loss.backward()
        results.append(result)
        counts = {"forward": forward.get_comm_counts(), "backward": backward.get_comm_counts()}
    wanted, got = results
    close(got.logits, wanted.logits, "logits", TOLERANCE)
    close(got.loss, wanted.loss, "loss", TOLERANCE)
    compare_gradients(single, model)
    return {**counts, "logits": got.logits}


def compare_gradients(single: Any, model: Any, tolerance: float = TOLERANCE) -> None:
    for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            assert isinstance(p.grad, DTensor) == isinstance(p, DTensor), name
            close(p.grad, q.grad, f"gradient of {name}", tolerance)


def same_words(single: Any, model: Any, **how: Any) -> None:
    """The two models generate the same ids."""
    inputs = batch(single.config.vocab_size)
    del inputs["labels"]
    words = []
    for one in (single, model):
        torch.manual_seed(7)
        words.append(one.generate(**inputs, **{"max_new_tokens": 4, "do_sample": False, **how}))
    assert torch.equal(*words), (how, words)


@on_mesh()
def equals(mesh: Any, case: str, options: dict[str, Any]) -> dict[str, Any]:
    """Everything of one model: logits, loss, gradients, generated words, keys. Gives the numbers of collectives."""
    single, model = pair(mesh, case, **options)
    assert list(model.state_dict()) == list(single.state_dict())
    counts = compare_steps(single, model)
    assert not isinstance(counts.pop("logits"), DTensor)
    same_words(single, model)
    same_words(single, model, use_cache=False)
    return counts


@on_mesh()
def placements(mesh: Any, case: str, names: list[str]) -> list[Any]:
    """The placements of parameters; None for plain ones."""
    parameters = dict(pair(mesh, case)[1].named_parameters(remove_duplicate=False))
    return [parameters[name].placements[0] if isinstance(parameters[name], DTensor) else None for name in names]


@on_mesh()
def sharded_logits(mesh: Any, case: str) -> dict[str, Any]:
    """The loss of logits that are never gathered."""
    single, model = pair(mesh, case, gather_logits=False)
    counts = compare_steps(single, model, loss_parallel())
    logits = counts.pop("logits")
    assert logits.placements == (Shard(2),) and logits.shape[-1] == single.config.vocab_size
    return counts


@on_mesh()
def checkpointing(mesh: Any, case: str, use_reentrant: bool) -> None:
    """Layers that are computed again in backward."""
    single, model = pair(mesh, case)
    for one in (single, model):
        one.train()
        one.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    compare_steps(single, model)


@on_mesh()
def dropout(mesh: Any) -> None:
    """Dropout outside of attention draws the numbers of a single process; inside, where every rank has all heads."""
    outside = {"resid_pdrop": 0.3, "embd_pdrop": 0.3}
    gathered = {
        "transformer.h.*.attn.c_attn": "colwise_gather_output",
        "transformer.h.*.attn.c_proj": "rowwise_split_input",
    }
    for changes, options in ((outside, {}), ({**outside, "attn_pdrop": 0.3}, {"plan": gathered})):
        single, model = pair(mesh, "gpt2, eager", changes, **options)
        compare_steps(single.train(), model.train())


@on_mesh()
def generators(mesh: Any) -> float:
    """A number that is drawn after a model was parallelised by ranks with different seeds."""
    model = build("gpt2")
    _SYNCHRONIZED.discard(mesh)  # as if it were the first on this mesh
    torch.manual_seed(mesh.get_local_rank())
    parallelize_model(model, mesh)
    return torch.rand(1, device=device()).item()


@on_mesh()
def low_precision(mesh: Any, case: str) -> None:
    """A parallelised model with weights and autocast in bfloat16 is as near to float32 as a single process."""
    exact = build(case)
    inputs = batch(exact.config.vocab_size)
    wanted = exact(**inputs)
    wanted.loss.backward()
    for autocast in (False, True):
        single = build(case) if autocast else build(case).to(torch.bfloat16)
        model = parallelize_model(copy.deepcopy(single), mesh)
        errors = []
        for one in (single, model):
            with torch.autocast(mesh.device_type, torch.bfloat16, enabled=autocast):
                result = one(**inputs)
            result.loss.backward()
            off = [
                (full(p.grad).float() - q.grad).norm()
                for p, q in zip(one.parameters(), exact.parameters(), strict=True)
            ]
            errors.append([(result.logits.float() - wanted.logits).norm().item(), torch.stack(off).norm().item()])
        for single_error, error in zip(*errors, strict=True):
            assert error < 1.5 * single_error, (autocast, errors)


@on_mesh()
def training(mesh: Any, case: str) -> None:
    """Steps of AdamW with clipped gradients, where plain and distributed parameters meet."""
    single, model = pair(mesh, case)
    inputs = batch(single.config.vocab_size)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (single, model)]
    for _ in range(3):
        norms = []
        for one, optimizer in zip((single, model), optimizers, strict=True):
            optimizer.zero_grad()
            one(**inputs).loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5))
            optimizer.step()
        close(norms[1], norms[0], "norm", 1e-4)
    for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
        close(p, q, name, 1e-3)


@on_mesh()
def generating(mesh: Any, case: str) -> None:
    """Other ways to generate than greedily with a growing cache."""
    single, model = pair(mesh, case)
    same_words(single, model, cache_implementation="static")
    same_words(single, model, num_beams=2)
    same_words(single, model, do_sample=True, top_k=5)
    same_words(single, model, max_new_tokens=12)  # beyond the sliding window


@on_mesh()
def saving(mesh: Any, case: str) -> None:
    """A saved model is the whole model, loads as any other, and cannot be saved in parts by mistake."""
    single, model = pair(mesh, case)
    weights = full_state_dict(model)
    assert len({id(x) for x in weights.values()}) == len(list(single.parameters()))  # ties are one tensor
    if mesh.get_rank() != 0:  # transformers writes on rank 0 only
        return
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict=weights)
        loaded = type(single).from_pretrained(folder).state_dict()
        assert list(loaded) == list(single.state_dict())
        for name, value in single.state_dict().items():
            assert torch.equal(loaded[name].cpu(), value.cpu()), name
        with pytest.raises(RuntimeError, match=r"full_tensor\(\)"):
            model.save_pretrained(Path(folder) / "mistake")


@on_mesh()
def copies(mesh: Any, case: str) -> None:
    """A deep copy computes with its own parameters."""
    single, model = pair(mesh, case)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    compare_steps(single, twin)


@on_mesh()
def from_one_rank(mesh: Any) -> None:
    """All parameters are those of ``src_data_rank``, the plain ones too."""
    single, model = build("llama"), build("llama")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(abs(mesh.get_local_rank() - 1))
    compare_steps(single, parallelize_model(model, mesh, src_data_rank=1))


@on_mesh()
def changed_plans(mesh: Any) -> None:
    """Entries of the user come before the model's own; None takes one out."""
    changes = {
        "model.layers.1.mlp.*_proj": None,
        "model.layers.*.self_attn.?_proj": None,
        "model.embed_tokens": ColwiseParallel(output_layouts=Replicate()),
        "lm_head": NoParallel(),
    }
    single, model = pair(mesh, "llama", plan=changes)
    sharded = {name for name, p in model.named_parameters() if isinstance(p, DTensor) and p.placements[0].is_shard()}
    assert sharded == {
        "model.embed_tokens.weight",
        *(f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }
    assert model.lm_head.weight.placements == (Replicate(),)
    compare_steps(single, model)


def errors() -> None:
    """Wrong use is an error that changes nothing."""
    mesh, two_dimensions = device_mesh(), device_mesh(1, 2, names=("dp", "tp"))
    if mesh is None:
        return

    import transformers

    def refused(error: type[Exception], words: str, case: str = "llama", **options: Any) -> None:
        model = build(case)
        with pytest.raises(error, match=words):
            parallelize_model(model, options.pop("mesh", mesh), **options)
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        model(**batch(model.config.vocab_size))

    odd = "heads that do not divide"
    refused(ValueError, r"layers\.0\.self_attn' has 6 heads and 3 key.*ranks.*gather_heads=True", f"llama, {odd}")
    refused(ValueError, r"h\.0\.attn' has 5 heads, which do not divide over the 2 ranks.*1, 5 ranks", f"gpt2, {odd}")
    misspelt = {"model.nrom": "replicate"}
    refused(ValueError, "no such module or parameter; the nearest paths are 'model.norm'", plan=misspelt)
    refused(ValueError, "not the name of a style: the nearest are 'colwise'", plan={"lm_head": "colwize"})
    refused(
        ValueError,
        "'sequence_parallel' for the parameter 'model.norm.weight'",
        plan={"model.norm.weight": "sequence_parallel"},
    )
    refused(ValueError, "src_data_rank=2", src_data_rank=2)
    refused(ValueError, "gather_logits=False needs a", plan={"lm_head": None}, gather_logits=False)
    experts = {"model.layers.*.mlp.experts.down_proj": None}
    refused(ValueError, "not their parameter 'down_proj'", "mixtral", plan=experts)
    model = build("llama")
    model.model.layers[1].mlp.act_fn = torch.nn.PReLU(40)
    with pytest.raises(ValueError, match=r"has no style for the parameters 'weight' of 'model.layers.1.mlp.act_fn'"):
        parallelize_model(model, mesh)
    with pytest.raises(TypeError, match="takes a model of transformers, got Linear"):
        parallelize_model(torch.nn.Linear(2, 2), mesh)
    tiny = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    bloom = transformers.BloomModel(transformers.BloomConfig(**tiny))
    with pytest.raises(ValueError, match=r"BloomModel has no tensor-parallel plan.*'bloom'.*plan="):
        parallelize_model(bloom, mesh)
    quantised = build("llama")
    quantised.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(
        torch.zeros(40, 32, dtype=torch.int8, device=device()), requires_grad=False
    )
    with pytest.raises(TypeError, match=r"quantised.*up_proj.weight'.*dequantize\(\)"):
        parallelize_model(quantised, mesh)
    refused(ValueError, r"needs a 1-D mesh", mesh=two_dimensions)
    grouped = build("llama, one key-value head")
    del grouped.model.layers[0].self_attn.num_key_value_groups
    with pytest.raises(
        ValueError, match=r"1 key and value heads for 2 ranks.*LlamaAttention has the attribute num_key"
    ):
        parallelize_model(grouped, mesh)
    experts = parallelize_model(build("mixtral"), mesh, expert_parallel=True).model.layers[0].mlp.experts
    with pytest.raises(
        ValueError, match=r"MixtralExperts was called with unsupported arguments: expert parallelism needs"
    ):
        experts(torch.ones(3, 32, device=device()))


@on_mesh()
def twice(mesh: Any) -> None:
    """A model that is parallelised already is refused."""
    _, model = pair(mesh, "llama")
    with pytest.raises(ValueError, match="has the style"):
        parallelize_model(model, mesh)


def units_of(model: Any, shard: Any, mesh: Any) -> Any:
    """The layers and the root, each a unit."""
    for layer in model.transformer.h if hasattr(model, "transformer") else model.model.layers:
        shard(layer, mesh=mesh)
    return shard(model, mesh=mesh)


def parts_of(single: Any, size: int) -> list[dict[str, torch.Tensor]]:
    """A sample for each data-parallel rank, of as many words that count."""
    inputs = batch(single.config.vocab_size)
    whole = {name: x[:1].repeat(size, 1) for name, x in inputs.items()}
    whole["input_ids"] = torch.stack([row.roll(i) for i, row in enumerate(whole["input_ids"])])
    whole["labels"] = whole["input_ids"].clone()
    return [{name: x[i : i + 1] for name, x in whole.items()} for i in range(size)]


def precise(case: str) -> Any:
    """The model of a case in double precision, where kernels have it: AdamW makes steps of rounding errors where a
    gradient is zero, as that of GPT-2's biases of keys."""
    return build(case) if case == "mixtral" or device().type != "cpu" else build(case).double()


def trained_alike(single: Any, model: Any, size: int, rank: int) -> None:
    """Two steps of AdamW: losses, gradients, norms and parameters."""
    tolerance = 1e-6 if next(single.parameters()).dtype is torch.float64 else 1e-4
    parts = parts_of(single, size)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (single, model)]
    for step in range(2):
        loss = torch.stack([single(**part).loss for part in parts])
        loss.mean().backward()
        own = model(**parts[rank]).loss
        own.backward()
        close(own, loss[rank], f"loss at step {step}", tolerance)
        for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                assert p.grad.placements == p.placements, name
                close(p.grad, q.grad, f"gradient of {name} at step {step}", tolerance)
        norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5) for one in (single, model)]
        close(norms[1], norms[0], f"norm at step {step}", tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
        close(p, q, name, tolerance)


@on_mesh(2, 2, names=("dp", "tp"))
def sharded_on_both(mesh: Any, case: str, options: dict[str, Any]) -> None:
    """Apply this library's `fully_shard` on top of `parallelize_model`."""
    single = precise(case)
    model = parallelize_model(copy.deepcopy(single), mesh["tp"], **options)
    units_of(model, fully_shard, mesh["dp"])
    trained_alike(single, model, 2, mesh.get_local_rank("dp"))


@on_mesh()
def sharded_alone(mesh: Any, case: str) -> None:
    single = precise(case)
    model = units_of(copy.deepcopy(single), fully_shard, mesh)
    trained_alike(single, model, mesh.size(), mesh.get_local_rank())


@on_mesh(2, 2, names=("dp", "tp"))
def fully_sharded(mesh: Any, case: str) -> None:
    """Torch's `fully_shard` on each layer and the root; each data-parallel rank has a sample of its own."""
    from torch.distributed.fsdp import fully_shard as of_torch

    single, model = pair(mesh["tp"], case)
    for layer in model.model.layers:
        of_torch(layer, mesh=mesh["dp"])
    of_torch(model, mesh=mesh["dp"])
    parts = [{name: x[i : i + 1] for name, x in batch(single.config.vocab_size).items()} for i in range(2)]
    torch.stack([single(**part).loss for part in parts]).mean().backward()
    model(**parts[mesh.get_local_rank("dp")]).loss.backward()
    for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
        close(p.grad.full_tensor(), q.grad, f"gradient of {name}", TOLERANCE)


@on_mesh()
def says_its_share(mesh: Any) -> None:
    """The log has the share of bytes that is sharded, and a small one is a warning with the names."""
    torch.manual_seed(0)
    model = build("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize_model(model, mesh)
    found = shares_of(model)
    assert found.sharded_nbytes / found.nbytes > 0.9
    assert set(found.whole) == {
        "model.norm.weight",
        "model.layers.*.input_layernorm.weight",
        "model.layers.*.post_attention_layernorm.weight",
    }
    without = {f"model.layers.*.{name}": None for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
    without |= {"model.embed_tokens": None, "lm_head": None}
    with pytest.warns(
        UserWarning, match=r"shards \d+% of the bytes of LlamaForCausalLM over 2 ranks, 8 of 21 .*'lm_head.w"
    ):
        parallelize_model(build("llama"), mesh, plan=without)
