"""Attention over a sequence that is cut, with torch features that other frameworks lack."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from hyper_parallel import (
    ContextParallel,
    DTensor,
    fully_shard,
    get_platform,
    parallelize_module,
    replicate,
    shard_sequence,
)
from hyper_parallel.core.dtensor import plain_attention
from hyper_parallel.core.plain_code.first_call import without_first_calls
from hyper_parallel.experimental import context_parallel, context_parallel_unshard
from hyper_parallel.mindspore import scaled_dot_product_attention
from hyper_parallel.platform import PlatformError
from hyper_parallel.platform.contract.attention import AttentionRole
from hyper_parallel.platform.torch import attention
from hyper_parallel.testing import spmd
from tests.torch.support import device


@spmd.on_mesh()
def refused(mesh: Any) -> None:
    part = torch.ones(2, 4, 3, 2, device=device())
    with context_parallel(mesh, length=6), pytest.raises(ValueError, match="has dropout"):
        F.scaled_dot_product_attention(part, part, part, dropout_p=0.5)
    leaf = torch.ones(6, device=device(), requires_grad=True)
    with (
        pytest.raises(ValueError, match="a buffer requires gradients"),
        context_parallel(mesh, buffers=[leaf], buffer_seq_dims=[0]),
    ):
        pass
    with pytest.raises(PlatformError, match=r"call torch\.nn\.functional\.scaled_dot_product_attention"):
        scaled_dot_product_attention(part, part, part)


@spmd.on_mesh()
def mixing(mesh: Any) -> None:
    """Functions that are no attention: refused along a dimension of positions, and let through along others."""
    part = torch.ones(2, 4, 3, 6, device=device())
    rows = part[0]
    several = nn.MultiheadAttention(6, 2, batch_first=True, device=device())
    refusals: dict[str, Callable[[], Any]] = {
        "conv1d": lambda: F.conv1d(part[0].transpose(1, 2), torch.ones(2, 6, 2, device=device())),
        "lstm": lambda: nn.LSTM(6, 2, batch_first=True, device=device())(rows),
        "cumsum": lambda: torch.cumsum(input=rows, dim=1),
        "mean": lambda: rows.mean((0, 1)),
        "flip": lambda: rows.flip(1),
        "roll over": lambda: rows.roll(1),
        "roll": lambda: torch.roll(rows, 1, dims=1),
        "softmax": lambda: (part @ part.transpose(-1, -2)).softmax(-1),
        "avg_pool1d": lambda: F.avg_pool1d(rows.transpose(1, 2), 2),
        "batch_norm": lambda: nn.BatchNorm1d(6, device=device())(rows.transpose(1, 2)),
        "group_norm": lambda: F.group_norm(rows.transpose(1, 2), 2),
        "flex_attention": lambda: flex_attention(part, part, part),
        "need_weights": lambda: several(rows, rows, rows),
    }
    with context_parallel(mesh, length=6):
        for name, call in refusals.items():
            words = f"{name.split()[0]} mixes positions.* this rank's shard of the sequence"
            with pytest.raises(ValueError, match=words):
                call()
        F.conv1d(rows.transpose(1, 2), torch.ones(2, 6, 1, device=device()))
        nn.BatchNorm1d(6, device=device()).eval()(rows.transpose(1, 2))
        torch.cumsum(rows, 2), rows.mean(), rows.mean(-1), rows.flip((0, 2)), torch.flip(rows, dims=(0,))
        rows.softmax(1), DTensor.from_local(rows, mesh).cumsum(1)


def test_functions_that_mix_positions(pool: Any) -> None:
    pool.run(2, mixing)


@spmd.on_mesh()
def many_heads(mesh: Any) -> None:
    """`nn.MultiheadAttention`, whose function calls that of attention."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(6, 2, batch_first=True).to(device())
    for length in (6, 7):
        x = torch.randn(2, length, 6).to(device())
        wanted = module(x, x, x, need_weights=False)[0]
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            y = module(x, x, x, need_weights=False)[0]
        (found,) = context_parallel_unshard(mesh, [y], [1])
        torch.testing.assert_close(found, wanted)


class Attention(nn.Module):
    """Attention of a tensor to itself."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal, self.scale = causal, 0.5

    def forward(self, x: Any) -> Any:
        return F.scaled_dot_product_attention(x, x, x, is_causal=self.causal, scale=self.scale)


@spmd.on_mesh()
def calls_like_earlier_ones(mesh: Any) -> None:
    """The second call of a module takes the way of the first, without DTensors, unless anything is another."""
    mesh._has_uneven_shards = False  # tests before this one may have had such shards on these ranks
    torch.manual_seed(0)
    whole = torch.randn(1, 2, 8, 4, dtype=torch.float64, device=device())
    for method, causal in (("ring", True), ("exchange", True), ("gather", True), ("gather", False)):
        with without_first_calls():  # a call that is followed is not one for others to repeat
            module = parallelize_module(Attention(causal), mesh, ContextParallel(method=method))
        for scale, again in ((0.5, 0), (0.5, 1), (2.0, 0), (2.0, 1), (0.5, 1)):
            module.scale = scale
            wanted = whole.clone().requires_grad_()
            y = F.scaled_dot_product_attention(wanted, wanted, wanted, is_causal=causal, scale=scale)
            y.square().sum().backward()
            own = shard_sequence({"x": whole}, mesh, seq_dims={"x": 2}, labels=None, positions=None)[
                "x"
            ].requires_grad_()
            with patch.object(plain_attention, "run_again", wraps=plain_attention.run_again) as taken:
                part = module(own)
            assert taken.call_count == (again if causal else 0), (method, scale)
            part.square().sum().backward()
            found = context_parallel_unshard(mesh, [part.detach(), own.grad], [2, 2])
            for got, one in zip(found, (y, wanted.grad), strict=True):
                torch.testing.assert_close(got, one.detach(), rtol=1e-12, atol=1e-12)
        with torch.autocast(device().type, torch.bfloat16), torch.no_grad():
            kinds = [module(own.float()).dtype for _ in range(3)] + [
                F.scaled_dot_product_attention(*[own.float()] * 3).dtype
            ]
            assert len(set(kinds)) == 1, (method, causal, kinds)


def test_calls_like_earlier_ones(pool: Any) -> None:
    pool.run(2, calls_like_earlier_ones)


@spmd.on_mesh()
def other_features(mesh: Any) -> None:
    """Values with other features than keys, which torch's kernel does not take."""
    torch.manual_seed(0)
    for method in ("gather", "ring"):
        whole = [torch.randn(2, heads, 7, n).to(device()).requires_grad_() for heads, n in ((4, 6), (2, 6), (2, 4))]
        wanted = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
        wanted.square().sum().backward()
        batch = shard_sequence({n: x.detach() for n, x in zip("qkv", whole, strict=True)}, mesh, seq_dims=SEQUENCES)
        own = [batch[n].requires_grad_() for n in "qkv"]
        with context_parallel(mesh, length=7, method=method):
            y = F.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True)
            y.square().sum().backward()
        found = context_parallel_unshard(mesh, [y, *(x.grad for x in own)], [2] * 4)
        for x, of_one in zip(found, (wanted, *(x.grad for x in whole)), strict=True):
            torch.testing.assert_close(x, of_one, rtol=1e-4, atol=1e-5)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.second, self.first(x), use_reentrant=True)


@spmd.on_mesh()
def reentrant(mesh: Any) -> None:
    """Backward of reentrant checkpointing inside of the context, under data parallelism, which is told of it."""
    torch.manual_seed(0)
    x = torch.randn(1, 6, 4).to(device())
    for parallel in (fully_shard, replicate):
        model = Checkpointed().to(device())
        single = copy.deepcopy(model)
        fully_shard(model, mesh=mesh) if parallel is fully_shard else replicate(model, mesh)
        single(x).square().sum().backward()
        with context_parallel(mesh, length=6):
            model(x).square().sum().backward()
        for p, of_one in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), of_one.grad)


def test_reentrant_checkpointing_under_data_parallelism(pool: Any) -> None:
    pool.run(2, reentrant)


SEQUENCES = {"q": 2, "k": 2, "v": 2}


def test_values_with_other_features(pool: Any) -> None:
    pool.run(2, other_features)


def test_attention_of_many_heads(pool: Any) -> None:
    pool.run(2, many_heads)


def test_wrong_use_of_torch(pool: Any) -> None:
    pool.run(2, refused)


class _StandIn:
    """The kernels for GPUs, their arguments by the names of torch's schema, computed by those for CPUs."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _named(self, name: str, args: tuple, kwargs: dict) -> dict[str, Any]:
        self.calls.append(name)
        names = [argument.name for argument in getattr(torch.ops.aten, name).default._schema.arguments]
        return dict(zip(names, args, strict=False)) | kwargs

    def _scaled_dot_product_flash_attention(self, *args: Any, **kwargs: Any) -> Any:
        given = self._named("_scaled_dot_product_flash_attention", args, kwargs)
        q, k, v = (given[name] for name in ("query", "key", "value"))
        assert given["dropout_p"] == 0
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, given["is_causal"], scale=given["scale"]
        )
        return *found, None, None, q.shape[2], k.shape[2], None, None, None

    def _scaled_dot_product_flash_attention_backward(self, *args: Any, **kwargs: Any) -> Any:
        given = self._named("_scaled_dot_product_flash_attention_backward", args, kwargs)
        tensors = [given[name] for name in ("grad_out", "query", "key", "value", "out", "logsumexp")]
        assert given["dropout_p"] == 0 and given["cum_seq_q"] is given["cum_seq_k"] is None
        assert (given["max_q"], given["max_k"]) == (tensors[1].shape[2], tensors[2].shape[2])
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, 0.0, given["is_causal"], scale=given["scale"]
        )


@pytest.mark.skipif(device().type != "cpu", reason="the stand-ins are the CPU's kernels")
def test_kernels_for_gpus() -> None:
    """Called with the right arguments, as far as a stand-in tells; and the same as plain operations."""
    platform, kernels = get_platform(), _StandIn()
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(2, heads, 6, 8) for heads in (4, 2, 2, 4))
    for causal in (True, False):
        wanted = AttentionRole.attention_part(platform, q, k, v, causal, 0.3)
        of_inputs = AttentionRole.attention_part_gradients(platform, g, q, k, v, *wanted, causal, 0.3)
        with (
            patch.object(attention, "_ATEN", kernels),
            patch.object(attention, "_on_cpu", lambda *_: False),
            patch.object(attention, "_on_gpu", lambda *_: True),
        ):
            found = platform.attention_part(q, k, v, causal, 0.3)
            gradients = platform.attention_part_gradients(g, q, k, v, *wanted, causal, 0.3)
        for x, y in zip((*found, *gradients), (*wanted, *of_inputs), strict=True):
            torch.testing.assert_close(x, y)
    assert len(kernels.calls) == 4
