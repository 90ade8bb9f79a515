"""Files of transformers into parallelised models on meta, and back into `from_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel import DTensor, fully_shard
from hyper_parallel.integrations.huggingface import load_pretrained, parallelize_model, save_pretrained
from hyper_parallel.testing.spmd import device_mesh
from tests.torch.huggingface_models import batch, build
from tests.torch.support import close, device

CASES = ["llama", "llama, odd sizes", "gpt2", "qwen3"]


def write(case: str, directory: str, dtype: torch.dtype) -> None:
    build(case).to(dtype).save_pretrained(directory, max_shard_size="20KB")


def round_trip(shape: tuple[int, ...], case: str, directory: str, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    mesh = device_mesh(*shape, names=("tp",) if len(shape) == 1 else ("dp", "tp"))
    if mesh is None:
        return
    single = build(case).to(dtype)
    with torch.device("meta"):
        model = type(single)(single.config).to(dtype)
    assert all(p.is_meta for p in model.parameters())
    model = parallelize_model(model, mesh if mesh.ndim == 1 else mesh["tp"])
    if mesh.ndim == 2:
        fully_shard(model, mesh=mesh["dp"])
    load_pretrained(model, directory, mesh=mesh)
    wanted = single.state_dict()
    for name, p in model.state_dict().items():
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        assert whole.dtype is dtype and torch.equal(whole, wanted[name]), name
    for (name, x), (_, y) in zip(model.named_buffers(), single.named_buffers(), strict=True):
        assert not x.is_meta and torch.equal(x, y), name
    inputs = batch(single.config.vocab_size)
    # Rows of the batch are alike on all ranks, so that losses are, too.
    result, expected = model(**inputs, use_cache=False), single(**inputs)
    tolerance = 1e-4 if dtype is torch.float32 else 0.05
    close(result.loss.float(), expected.loss.float(), "loss", tolerance)
    result.loss.backward()
    out = f"{directory}/again"
    save_pretrained(model, out, max_shard_size="30KB", mesh=mesh)
    again = AutoModelForCausalLM.from_pretrained(out).to(device())
    assert type(again) is type(single) and (Path(out) / "generation_config.json").exists()
    for name, x in again.state_dict().items():
        assert x.dtype is dtype and torch.equal(x, wanted[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("number", range(len(CASES)), ids=CASES)
def test_round_trip(pool: Any, tmp_path: Path, number: int, dtype: torch.dtype) -> None:
    shape = [(2,), (4,), (2, 2)][(number + (dtype is torch.bfloat16)) % 3]
    pool.run(1, write, CASES[number], str(tmp_path), dtype)
    pool.run(4, round_trip, shape, CASES[number], str(tmp_path), dtype)
