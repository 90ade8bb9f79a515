"""Communication of attention over a cut sequence: next to hand-written code, and behind computation."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh as init_mesh_of_torch
from torch.distributed.tensor import DTensor as DTensorOfTorch
from torch.distributed.tensor import Shard as ShardOfTorch
from torch.distributed.tensor.experimental import context_parallel as context_parallel_of_torch
from torch.distributed.tensor.experimental._attention import set_rotate_method

from benchmarks.torch_groups import fake_group
from benchmarks.torch_sequences import Attention, Block, Heads, hand_written_ring, hand_written_ulysses
from benchmarks.torch_traffic import count_collectives
from hyper_parallel import ContextParallel, init_device_mesh, parallelize_module, shard_sequence
from hyper_parallel.testing import spmd
from tests.torch.support import device

pytestmark = pytest.mark.skipif(device().type != "cpu", reason="the hand-written code calls the CPU's kernel")

HEADS, LENGTH = Heads(8, 4, 4), 32
BY_HAND: dict[str, Attention] = {"ring": hand_written_ring, "exchange": hand_written_ulysses}


def values_and_bytes(block: Any, x: torch.Tensor) -> tuple[list[torch.Tensor], list[int]]:
    """Output and gradients of a block, and the bytes that it sends in forward and in backward."""
    x = x.clone().requires_grad_()
    with count_collectives() as forward:
        y = block(x)
    with count_collectives() as backward:
        y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in block.parameters())], [
        sum(traffic.sizes.values()) for traffic in (forward, backward)
    ]


@spmd.on_mesh(4)
def beside(mesh: Any) -> None:
    mesh._has_uneven_shards = False  # whatever tests before have handed out on it
    torch.manual_seed(0)
    whole = torch.randn(2, LENGTH, HEADS.queries * HEADS.features)
    model = Block(HEADS)
    for method, attention in BY_HAND.items():
        balance = method == "ring"
        x = shard_sequence({"x": whole}, mesh, balance=balance)["x"]
        by_hand, block = copy.deepcopy(model), copy.deepcopy(model)
        by_hand.attention = attention
        parallelize_module(block, mesh, ContextParallel(method=method, balance=balance))
        block(x)  # ranks compare the first call
        wanted, sent_by_hand = values_and_bytes(by_hand, x)
        found, sent = values_and_bytes(block, x)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert sent == sent_by_hand, (method, sent, sent_by_hand)
        pieces = 2 * x.shape[0] * HEADS.keys * HEADS.features * x.shape[1] * x.itemsize
        if method == "ring":
            assert sent == [3 * pieces, 6 * pieces]
        else:  # queries, keys, values and output of this rank, once each
            assert sent == [pieces + 2 * x.nbytes] * 2


def test_bytes_are_those_of_hand_written_code(pool: Any) -> None:
    pool.run(4, beside)


class _Late:
    """A transfer of which nothing arrives before it is waited for."""

    def __init__(self, work: Any, out: torch.Tensor, arrived: torch.Tensor, events: list[str], name: str) -> None:
        self._work, self._out, self._arrived, self._events, self._name = work, out, arrived, events, name
        out.fill_(torch.nan)

    def wait(self) -> None:
        self._events.append(f"wait {self._name}")
        self._work.wait()
        self._out.copy_(self._arrived)


@spmd.on_mesh(4)
def behind(mesh: Any) -> None:
    """Each transfer of a ring has computation between its start and its end, but for the first one of backward."""
    platform: Any = type(mesh.platform)
    start, events, model = platform.start_collective, [], Block(HEADS)
    x = torch.randn(1, LENGTH // 4, HEADS.queries * HEADS.features, requires_grad=True)
    parallelize_module(model, mesh, ContextParallel(method="ring"))
    model(x)

    def late(self: Any, collective: str, out: torch.Tensor, local: torch.Tensor, *more: Any) -> Any:
        name = str(sum(event.startswith("start") for event in events))
        events.append(f"start {name}")
        arrived = torch.empty_like(out)
        return _Late(start(self, collective, arrived, local, *more), out, arrived, events, name)

    def computes(name: str) -> Any:
        verb = getattr(platform, name)

        def run(*args: Any) -> Any:
            events.append("compute")
            return verb(*args)

        return patch.object(platform, name, run)

    with patch.object(platform, "start_collective", late), computes("attention_part"):
        y = model(x)
        of_forward, events[:] = [*events], []
        with computes("attention_part_gradients"):
            y.square().sum().backward()
    assert not x.grad.isnan().any()
    dist.barrier()
    for found, transfers, exposed in ((of_forward, 3, []), (events, 6, ["0"])):
        names = [str(i) for i in range(transfers)]
        assert sum(event.startswith("start") for event in found) == transfers, found
        between = {n: found[found.index(f"start {n}") : found.index(f"wait {n}")] for n in names}
        assert [n for n in names if "compute" not in between[n]] == exposed, found


def test_transfers_of_a_ring_lie_behind_computation(pool: Any) -> None:
    pool.run(4, behind)


def forward_of_torch(way: str, mesh: Any) -> Any:
    """Collectives of a forward under torch's context_parallel, on fake CUDA tensors.

    `F.scaled_dot_product_attention` finds no kernel for these, and the engine of backward wants a device.
    """
    set_rotate_method(way)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        buffer = torch.zeros(1, 64, device="cuda")
        parts = [torch.zeros(1, 8, 16, 16, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        with context_parallel_of_torch(mesh, buffers=[buffer], buffer_seq_dims=[1]), count_collectives() as seen:
            placed = (DTensorOfTorch.from_local(x, mesh, [ShardOfTorch(2)]) for x in parts)
            torch.ops.aten._scaled_dot_product_flash_attention(*placed, 0.0, True)
    return dict(seen.counts), dict(seen.sizes)


class Alone(nn.Module):
    """Causal attention."""

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.nightly
@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch's context_parallel has no rule for CPUs")
def test_as_many_bytes_as_context_parallel_of_torch() -> None:
    with fake_group(4):
        mesh, of_torch = init_device_mesh("cpu", (4,)), init_mesh_of_torch("cuda", (4,))
        parts = [torch.zeros(1, 8, 16, 16, dtype=torch.bfloat16) for _ in range(3)]
        for way, method in (("alltoall", "ring"), ("allgather", "gather")):
            module = parallelize_module(Alone(), mesh, ContextParallel(method=method))
            with torch.no_grad():
                module(*parts)  # compares the ranks
                with count_collectives() as seen:
                    module(*parts)
            assert (dict(seen.counts), dict(seen.sizes)) == forward_of_torch(way, of_torch)
