"""Weights that another library has quantised: refused in plans, and cut by hand as docs/torch_interop.md shows.

Runs with a class of tensors that has the members of torchao's, and with torchao's own where that is installed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    NoParallel,
    Partial,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    fully_shard,
    parallelize_module,
    replicate,
)
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device, randn


class Int8Rows(torch.Tensor):
    """Rows of whole numbers with a scale each. Like torchao's, a wrapper that knows how to be a weight, to be sliced
    and to be detached."""

    numbers: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scales: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scales.dtype, device=numbers.device)

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        self.numbers, self.scales = numbers, scales

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return "Int8Rows()"

    def __tensor_flatten__(self) -> Any:
        return ["numbers", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return Int8Rows(inner["numbers"], inner["scales"])

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int8Rows:
        weight = weight.detach()
        scales = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scales).round().to(torch.int8), scales)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.linear:
            x, weight, bias = args
            y = x @ weight.numbers.t().to(x.dtype) * weight.scales.flatten()
            return y if bias is None else y + bias
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        x, *rest = args
        if func is torch.ops.aten.detach.default:
            return cls(x.numbers, x.scales)
        assert func is torch.ops.aten.slice.Tensor, func
        return cls(func(x.numbers, *rest), func(x.scales, *rest) if rest[0] == 0 else x.scales)


def rows(model: nn.Module) -> None:
    """A stand-in for torchao's `quantize_`."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Int8Rows.of(module.weight), requires_grad=False)


def torchao(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig())


QUANTISE: dict[str, Callable[[nn.Module], None]] = {"stand-in": rows}
if find_spec("torchao") is not None:
    QUANTISE["torchao"] = torchao


class MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)
        for seed, p in enumerate(self.parameters()):
            p.data = randn(*p.shape, seed=seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def cut(linear: nn.Linear, dim: int, mesh: Any) -> None:
    """Cut the layer as docs/torch_interop.md does. Dimension 0: columns, 1: rows."""
    rank, ranks, size = mesh.get_local_rank(), mesh.size(), linear.weight.shape[dim]
    own = slice(size * rank // ranks, size * (rank + 1) // ranks)
    linear.weight = nn.Parameter(linear.weight[own] if dim == 0 else linear.weight[:, own], requires_grad=False)
    if dim == 0:
        linear.bias = nn.Parameter(linear.bias[own].detach())
        linear.register_forward_pre_hook(
            lambda module, args: DTensor.from_local(args[0], mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        )
    elif rank > 0:
        linear.bias = None


@on_mesh()
def cut_by_hand(mesh: Any, kind: str, hidden: int) -> None:
    whole, model = MLP(hidden), MLP(hidden)
    for each in (whole, model):
        QUANTISE[kind](each)
    parallelize_module(
        model, mesh, {"down": PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Replicate())}
    )
    cut(model.up, 0, mesh)
    cut(model.down, 1, mesh)
    x, y = (randn(5, 8, seed=9).requires_grad_() for _ in range(2))
    wanted = whole(x)
    with CommDebugMode() as comm:
        got = model(y)
    assert type(got) is torch.Tensor
    close(got, wanted, "output")
    assert comm.get_total_counts() == 1
    wanted.sin().sum().backward()
    with CommDebugMode() as comm:
        got.sin().sum().backward()
    assert comm.get_total_counts() == 1
    close(y.grad, x.grad, "gradient of the input", 1e-4)
    own = slice(hidden * mesh.get_local_rank() // mesh.size(), hidden * (mesh.get_local_rank() + 1) // mesh.size())
    close(model.up.bias.grad, whole.up.bias.grad[own], "gradient of the bias of columns", 1e-4)
    if mesh.get_local_rank() == 0:
        close(model.down.bias.grad, whole.down.bias.grad, "gradient of the bias of rows", 1e-4)


# Of 3 features one of 4 ranks has none, with which torchao's own kernel cannot compute.
@pytest.mark.parametrize(
    ("kind", "hidden"), [(kind, n) for kind in QUANTISE for n in (16, 13, 3) if (kind, n) != ("torchao", 3)]
)
def test_cut_by_hand(pool: Any, kind: str, hidden: int) -> None:
    """Output and gradients of the quantised model of a single device; one all-reduce forward, one backward."""
    pool.run(4, cut_by_hand, kind, hidden)


@on_mesh()
def refused(mesh: Any, kind: str) -> None:
    plans: dict[str, Callable[[nn.Module], Any]] = {
        "styles": lambda m: parallelize_module(m, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}),
        "replicated": lambda m: parallelize_module(m, mesh, NoParallel()),
        "fully_shard": lambda m: fully_shard(m, mesh=mesh),
        "replicate": lambda m: replicate(m, device_mesh=mesh),
    }
    x = randn(5, 8, seed=9).to(device())
    for name, plan in plans.items():
        model = MLP(16)
        QUANTISE[kind](model)
        before = dict(model.named_parameters())
        with (
            CommDebugMode() as comm,
            pytest.raises(
                TypeError, match=r"Int8\w+, a tensor subclass with its own operations.*dequantize\(\)"
            ) as caught,
        ):
            plan(model)
        assert "'up'" in str(caught.value) or "'up.weight'" in str(caught.value), caught.value
        assert comm.get_total_counts() == 0, name
        assert all(p is before[n] for n, p in model.named_parameters()), "nothing was changed"

        model = MLP(16)
        plan(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            QUANTISE[kind](model)
        with (
            CommDebugMode() as comm,
            pytest.raises(ValueError, match=r"Int8\w+, a tensor subclass.*shard them by hand") as caught,
        ):
            model(x)
        assert "weight'" in str(caught.value)
        assert comm.get_total_counts() == 0, name


@pytest.mark.parametrize("kind", QUANTISE)
def test_refused(pool: Any, kind: str) -> None:
    """Quantised before the plan: by the plan. After it: by the first forward. On all ranks, before communication."""
    pool.run(4, refused, kind)
