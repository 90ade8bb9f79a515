"""Calls that the rows of the op table leave to torch, which gets whole tensors: its values, and its own errors.

A handler or a row that cannot tell the meaning of such a call raises `UnboundCallError`, which no user sees.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import DTensor, Replicate, Shard
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device, randn, shard


def beside(x: Any, *given: torch.Tensor) -> list[Any]:
    """Distributed as ``x`` is, or not."""
    return [shard(y, x.device_mesh, Replicate()) if isinstance(x, DTensor) else y for y in given]


def attention(x: Any, **changed: Any) -> Any:
    whole = beside(x, randn(24, 8, seed=3), randn(8, 8, seed=4))
    names, more = [*changed], beside(x, *(y for y in changed.values() if isinstance(y, torch.Tensor)))
    if more:
        changed = dict(zip(names, more, strict=True))
    given = {
        "query": x, "key": x, "value": x, "embed_dim_to_check": 8, "num_heads": 2, "in_proj_weight": whole[0],
        "in_proj_bias": None, "bias_k": None, "bias_v": None, "add_zero_attn": False, "dropout_p": 0.0,
        "out_proj_weight": whole[1], "out_proj_bias": None, "need_weights": False,
    }  # fmt: skip
    return F.multi_head_attention_forward(**{**given, **changed})[0]


def recurrent(x: Any) -> Any:
    torch.manual_seed(5)
    weights = beside(x, *(w.detach() for w in nn.RNN(8, 4).to(device()).parameters()))
    (states,) = beside(x, torch.zeros(1, x.shape[1], 4, device=device()))
    more = {"has_biases": True, "num_layers": 1, "dropout": 0.0, "train": False, "bidirectional": False}
    return torch.rnn_tanh(input=x, hx=states, params=weights, batch_first=False, **more)[0]


#: name -> call. ``x`` is (4, 4), ``v`` (4,), ``s`` (3, 2, 8), ``i`` (4, 4) integers from 0 to 3, ``n`` a plain 1.
CALLS: dict[str, Callable[..., Any]] = {
    "attention with keys of its own": lambda s: attention(s, static_k=randn(4, 3, 4), static_v=randn(4, 3, 4)),
    "attention that is causal, without the mask": lambda s: attention(s, is_causal=True),
    "attention of another width": lambda s: attention(s, embed_dim_to_check=6),
    "attention whose mask holds integers": lambda s: attention(
        s, attn_mask=torch.ones(3, 3, dtype=torch.int64, device=device())
    ),
    "a recurrent layer by keywords": lambda s: recurrent(s),
    "inner of two dtypes": lambda x: torch.inner(x, x.double()),
    "inner of different sizes": lambda x: torch.inner(x, x[:, :3]),
    "tensordot with a tensor of dimensions": lambda x: torch.tensordot(
        x, x, dims=beside(x, torch.tensor([[0], [1]], device=device()))[0]
    ),
    "vecdot of two dtypes": lambda x: torch.linalg.vecdot(x, x.double()),
    "trapezoid of nothing": lambda x: torch.trapezoid(x[:, :1], dim=1),
    "cumulative_trapezoid of one point": lambda x: torch.cumulative_trapezoid(x[:, :1], dim=1),
    "histc of integers without bins": lambda i: torch.histc(i, bins=0),
    "histc up to infinity": lambda v: torch.histc(v / 0),
    "equal of two dtypes": lambda x: torch.equal(x, x.double()),
    "cosine loss of different dimensions": lambda x, v: F.cosine_embedding_loss(x, v, v),
    "triplet loss of different dimensions": lambda x, v: F.triplet_margin_loss(x, x, v),
    "bucketize of a number": lambda v: torch.bucketize(0.5, v.sort().values),
    "vander with a tensor of a number": lambda v, n: torch.linalg.vander(v, N=n + 2),
    "matrix_power with a tensor": lambda x, n: torch.linalg.matrix_power(x, n),
    "fftn with a list of tensors": lambda x, n: torch.fft.fftn(x, [n, n + 1]),
    "pixel_shuffle of a matrix": lambda x: F.pixel_shuffle(x, 2),
    "local_response_norm of a vector": lambda v: F.local_response_norm(v, 2),
    "scatter along a tensor": lambda x, i, n: torch.scatter(x, n, i, x),
    "searchsorted of a number": lambda v: torch.searchsorted(v.sort().values, 0.25),
    "narrow from nowhere": lambda x: x.narrow(0, None, 2),
    "repeat_interleave along a tensor": lambda x, n: x.repeat_interleave(2, dim=n),
    "a pool as wide as a number with a gradient": lambda x: F.max_pool1d(x, torch.ones((), requires_grad=True)),
    "one_hot of nothing": lambda i: F.one_hot(i[:0]),
    "norm of an unknown kind": lambda x: torch.norm(x, "two"),
    "inner into a tensor": lambda x: torch.inner(x, x, out=x.clone()),
    "outer into a tensor": lambda x, v: torch.outer(v, v, out=x.clone()),
    "a pool into a tensor": lambda s: F.avg_pool2d(s, 1, out=s.clone()),
}


def outcome(call: Callable[..., Any], given: dict[str, Any]) -> Any:
    try:
        return call(**given)
    except Exception as error:
        return error


@on_mesh()
def calls(mesh: Any) -> list[str]:
    warnings.simplefilter("ignore")
    said = []
    for name, call in CALLS.items():
        whole = {
            "x": randn(4, 4),
            "v": randn(4, seed=1),
            "s": randn(3, 2, 8, seed=2),
            "i": (torch.arange(16, device=device()) % 4).reshape(4, 4),
            "n": torch.tensor(1, device=device()),
        }
        names = call.__code__.co_varnames[: call.__code__.co_argcount]
        whole = {k: whole[k] for k in names}
        wanted = outcome(call, whole)
        got = outcome(call, {k: x if k == "n" else shard(x, mesh, Shard(0)) for k, x in whole.items()})
        if isinstance(wanted, Exception):
            assert type(got) is type(wanted), (name, wanted, got)
            assert str(got).startswith(str(wanted).partition("\n")[0][:40]), (name, wanted, got)
            said.append(f"{name}: {got}")
        else:
            assert not isinstance(got, Exception), (name, got)
            close(torch.as_tensor(got) if isinstance(got, bool) else got, torch.as_tensor(wanted), name)
    return said


def test_as_torch_does(pool: Any) -> None:
    first, second = pool.run(2, calls)
    assert first == second
    assert 5 < len(first) < len(CALLS), "some are errors, and some are not"


#: name -> call of torch's factories, with the integer 4 and the float 6.
FACTORIES: dict[str, Callable[[Any, Any], Any]] = {
    "arange": lambda n, s: torch.arange(n),
    "arange by name": lambda n, s: torch.arange(0, end=n, step=2),
    "eye": lambda n, s: torch.eye(n, 2),
    "full": lambda n, s: torch.full((2, n), s),
    "full of a dtype": lambda n, s: torch.full((2,), fill_value=n, dtype=torch.float64),
    "randint": lambda n, s: torch.randint(n - 1, n, (3,)),
    "randperm": lambda n, s: torch.randperm(n).sort().values,
    "scalar_tensor": lambda n, s: torch.scalar_tensor(s),
    "tensor": lambda n, s: torch.tensor(s),
    "tensor of integers": lambda n, s: torch.tensor(data=n),
    "tensor of a list": lambda n, s: torch.tensor([s, s]),
    "new_full": lambda n, s: s.new_full((n,), s),
    "new_tensor": lambda n, s: s.new_tensor(s),
}


@on_mesh()
def factories(mesh: Any) -> None:
    """Check factories with a partial sum, and that patched ones are torch's own where nothing is distributed."""
    four, six = torch.tensor([1, 3], device=device()), torch.tensor([2.5, 3.5], device=device())
    for name, call in FACTORIES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.tensor of a tensor
            wanted = call(four.sum(), six.sum())
            got = call(shard(four, mesh, Shard(0)).sum(), shard(six, mesh, Shard(0)).sum())
        assert got.dtype is wanted.dtype, name
        close(got, wanted, name)
    with pytest.raises(TypeError, match="must be Number"):
        torch.full((2,), shard(six, mesh, Shard(0)).requires_grad_().sum())
    with torch.device("meta"):
        made = (torch.arange(3), torch.eye(2), torch.full((2,), 1.0), torch.randperm(2), torch.tensor(1.0))
        assert {x.device.type for x in made} == {"meta"}
    assert pickle.loads(pickle.dumps(torch.arange)) is torch.arange

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(x.shape[0]) + torch.full((2,), x.sum()) + torch.tensor([x.shape[0], 1.0])

    close(compiled(torch.ones(2)), torch.tensor([5.0, 5.0]), "compiled")


def test_factories(pool: Any) -> None:
    pool.run(2, factories)
