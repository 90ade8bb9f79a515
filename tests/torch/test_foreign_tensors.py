"""Tensors of classes and kinds that DTensors are not made of: a clear error on all ranks, before communication."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    NoParallel,
    Replicate,
    Shard,
    distribute_tensor,
    implicit_replication,
    parallelize_module,
)
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device, randn, shard


class Wrapper(torch.Tensor):
    """A tensor subclass that holds another tensor, as quantisation libraries make them."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return "Wrapper()"

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return Wrapper(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        unwrapped = [a.inner if isinstance(a, Wrapper) else a for a in args]
        result = func(*unwrapped, **(kwargs or {}))
        return Wrapper(result) if isinstance(result, torch.Tensor) else result


def of_torch() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

    return torch_distribute_tensor(randn(4, 6), init_device_mesh(device().type, (4,)), [TorchReplicate()])


def on_host(*shape: int) -> torch.Tensor:
    """Random numbers on the host, for kinds of tensors that not every device has."""
    return randn(*shape).cpu()


def quantised() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(on_host(4, 6), 0.1, 0, torch.qint8)


def nested() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([on_host(2, 6), on_host(3, 6)])


KINDS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "torch's DTensor": (of_torch, "torch's own DTensor", "full_tensor()"),
    "wrapper": (lambda: Wrapper(randn(4, 6)), "Wrapper", "plain tensor that it represents"),
    "quantised": (quantised, "quantised", "dequantize()"),
    "sparse": (lambda: on_host(4, 6).to_sparse(), "sparse_coo", "to_dense()"),
    "compressed": (lambda: on_host(4, 6).to_sparse_csr(), "sparse_csr", "to_dense()"),
    "nested": (nested, "nested tensor", "to_padded_tensor"),
}


class Holder(nn.Module):
    """A linear layer with a foreign parameter or buffer next to its own."""

    def __init__(self, value: Any, as_buffer: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        if as_buffer:
            self.register_buffer("extra", value)
        else:
            self.extra = nn.Parameter(value, requires_grad=False)


@on_mesh()
def foreign(mesh: Any, kind: str) -> None:
    make, *words = KINDS[kind]
    value = make()
    d = shard(randn(4, 6), mesh, Shard(0))
    comm = CommDebugMode()

    def refused(call: Callable[[], Any], *more: str) -> None:
        with comm, pytest.raises(TypeError) as caught:
            call()
        missing = [word for word in (*words, *more) if word not in str(caught.value)]
        assert not missing, f"{missing} not in {caught.value}"
        assert comm.get_total_counts() == 0

    refused(lambda: distribute_tensor(value, mesh, [Shard(0)]), "distribute_tensor")
    refused(lambda: distribute_tensor(value, mesh, [Replicate()], src_data_rank=None), "distribute_tensor")
    refused(lambda: DTensor.from_local(value, mesh, [Replicate()]))
    for context in (implicit_replication, CommDebugMode):
        with context():
            refused(lambda: torch.add(d, value), "add")
            refused(lambda: torch.matmul(d.t(), value), "matmul")
            refused(lambda: torch.cdist(d, value), "cdist")
            if kind != "nested":
                replicated = shard(randn(4, 6), mesh, Replicate())
                assert replicated.shape == value.shape
                with implicit_replication():
                    close(torch.add(replicated, randn(4, 6)), 2 * randn(4, 6))  # the plan for such shapes is known
                refused(lambda x=replicated: torch.add(x, value), "add")
    if kind != "torch's DTensor":
        for as_buffer in (True, False):
            model = Holder(value, as_buffer)
            refused(lambda model=model: parallelize_module(model, mesh, NoParallel()), "'extra'", "Holder")
            assert not isinstance(model.linear.weight, DTensor), "nothing was changed"
            parallelize_module(model, mesh, {"linear": ColwiseParallel()})  # not a part of the plan
    else:
        model = nn.Sequential(nn.Linear(6, 4, bias=False))
        model[0].weight = nn.Parameter(value)
        refused(lambda: parallelize_module(model, mesh, {"0": ColwiseParallel()}), "'weight'", "'0'")


@pytest.mark.parametrize("kind", KINDS)
def test_foreign(pool: Any, kind: str) -> None:
    """Distributed, made of, computed with, held by a module."""
    pool.run(4, foreign, kind)
