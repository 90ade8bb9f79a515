"""No operation of the architectures of transformers gathers by fallback, and all give the results of a single
process."""

from __future__ import annotations

import copy
import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from hyper_parallel import ColwiseParallel, DTensor, Replicate, Shard, strict
from hyper_parallel.integrations.huggingface import parallelize_adapters, parallelize_model
from hyper_parallel.integrations.huggingface.plans import supported_names
from hyper_parallel.testing.extent import everything, in_gate
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.huggingface_adapters import adapted
from tests.torch.huggingface_jobs import TOLERANCE, compare_gradients, compare_steps, pair, same_words
from tests.torch.huggingface_models import FURTHER, SPARSE, batch, build
from tests.torch.support import close

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None,
    reason="transformers is not installed: platform/torch-cpu/requirements.txt has the version that the gate uses",
)

#: On a simulated device everything takes several times as long, and kernels of some are not there.
ON_CPU = os.environ["HYPER_PARALLEL_PLATFORM"] == "torch-cpu"
ALL = ["llama", "qwen3", "qwen3 moe", "mistral", "mixtral", "gemma 2", "gemma 3", "gpt2", *FURTHER]
#: test_huggingface.py has the others.
IN_GATE = ["mistral", "gemma 2", *FURTHER]
CASES = ([*ALL, *SPARSE] if everything() else IN_GATE) if ON_CPU else ["qwen2", "opt", "bert"]
EXPERTS = ["mixtral", "mixtral, eager", "qwen3 moe", "deepseek 2"] if ON_CPU else ["mixtral"]
#: Llama 4 has no plan for whole experts without a mesh.
MORE_EXPERTS = [case for case in SPARSE if case != "llama 4"] if everything() and ON_CPU else []


@on_mesh()
def zoo(mesh: Any) -> list[str]:
    """Forward, backward and greedy words of every architecture; gives the messages of all failures."""
    failures = []
    for case in CASES:
        try:
            with strict():
                single, model = pair(mesh, case)
                assert any(isinstance(p, DTensor) and p.placements[0].is_shard() for p in model.parameters())
                compare_steps(single, model)
                if model.can_generate():
                    same_words(single, model)
        except Exception as error:  # all are tried
            failures.append(f"{case}: {type(error).__name__}: {error}")
    return failures


def test_no_architecture_gathers_by_fallback(pool: Any) -> None:
    failures = pool.run(2, zoo)
    assert not any(failures), "\n".join(failures[0])


@on_mesh()
def by_expert(mesh: Any) -> None:
    """Whole experts on each rank, also where the router sends no token to those of some rank."""
    for case in EXPERTS + MORE_EXPERTS:
        if build(case).config.num_local_experts % mesh.size():
            continue  # refused
        with strict():
            single, model = pair(mesh, case, expert_parallel=True)
            experts = {name: p for name, p in model.named_parameters() if ".experts." in name}
            assert experts and all(p.placements == (Shard(0),) for p in experts.values()), experts
            compare_steps(single, model)
            same_words(single, model)
            for one in (single, model):
                one.zero_grad()
                one(input_ids=torch.full((1, 1), 5, device=one.device)).logits.square().sum().backward()
            # Experts sum over tokens in another order: 4.6e-5 was seen on some processors.
            compare_gradients(single, model, 1e-4)


@pytest.mark.parametrize("ranks", in_gate([2, 4], [4]) if ON_CPU else [2])
def test_experts_by_expert(pool: Any, ranks: int) -> None:
    pool.run(ranks, by_expert)


LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
GPT2 = ["c_attn", "c_proj", "c_fc"]
PHI3 = ["qkv_proj", "o_proj", "gate_up_proj"]


@on_mesh()
def lora(mesh: Any, case: str, names: list[str], placements: dict[str, Any]) -> None:
    """Adapters before and after `parallelize_model`: loss and gradients, with dropout that a single process draws, and
    greedy words."""
    inputs = batch(build(case).config.vocab_size)
    for after in (False, True):
        single = adapted(build(case), names, dropout=0.3)
        with strict():
            if after:
                model = adapted(parallelize_model(build(case), mesh), names, dropout=0.3)
                with torch.no_grad():
                    for name, p in model.named_parameters():
                        if "lora_A" in name:
                            p.mul_(1 if mesh.get_local_rank() == 0 else 2)  # those of the first rank count
                parallelize_adapters(model, mesh)
            else:
                model = parallelize_model(copy.deepcopy(single), mesh)
            assert type(model) is type(single) and list(model.state_dict()) == list(single.state_dict())
            parameters = dict(model.named_parameters())
            for end, placement in placements.items():
                p = next(p for name, p in parameters.items() if name.endswith(f"{end}.default.weight"))
                assert (p.placements[0] if isinstance(p, DTensor) else None) == placement, end
            results = []
            for one in (single, model):
                torch.manual_seed(5)
                results.append(one.train()(**inputs))
                results[-1].loss.backward()
                one.eval()
            same_words(single, model)
        close(results[1].loss, results[0].loss, "loss", TOLERANCE)
        compare_gradients(single, model)
        assert sum(p.grad is not None for p in model.parameters()) >= 2 * len(names)


ADAPTED: list[tuple[int, str, list[str], dict[str, Any]]] = [
    (
        2,
        "llama, few key-value heads",
        LLAMA,
        {"q_proj.lora_A": None, "q_proj.lora_B": Shard(0), "o_proj.lora_A": Shard(1), "o_proj.lora_B": None},
    ),
    (4, "llama, one key-value head", LLAMA, {"k_proj.lora_B": Replicate(), "down_proj.lora_A": Shard(1)}),
    (2, "gpt2", GPT2, {"mlp.c_proj.lora_A": Shard(1)}),
    (2, "phi 3", PHI3, {"gate_up_proj.lora_B": Shard(0), "o_proj.lora_A": Shard(1)}),
    (2, "qwen3", LLAMA[:4], {}),
]


@pytest.mark.parametrize(("ranks", "case", "names", "placements"), ADAPTED if ON_CPU else ADAPTED[:1])
def test_lora(pool: Any, ranks: int, case: str, names: list[str], placements: dict[str, Any]) -> None:
    pool.run(ranks, lora, case, names, placements)


@on_mesh()
def refused(mesh: Any) -> None:
    """A model that is not known to be right is refused, and stays unchanged."""

    def expect(words: str, model: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match=words):
            parallelize_model(model, mesh, **options)
        assert not any(isinstance(p, DTensor) for p in model.parameters())

    model = adapted(build("llama"), ["q_proj"])
    layer = next(module for path, module in model.named_modules() if path.endswith("0.self_attn.q_proj"))
    layer.lora_magnitude_vector = torch.nn.ModuleDict({"default": torch.nn.Identity()})
    expect("as in DoRA", model)
    layer.lora_magnitude_vector = torch.nn.ModuleDict()
    if type(layer).__name__ == "Adapted":
        vars(layer)["merged_adapters"] = ["default"]
    else:
        layer.merge()  # of peft, which has a property of that name
    expect("unmerge_adapter", model)
    del layer._modules["lora_A"]
    expect("not LoRA on a linear layer", model)
    model = build("llama")
    model.lm_head.modules_to_save = torch.nn.ModuleDict()
    expect("peft trains a copy of it", model)
    expect(
        "for 'lm_head', which has LoRA adapters",
        adapted(build("llama"), ["lm_head"]),
        plan={"lm_head": ColwiseParallel(input_layouts=Shard(1))},
    )
    expect("no plan for expert parallelism", build("llama"), expert_parallel=True)
    expect(
        "3 experts, which do not divide over the 2 ranks", build("mixtral", num_local_experts=3), expert_parallel=True
    )
    experts = {"model.layers.*.mlp.experts.down_proj": "rowwise"}
    expect("the parameter 'down_proj'", build("mixtral"), expert_parallel=True, plan=experts)
    expect("but this style is for parameters of experts", build("llama"), plan={"model.layers.*.mlp": "grouped_gemm"})
    expect("has no qk_rope_head_dim", build("llama"), plan={"model.layers.*.self_attn.k_proj": "mla_kv_a_proj"})
    expect(
        "no styles for its parameters 'sinks'", build("granite, sinks"), plan={"model.layers.*.self_attn.sinks": None}
    )
    with pytest.raises(ValueError, match="found no unsharded LoRA adapters"):
        parallelize_adapters(adapted(build("llama"), ["q_proj"]), mesh)


def test_refused(pool: Any) -> None:
    pool.run(2, refused)


def test_all_styles_of_transformers_are_known() -> None:
    """A new one is seen here."""
    from transformers.distributed import expert_parallel  # noqa: F401 - registers its own
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    assert set(ALL_PARALLEL_STYLES) <= set(supported_names())
    assert "embedding_colwise" in ALL_PARALLEL_STYLES and "ep_dispatch_experts" in ALL_PARALLEL_STYLES
