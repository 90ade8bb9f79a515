"""Files of transformers into parallelised models on meta, and back into `from_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel import DTensor, fully_shard
from hyper_parallel.checkpoint.index import Part, StoredTensor
from hyper_parallel.integrations.huggingface import load_pretrained, parallelize_model, save_pretrained
from hyper_parallel.integrations.huggingface.renamed import _one as one_of
from hyper_parallel.integrations.huggingface.renamed import arrangement
from hyper_parallel.testing import spmd
from hyper_parallel.testing.spmd import device_mesh
from tests.torch.huggingface_models import SPARSE, batch, build
from tests.torch.support import close, device

#: Files of the last ones have other names than the model: one tensor for each expert, a head of another name.
CASES = ["llama", "llama, odd sizes", "gpt2", "qwen3", "mixtral", "deepseek 2", "gpt neox"]


def write(case: str, directory: str, dtype: torch.dtype) -> None:
    """Write files of a model that transformers has loaded in this dtype."""
    from transformers import AutoModelForCausalLM

    if spmd.rank:
        return
    build(case).to(dtype).save_pretrained(directory)
    AutoModelForCausalLM.from_pretrained(directory).save_pretrained(f"{directory}/kept", max_shard_size="20KB")


def round_trip(shape: tuple[int, ...], case: str, directory: str, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    mesh = device_mesh(*shape, names=("tp",) if len(shape) == 1 else ("dp", "tp"))
    if mesh is None:
        return
    # Of some models it keeps some parameters in float32: since 5.24 the routers of DeepSeek.
    single = AutoModelForCausalLM.from_pretrained(f"{directory}/kept").to(device())
    assert {x.dtype for x in single.parameters()} <= {dtype, torch.float32}
    with torch.device("meta"):
        model = type(single)(single.config)
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        p.data = p.data.to(q.dtype)
    assert all(p.is_meta for p in model.parameters())
    ep = {"expert_parallel": mesh["dp", "tp"]._flatten("ep")} if case in SPARSE else {}
    model = parallelize_model(model, mesh if mesh.ndim == 1 else mesh["tp"], **ep)
    if mesh.ndim == 2:
        fully_shard(model, mesh=mesh["dp"])
    load_pretrained(model, f"{directory}/kept", mesh=mesh)
    wanted = single.state_dict()
    for name, p in model.state_dict().items():
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        assert whole.dtype is wanted[name].dtype and torch.equal(whole, wanted[name]), name
    for (name, x), (_, y) in zip(model.named_buffers(), single.named_buffers(), strict=True):
        assert not x.is_meta and torch.equal(x, y), name
    inputs = batch(single.config.vocab_size)
    # Rows of the batch are the same on all ranks, so that losses are, too.
    result, expected = model(**inputs, use_cache=False), single(**inputs)
    tolerance = 1e-4 if dtype is torch.float32 else 0.05
    close(result.loss.float(), expected.loss.float(), "loss", tolerance)
    result.loss.backward()
    out = f"{directory}/again"
    save_pretrained(model, out, max_shard_size="30KB", mesh=mesh)
    again = AutoModelForCausalLM.from_pretrained(out).to(device())
    assert type(again) is type(single) and (Path(out) / "generation_config.json").exists()
    for name, x in again.state_dict().items():
        assert x.dtype is wanted[name].dtype and torch.equal(x, wanted[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("number", range(len(CASES)), ids=CASES)
def test_round_trip(pool: Any, tmp_path: Path, number: int, dtype: torch.dtype) -> None:
    shape = [(2,), (4,), (2, 2)][(number + (dtype is torch.bfloat16)) % 3]
    pool.run(1, write, CASES[number], str(tmp_path), dtype)
    pool.run(4, round_trip, shape, CASES[number], str(tmp_path), dtype)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", SPARSE)
def test_round_trip_with_whole_experts(pool: Any, tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    pool.run(1, write, case, str(tmp_path), dtype)
    pool.run(4, round_trip, (2, 2), case, str(tmp_path), dtype)


def stored(name: str, *shape: int) -> StoredTensor:
    return StoredTensor("float32", shape, "plain", (Part((0,) * len(shape), shape, "file", name),))


def test_several_tensors_of_files_are_one_of_the_model() -> None:
    from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, WeightConverter

    def converter(*operations: Any) -> WeightConverter:
        return WeightConverter(["a.*.x", "a.*.y"], "a", list(operations))

    joined = one_of("a", [[stored("x", 2, 3)], [stored("y", 4, 3)]], converter(Concatenate(dim=0)))
    assert joined.shape == (6, 3) and [part.offsets for part in joined.parts] == [(0, 0), (2, 0)]
    experts = [[stored(f"{n}{i}", 2, 3) for i in range(2)] for n in "xy"]
    both = one_of("a", experts, converter(MergeModulelist(dim=0), Concatenate(dim=1)))
    assert both.shape == (2, 4, 3)
    assert [part.offsets for part in both.parts] == [(0, 0, 0), (1, 0, 0), (0, 2, 0), (1, 2, 0)]
    assert {part.sizes for part in both.parts} == {(1, 2, 3)}
    with pytest.raises(
        ValueError,
        match=r"applies Chunk to 4 tensors of the files.* not supported here: load the model with from_pretrained",
    ):
        one_of("a", experts, converter(Chunk(dim=0)))
    with pytest.raises(ValueError, match=r"lack parts of 'a'"):
        one_of("a", [experts[0], experts[1][:1]], converter(MergeModulelist(dim=0), Concatenate(dim=1)))
    with pytest.raises(ValueError, match=r"2 tensors for each part of 'a'"):
        one_of("a", experts, converter(Concatenate(dim=0)))


def test_two_tensors_of_one_name() -> None:
    arrange = arrangement(build("gpt neox"))
    assert arrange is not None
    assert list(arrange({"embed_out.weight": stored("x", 2)})) == ["lm_head.weight"]
    with pytest.raises(ValueError, match=r"would get the name 'lm_head.weight'"):
        arrange({"lm_head.weight": stored("x", 2), "embed_out.weight": stored("y", 2)})
