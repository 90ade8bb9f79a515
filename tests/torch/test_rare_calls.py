"""Rare spellings of operations on real shards: values and gradients are those of torch on the whole tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import DTensor, Replicate, Shard
from hyper_parallel.core.operations.binding import bind_of
from hyper_parallel.platform.torch.op_table import OP_TABLE
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device, randn, shard

#: name -> call. ``x`` is (5, 6), ``y`` (5, 6) positive, ``v`` (6,), ``s`` has no dimensions, ``z`` is (2, 6, 3), ``i``
#: (5, 6) integers from 0 to 3, ``m`` (5, 6) booleans; ``n`` is never distributed, the number 2 without dimensions.
CALLS: dict[str, Callable[..., Any]] = {
    # shapes
    "flatten without dimensions": lambda s: s.flatten(),
    "transpose without dimensions": lambda s: s.transpose(0, -1) * 2,
    "squeeze of several": lambda z: z.unsqueeze(0).unsqueeze(-1).squeeze(0, -1) * 2,
    "squeeze of no dimension": lambda z: z.unsqueeze(0).squeeze(()),
    "t of a vector": lambda v: v.t() * 2,
    "unflatten with -1": lambda x: x.unflatten(1, (-1, 3)),
    "repeat_interleave of the flat tensor": lambda x: x.repeat_interleave(2),
    "repeat_interleave with a tensor": lambda x, i: x.repeat_interleave(i[0], dim=1),
    "narrow from a tensor": lambda x, n: x.narrow(0, n, 2),
    "outer": lambda x, v: torch.outer(x[:, 0], vec2=v),
    "outer as a method": lambda x, v: v.outer(x[:, 1]),
    "reversed": lambda x: reversed(x),
    "reversed without dimensions": lambda s: reversed(s * 2),
    # indices
    "where with one argument": lambda m: torch.where(m)[1],
    "select with a tensor": lambda x, n: torch.select(x, 1, n),
    "one_hot of as many classes as there are": lambda i: F.one_hot(i),
    "one_hot by keyword": lambda i: F.one_hot(input=i, num_classes=7),
    # reductions
    "median of all": lambda x: x.median(),
    "std with a positional unbiased": lambda x: x.std(1, False),
    "var of all, biased": lambda x: torch.var(x, False),
    # Torch itself fails at logsumexp of no dimensions, which for other reductions are all.
    "logsumexp of all": lambda x: x.logsumexp(() if isinstance(x, DTensor) else (0, 1)),
    "logsumexp of integers": lambda i: i.logsumexp(0),
    "logsumexp of booleans": lambda m: m.logsumexp(1),
    "argmax of all, keepdim": lambda x: x.argmax(keepdim=True),
    "nuclear norm": lambda x: torch.norm(x, p="nuc"),
    "norm of complex numbers with a dtype": lambda x, y: torch.linalg.vector_norm(
        torch.complex(x, y), 3, dim=0, dtype=torch.complex128
    ),
    "norm without p": lambda x: torch.norm(x, p=None, dim=1),
    # conversions
    "a plain tensor to the dtype of a distributed one": lambda n, x: n.to(x.double()),
    "to the same dtype, as a copy": lambda x: x.to(torch.float32, copy=True) * 2,
    # products
    "einsum with subscripts": lambda x, v: torch.einsum(x, [0, 1], v, [1], [0]),
    "einsum with a list": lambda x, y: torch.einsum("ab,cb->ac", [x, y]),
    "matmul from the right": lambda x, v: x.__rmatmul__(v[:5]),
    # losses
    "a loss with the deprecated keyword": lambda x, y: F.mse_loss(x, y, size_average=False),
    "binary_cross_entropy with a weight": lambda x, m, v: F.binary_cross_entropy(
        x.sigmoid(), m.float(), weight=v.detach().abs()
    ),
    "kl_div by batch": lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
    "softmax of a dimension that torch chooses": lambda x: F.softmax(x) * x,
    "logaddexp by keyword": lambda x, y: torch.logaddexp(x, other=y),
    "dropout that drops nothing": lambda x: torch.dropout(x, p=0.0, train=True),
}
#: Calls that write into their first operand.
WRITES: dict[str, Callable[..., Any]] = {
    "copy of one row into all": lambda x, v: x.copy_(v),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "transpose_": lambda z: z.transpose_(1, 2),
    "real = value": lambda x, v: setattr(x, "real", v.expand(5, 6)) or x,
    "squeeze_ of nothing": lambda x: x.squeeze_(),
    "squeeze_": lambda z: z.unsqueeze_(-1).unsqueeze_(0).squeeze_(),
    "squeeze_ of one dimension": lambda z: z.unsqueeze_(-1).unsqueeze_(0).squeeze_(dim=-1).squeeze_((1, 2)),
    "squeeze_ of several": lambda z: z.unsqueeze_(-1).unsqueeze_(0).squeeze_(0, 1, -1),
    "squeeze_ of no dimension": lambda z: z.unsqueeze_(0).squeeze_(()),
    "squeeze_ without dimensions": lambda s: s.squeeze_(),
}


def operands() -> dict[str, torch.Tensor]:
    integers = torch.arange(30).reshape(5, 6) % 4
    return {
        "x": randn(5, 6),
        "y": randn(5, 6, seed=1).abs() + 0.1,
        "v": randn(6, seed=2),
        "s": randn(1, seed=3)[0],
        "z": randn(2, 6, 3, seed=4),
        "i": integers.to(device()),
        "m": (integers > 1).to(device()),
        "n": torch.tensor(2, device=device()),
    }


def placements_of(name: str, x: torch.Tensor) -> list[Any]:
    return [Replicate()] if not x.dim() else [Replicate(), *(Shard(dim) for dim in range(x.dim()))]


def value_and_gradients(call: Callable[..., Any], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    leaves = {name: x.requires_grad_() for name, x in given.items() if x.is_floating_point()}
    value = call(**given)
    if value.requires_grad:
        weights = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype, device=device()).reshape(
            tuple(value.shape)
        )
        if isinstance(value, DTensor):
            weights = shard(weights, value.device_mesh, Replicate())
        (value * weights).sum().backward()
    return value, {name: x.grad for name, x in leaves.items()}


def compared(mesh: Any, name: str, call: Callable[..., Any], names: tuple[str, ...]) -> None:
    """Value and gradients of a call, with each placement of its first operand, are those of one device."""
    wanted, gradients = value_and_gradients(call, {k: x for k, x in operands().items() if k in names})
    for placement in placements_of(names[0], operands()[names[0]]):
        given = {
            k: x if k == "n" else shard(x, mesh, placement if k == names[0] else Replicate())
            for k, x in operands().items()
            if k in names
        }
        what = f"{name}, {names[0]} placed {placement}"
        value, got = value_and_gradients(call, given)
        assert value.dtype is wanted.dtype and tuple(value.shape) == tuple(wanted.shape), what
        close(value, wanted, what)
        assert [k for k, g in got.items() if g is None] == [k for k, g in gradients.items() if g is None], what
        for k, gradient in gradients.items():
            if gradient is not None:
                close(got[k], gradient, f"{what}: gradient by {k}", tolerance=1e-4)


@on_mesh()
def calls(mesh: Any) -> None:
    warnings.simplefilter("ignore")
    for name, call in CALLS.items():
        compared(mesh, name, call, call.__code__.co_varnames[: call.__code__.co_argcount])


@on_mesh()
def writes(mesh: Any) -> None:
    for name, call in WRITES.items():
        names = call.__code__.co_varnames[: call.__code__.co_argcount]
        whole = {k: x for k, x in operands().items() if k in names}
        call(**whole)
        for placement in placements_of(names[0], operands()[names[0]]):
            given = {
                k: shard(x, mesh, placement if k == names[0] else Replicate())
                for k, x in operands().items()
                if k in names
            }
            target = given[names[0]]
            assert call(**given) is target
            assert tuple(target.shape) == tuple(whole[names[0]].shape)
            close(target, whole[names[0]], f"{name}, placed {placement}")


@on_mesh()
def squeezing_what_is_sharded(mesh: Any) -> None:
    """Rows of a shard, of which there may be one, are not those of the whole tensor."""
    x = shard(randn(mesh.size() + 1, 3), mesh, Shard(0))
    assert x.squeeze_() is x and x.placements == (Shard(0),)
    close(x, randn(mesh.size() + 1, 3))
    x = shard(randn(1, 3), mesh, Shard(0))
    with pytest.raises(ValueError, match=r"squeeze_ cannot remove a sharded dimension.* use x = x.squeeze"):
        x.squeeze_(0)
    close(x, randn(1, 3), "after the error")
    close(x.squeeze(0), randn(1, 3)[0])
    with pytest.raises(IndexError, match=r"squeeze_\(2,\) is out of range for a tensor of 2 dimension"):
        x.squeeze_(2)


def errors(x: Any) -> list[tuple[type[Exception], str, Callable[[], Any]]]:
    """(kind, message, call) for ``x`` of shape (5, 6)."""
    i, w = x.argmax(1), x[:, :4]
    return [
        (ValueError, "'middle' is not a valid value for reduction", lambda: F.mse_loss(x, x, reduction="middle")),
        (ValueError, "plain tensor", lambda: x.copy_(randn(6))),
        (TypeError, "cannot be viewed as another dtype", lambda: x.view(torch.int32)),
        (TypeError, "max_norm", lambda: F.embedding(i, w, max_norm=1.0)),
        (TypeError, r"scale_grad_by_freq=True\) is not supported", lambda: F.embedding(i, w, scale_grad_by_freq=True)),
        (TypeError, r"sparse=True\) is not supported", lambda: torch.embedding(w, i, sparse=True)),
        (TypeError, "use reduction=", lambda: F.cross_entropy(x, i, size_average=False)),
        (TypeError, "use reduction=", lambda: F.nll_loss(x, i, reduce=False)),
        (TypeError, r"to_sparse_csr is not supported for DTensors.*full_tensor\(\)", lambda: x.to_sparse_csr()),
        (TypeError, r"dropout\(inplace=True\) is not supported", lambda: F.dropout(x, inplace=True)),
        (TypeError, "cannot be changed", lambda: delattr(x, "_backward_hooks")),
    ]


#: Calls that torch refuses: in its words, whether the tensor is distributed or not.
REFUSED: dict[str, Callable[[Any], Any]] = {
    "flatten backwards": lambda x: x.flatten(1, 0),
    "unflatten into nothing": lambda x: x.unflatten(1, (0, -1)),
    "unflatten of a name": lambda x: x.unflatten("a", (2, 3)),
    "transpose of names": lambda x: x.transpose("a", "b"),
    "mT of a vector": lambda x: x[0].mT,
    "pad with one number": lambda x: F.pad(x, (1,)),
    "pad of too many dimensions": lambda x: F.pad(x, (1,) * 6),
    "view without a shape": lambda x: x.view(),
    "dropout of more than all": lambda x: F.dropout(x, 1.5),
    "addmm of a vector": lambda x: torch.addmm(x, x[0], x),
    "sort with too many arguments": lambda x: x.sort(0, False, True, 1),
    "gather without an index": lambda x: x.gather(0),
    "sort along a boolean": lambda x: torch.sort(x, True, dim=0),
}


@on_mesh()
def refusals(mesh: Any) -> None:
    for placement in (Replicate(), Shard(0), Shard(1)):
        x = shard(randn(5, 6), mesh, placement)
        for kind, message, call in errors(x):
            with pytest.raises(kind, match=message):
                call()
        for name, call_of in REFUSED.items():
            outcomes = []
            for operand in (randn(5, 6), x):
                try:
                    outcomes.append(call_of(operand))
                except (TypeError, RuntimeError, ValueError, IndexError) as error:
                    outcomes.append(type(error))
            assert isinstance(outcomes[0], type), f"torch takes {name}"
            assert isinstance(outcomes[1], type), f"{name} gives {outcomes[1]}, torch refuses it"
        close(x, randn(5, 6), "after the errors")


@on_ranks(1, 3)
@pytest.mark.parametrize(
    "job",
    [calls, writes, squeezing_what_is_sharded, refusals],
    ids=lambda job: job.__name__,
)
def test_rare_calls(pool: Any, job: Any, world_size: int) -> None:
    pool.run(world_size, job)


def test_spellings_and_values_of_arguments() -> None:
    """Torch's names of arguments, and the values that they become. tests/unit/test_signatures.py has the rest."""
    bind = bind_of(OP_TABLE[torch.sum])
    for args, kwargs in (((1, 2), {}), ((), {"self": 1, "axis": [2]}), ((), {"x": 1, "axes": (2,), "keepdims": 0})):
        assert bind(None, args, kwargs)[1][:2] == ((2,), False)
    like = torch.zeros(2, 3)
    for name in ("view_as", "reshape_as", "expand_as"):
        function = getattr(torch.Tensor, name)
        assert bind_of(OP_TABLE[function])(function, (like,), {"other": like}) == ((like,), ((2, 3),))
    with pytest.raises(TypeError, match="viewed as another dtype"):
        bind_of(OP_TABLE[torch.Tensor.view])(None, (1, torch.int32), {})
