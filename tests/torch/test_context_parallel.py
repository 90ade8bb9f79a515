"""Attention over a sequence that is cut, where torch offers more than other frameworks: refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hyper_parallel import CommDebugMode, Shard, distribute_tensor
from hyper_parallel.core.rules.sequence_cut import attention_method
from hyper_parallel.experimental import context_parallel
from hyper_parallel.mindspore import scaled_dot_product_attention
from hyper_parallel.platform import PlatformError
from hyper_parallel.testing.spmd import on_mesh


@on_mesh()
def gradients_of_gradients(mesh: Any) -> None:
    """Each way refuses a recorded backward on all ranks, and says how to have one."""
    whole = torch.randn(2, 4, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for method in ("gather", "ring"):
        x = distribute_tensor(whole, mesh, [Shard(2)]).requires_grad_()
        with attention_method(method):
            y = F.scaled_dot_product_attention(x, x, x, is_causal=True).to_local().sum()
        with pytest.raises(ValueError, match=r"no gradients of gradients.*choose the method 'gather'"):
            torch.autograd.grad(y, x, create_graph=True)
    # As the message says: with a mask, gathered.
    x = distribute_tensor(whole, mesh, [Shard(2)]).requires_grad_()
    single = whole.clone().requires_grad_()
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    found = []
    for q in (x, single):
        with attention_method("gather"), sdpa_kernel(SDPBackend.MATH):  # other kernels have no second derivative
            given = distribute_tensor(mask, mesh, src_data_rank=None) if q is x else mask
            y = F.scaled_dot_product_attention(q, q, q, given)
        (first,) = torch.autograd.grad((y * y).sum(), q, create_graph=True)
        (second,) = torch.autograd.grad((first * first).sum(), q)
        found.append(second.full_tensor() if q is x else second)
    torch.testing.assert_close(found[0], found[1])


@on_mesh()
def refused(mesh: Any) -> None:
    """Nothing is sent where plain code asks for something else than a single device computes."""
    trained, x = torch.ones(2, 4, 6, 3, requires_grad=True), torch.ones(2, 4, 6, 3)
    with CommDebugMode() as comm:
        with (
            pytest.raises(ValueError, match="requires gradients, and cannot change its shape: detach it"),
            context_parallel(mesh, buffers=[trained], buffer_seq_dims=[2]),
        ):
            pass
        with (
            context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]),
            pytest.raises(ValueError, match=r"drops weights \(dropout 0.5\)"),
        ):
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    assert comm.get_total_counts() == 0
    assert x.shape == (2, 4, 6, 3)


def test_gradients_of_gradients(pool: Any) -> None:
    pool.run(2, gradients_of_gradients)


def test_refused(pool: Any) -> None:
    pool.run(2, refused)


def test_the_function_of_mindspore() -> None:
    with pytest.raises(PlatformError, match=r"on torch, call torch\.nn\.functional\.scaled"):
        scaled_dot_product_attention(None, None, None)
