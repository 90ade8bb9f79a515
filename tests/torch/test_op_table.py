"""Every spelling of an operation binds to its row and gives torch's result on plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import DTensor, Replicate, Shard, init_device_mesh, strict
from hyper_parallel.core.operations import dispatch as core_dispatch
from hyper_parallel.core.rules import OPERATIONS
from hyper_parallel.platform.torch.op_table import OP_TABLE
from tests.torch.rows import MORE
from tests.torch.support import device, randn

#: name of the canonical operation -> calls. ``x`` is (4, 6), ``y`` (4, 6) positive, ``v`` (6,), ``i`` (4, 6) integers
#: from 0 to 3, ``m`` (4, 6) booleans, ``w`` (8, 6), ``b`` (8,), ``z`` (2, 4, 6).
CALLS: dict[str, list[Callable[..., Any]]] = {
    "pointwise": [
        lambda x, **_: torch.relu(x),
        lambda x, **_: F.relu(x),
        lambda x, **_: F.silu(x),
        lambda x, **_: F.silu(input=x),
        lambda x, **_: F.gelu(x, approximate="tanh"),
        lambda x, **_: torch.nn.ReLU6()(x),
        lambda x, **_: F.leaky_relu(x, 0.2),
        lambda x, **_: F.hardtanh(x, -0.5, max_val=0.5),
        lambda x, **_: x.pow(2),
        lambda x, **_: x**2,
        lambda x, **_: 2**x,
        lambda y, **_: y.pow(exponent=0.5),
        lambda x, y, **_: torch.pow(y, x),
        lambda x, y, **_: torch.maximum(x, y),
        lambda x, y, **_: torch.max(x, y),
        lambda x, y, **_: torch.min(x, other=y),
        lambda x, **_: x.clamp(-1, 1),
        lambda x, **_: x.clamp(max=1),
        lambda x, y, **_: torch.clamp(x, max=y),
        lambda x, **_: torch.clip(x, min=0.0),
        lambda x, **_: x.clamp_min(0.0),
        lambda x, y, **_: torch.where(x > 0, x, y),
        lambda x, m, **_: x.where(m, 0.0),
        lambda x, m, **_: x.masked_fill(m, float("-inf")),
        lambda x, m, **_: torch.masked_fill(x, mask=m, value=2.0),
        lambda x, y, **_: torch.lerp(x, y, 0.5),
        lambda x, y, **_: torch.addcmul(x, y, y, value=0.5),
        lambda x, **_: x == 0,
        lambda x, y, **_: (x > y) & (y <= 1),
        lambda m, **_: ~m,
        lambda x, y, **_: torch.complex(x, imag=y),
        lambda x, **_: torch.fill(x, value=2.0),
        lambda y, **_: torch.polygamma(1, y),
        lambda y, **_: y.polygamma(n=1),
        lambda x, y, **_: torch.special.zeta(2.0, y + 1),
        lambda x, **_: torch.special.hermite_polynomial_h(x, n=2),
        lambda x, y, **_: x // y,
        lambda x, **_: x % 2,
        lambda x, **_: 3 % (x.abs() + 1),
        lambda x, **_: abs(x),
        lambda x, **_: x.rsqrt().isnan(),
        lambda x, **_: x.to(torch.int32),
        lambda x, **_: x.long(),
        lambda x, m, **_: x.to(m),
        lambda x, y, **_: F.mse_loss(x, y, reduction="none"),
        lambda x, y, **_: torch.atan2(x, y),
        lambda x, y, **_: torch.isclose(x, y, rtol=0.1),
    ],
    "add": [
        lambda x, y, **_: x + y,
        lambda x, v, **_: v + x,
        lambda x, **_: x + 1,
        lambda x, **_: 1 + x,
        lambda x, y, **_: x - y,
        lambda x, **_: 2 - x,
        lambda x, y, **_: torch.add(x, y, alpha=2),
        lambda x, y, **_: torch.add(input=x, other=y),
        lambda x, y, **_: x.sub(other=y, alpha=3),
        lambda x, y, **_: torch.rsub(x, y),
    ],
    "mul": [
        lambda x, y, **_: x * y,
        lambda x, **_: 2 * x,
        lambda x, v, **_: torch.mul(v, x),
        lambda x, y, **_: torch.multiply(x, other=y),
    ],
    "div": [
        lambda x, y, **_: x / y,
        lambda x, **_: x / 2,
        lambda y, **_: 2 / y,
        lambda x, y, **_: torch.div(x, y, rounding_mode="floor"),
        lambda x, y, **_: x.divide(other=y),
    ],
    "alias": [
        lambda x, **_: x.detach(),
        lambda x, **_: x.data,
    ],
    "contiguous": [lambda x, **_: x.contiguous()],
    "linear_unary": [
        lambda x, **_: -x,
        lambda x, **_: +x,
        lambda x, **_: x.neg(),
        lambda x, **_: x.clone(),
        lambda x, **_: x.to(torch.float64),
        lambda x, **_: x.to(dtype=torch.bfloat16),
        lambda x, **_: x.to(x.device, torch.float64),
        lambda x, **_: x.double(),
        lambda x, y, **_: x.type_as(y.double()),
        lambda x, y, **_: x.to(y.double()),
        lambda x, **_: x.cpu(),
    ],
    "like": [
        lambda x, **_: torch.zeros_like(x),
        lambda x, **_: torch.ones_like(x, dtype=torch.int64),
        lambda x, **_: torch.full_like(x, 3.0),
        lambda x, **_: torch.full_like(x, fill_value=3.0),
        lambda x, **_: x.new_zeros(4, 6),
        lambda x, **_: x.new_full((4, 6), 2.0),
    ],
    "linear": [
        lambda x, w, b, **_: F.linear(x, w, b),
        lambda x, w, **_: F.linear(x, w),
        lambda x, w, b, **_: F.linear(input=x, weight=w, bias=b),
    ],
    "matmul": [
        lambda x, y, **_: x @ y.T,
        lambda x, y, **_: torch.mm(x, mat2=y.t()),
        lambda x, z, **_: z @ x.mT,
        lambda x, z, **_: torch.matmul(z, x.T),
        lambda z, **_: torch.bmm(z, z.mT),
        lambda x, v, **_: x.mv(v),
        lambda v, **_: v.dot(v),
        lambda v, x, **_: torch.matmul(input=x, other=v),
    ],
    "addmm": [
        lambda x, y, **_: torch.addmm(x @ y.T, x, y.T, alpha=2),
        lambda x, y, **_: (x @ y.T).addmm(x, y.T, beta=0.5),
    ],
    "einsum": [
        lambda x, y, **_: torch.einsum("bi,bj->ij", x, y),
        lambda x, y, **_: torch.einsum("bi, ci -> bc", [x, y]),
    ],
    "sum": [
        lambda x, **_: x.sum(),
        lambda x, **_: torch.sum(x, 0),
        lambda x, **_: x.sum(dim=(0, 1), keepdim=True),
        lambda x, **_: x.sum(-1, True),
        lambda x, **_: x.sum(axis=1, dtype=torch.float64),
        lambda x, **_: x.sum(()),
    ],
    "mean": [lambda x, **_: x.mean(), lambda x, **_: torch.mean(x, dim=-1, keepdim=True)],
    "amax": [
        lambda x, **_: x.amax(),
        lambda x, **_: torch.amax(x, (0, 1)),
        lambda x, **_: x.max(),
        lambda x, **_: torch.max(input=x),
        lambda x, **_: x.amax(1, keepdim=True),
    ],
    "amin": [lambda x, **_: x.amin(0), lambda x, **_: torch.min(x)],
    "reduce_whole": [
        lambda x, **_: x.argmax(),
        lambda x, **_: x.argmax(-1),
        lambda x, **_: torch.argmin(x, dim=0, keepdim=True),
        lambda x, **_: x.std(),
        lambda x, **_: x.var(1, correction=0),
        lambda x, **_: x.var(dim=(0, 1), unbiased=False, keepdim=True),
        lambda m, **_: m.any(),
        lambda m, **_: m.all(0),
        lambda m, **_: torch.all(m, dim=1, keepdim=True),
        lambda x, **_: x.prod(1),
        lambda x, **_: torch.count_nonzero(x),
        lambda x, **_: x.median(),
        lambda x, **_: torch.var(x, False),
        lambda x, **_: x.std(1, False, True),
        lambda z, **_: torch.linalg.matrix_norm(z, "nuc"),
        lambda x, **_: torch.count_nonzero(x, dim=1),
    ],
    "reduce_pair": [
        lambda x, **_: x.max(1),
        lambda x, **_: torch.min(x, dim=0, keepdim=True),
        lambda x, **_: x.max(dim=-1).indices,
        lambda x, **_: torch.median(x, 1),
        lambda x, **_: x.mode(),
        lambda x, **_: torch.kthvalue(x, 2, dim=0, keepdim=True),
        lambda x, **_: torch.var_mean(x, dim=1, correction=0),
    ],
    "vector_norm": [
        lambda x, **_: torch.linalg.vector_norm(x),
        lambda x, **_: torch.linalg.vector_norm(x, 3, dim=1, keepdim=True),
        lambda x, **_: x.norm(),
        lambda x, **_: torch.norm(x, p=1, dim=0),
        lambda x, **_: x.norm(float("inf")),
    ],
    "view": [
        lambda x, **_: x.view(2, 2, 6),
        lambda x, **_: x.view((24,)),
        lambda x, y, **_: x.view_as(y),
    ],
    "reshape_copy": [lambda x, **_: torch.view_copy(x, (2, 2, 6)), lambda x, **_: torch.view_copy(x.t(), (24,))],
    "reshape": [
        lambda x, **_: x.reshape(-1, 3),
        lambda x, **_: torch.reshape(x, [4, 2, 3]),
        lambda x, **_: torch.reshape(x, shape=(24,)),
        lambda x, y, **_: x.view(6, 4).reshape_as(y),
        lambda z, **_: z.flatten(),
        lambda z, **_: z.flatten(1),
        lambda z, **_: torch.flatten(z, end_dim=1),
        lambda x, **_: x.unflatten(1, (2, -1)),
        lambda x, **_: torch.unflatten(x, dim=0, sizes=(2, 2)),
        lambda x, **_: x.ravel(),
    ],
    "permute": [
        lambda x, **_: x.T,
        lambda x, **_: x.t(),
        lambda z, **_: z.mT,
        lambda x, **_: x.transpose(0, 1),
        lambda z, **_: torch.transpose(z, dim0=-1, dim1=0),
        lambda z, **_: z.permute(2, 0, 1),
        lambda z, **_: z.permute((1, 2, 0)),
        lambda z, **_: torch.permute(z, dims=(0, 2, 1)),
        lambda z, **_: z.swapaxes(0, 2),
        lambda z, **_: z.movedim(0, -1),
        lambda z, **_: torch.movedim(z, (0, 1), (1, 2)),
        lambda x, **_: x.H,
        lambda z, **_: z.mH,
    ],
    "expand": [
        lambda v, **_: v.expand(4, 6),
        lambda v, x, **_: v.expand_as(x),
        lambda v, **_: v.expand(-1),
        lambda v, **_: torch.broadcast_to(v, (4, 6)),
        lambda v, **_: v.expand(size=(2, 6)),
    ],
    "squeeze": [
        lambda v, **_: v.unsqueeze(0).squeeze(),
        lambda v, **_: v.unsqueeze(0).squeeze(0),
        lambda v, **_: torch.squeeze(v[None, :, None], dim=(0, 2)),
    ],
    "unsqueeze": [lambda v, **_: v.unsqueeze(-1), lambda v, **_: torch.unsqueeze(v, dim=0)],
    "narrow": [lambda x, **_: x.narrow(1, 2, 3), lambda x, **_: torch.narrow(x, dim=0, start=1, length=2)],
    "getitem": [
        lambda x, **_: x[1],
        lambda x, **_: x[:, 1:4],
        lambda x, **_: x[..., None],
        lambda x, **_: x[-1, ::2],
        lambda x, i, **_: x[i[:, 0]],
        lambda x, **_: x[[0, 2]],
        lambda x, **_: x.select(1, 2),
        lambda x, **_: torch.select(x, dim=0, index=-1),
    ],
    "split": [
        lambda x, **_: x.split(2),
        lambda x, **_: torch.split(x, [1, 5], dim=1),
        lambda x, **_: torch.split(tensor=x, split_size_or_sections=3, dim=1),
        lambda x, **_: x.split_with_sizes((2, 4), 1),
    ],
    "chunk": [lambda x, **_: x.chunk(2, dim=-1), lambda x, **_: torch.chunk(x, 3)],
    "unbind": [lambda x, **_: x.unbind(), lambda x, **_: torch.unbind(x, dim=1), lambda x, **_: tuple(x)],
    "repeat": [lambda x, **_: x.repeat(2, 1), lambda x, **_: x.repeat((1, 1, 2)), lambda x, **_: torch.tile(x, (2,))],
    "repeat_interleave": [
        lambda x, **_: x.repeat_interleave(2, dim=1),
        lambda x, **_: torch.repeat_interleave(x, 3, 0),
    ],
    "pad": [
        lambda x, **_: F.pad(x, (1, 2)),
        lambda z, **_: F.pad(z, (0, 0, 1, 0), value=3.0),
        lambda x, **_: F.pad(x, (-1, 0, 0, 2)),
        lambda z, **_: F.pad(z, (1, 1), mode="replicate"),
    ],
    "cat": [
        lambda x, y, **_: torch.cat([x, y]),
        lambda x, y, **_: torch.cat((x, y), dim=-1),
        lambda x, y, **_: torch.concat(tensors=[x, y], dim=1),
    ],
    "stack": [lambda x, y, **_: torch.stack([x, y]), lambda x, y, **_: torch.stack((x, y), dim=-1)],
    "softmax": [
        lambda x, **_: F.softmax(x, -1),
        lambda x, **_: torch.softmax(x, dim=0),
        lambda x, **_: x.softmax(1, dtype=torch.float64),
    ],
    "log_softmax": [lambda x, **_: F.log_softmax(x, dim=-1), lambda x, **_: x.log_softmax(0)],
    "logsumexp": [lambda x, **_: torch.logsumexp(x, 1), lambda x, **_: x.logsumexp((0, 1), keepdim=True)],
    "along_dims": [
        lambda x, **_: torch.cumprod(x, dim=0),
        lambda x, **_: x.cummax(0),
        lambda x, **_: x.sort(),
        lambda x, **_: torch.sort(x, 0, descending=True).values,
        lambda x, **_: x.argsort(dim=0),
        lambda x, **_: torch.msort(x),
        lambda x, **_: torch.renorm(x, 2, 0, maxnorm=1.0),
    ],
    "topk": [lambda x, **_: x.topk(2), lambda x, **_: torch.topk(x, k=3, dim=0, largest=False).values],
    "gather": [lambda x, i, **_: x.gather(0, i), lambda x, i, **_: torch.gather(x, dim=1, index=i)],
    "index_select": [lambda x, i, **_: x.index_select(0, i[0]), lambda x, i, **_: torch.index_select(x, 1, i[0])],
    "one_hot": [lambda i, **_: F.one_hot(i, 5), lambda i, **_: F.one_hot(i, num_classes=4)],
    "layer_norm": [
        lambda x, v, **_: F.layer_norm(x, (6,), v, v),
        lambda x, v, **_: F.layer_norm(x, [6], weight=v, eps=1e-3),
        lambda x, **_: torch.layer_norm(x, (4, 6)),
    ],
    "rms_norm": [lambda x, v, **_: F.rms_norm(x, (6,), v, 1e-3), lambda x, **_: torch.rms_norm(x, (6,))],
    "embedding": [
        lambda i, w, **_: F.embedding(i, w),
        lambda i, w, **_: F.embedding(i, w, padding_idx=-1),
        lambda i, w, **_: torch.embedding(w, i, 1),
    ],
    "attention": [
        lambda z, **_: F.scaled_dot_product_attention(z, z, z, is_causal=True),
        lambda z, **_: F.scaled_dot_product_attention(z, key=z, value=z, scale=0.5),
    ],
    "cross_entropy": [
        lambda x, i, **_: F.cross_entropy(x, i[:, 0]),
        lambda x, i, v, **_: F.cross_entropy(x, i[:, 0], weight=v.abs(), reduction="sum", label_smoothing=0.1),
        lambda x, i, **_: F.cross_entropy(x, i[:, 0], ignore_index=1, reduction="none"),
        lambda x, **_: F.cross_entropy(x, x.softmax(1)),
    ],
    "nll_loss": [lambda x, i, **_: F.nll_loss(x.log_softmax(1), i[:, 0], reduction="sum")],
    "dropout": [
        lambda x, **_: F.dropout(x, 0.5, training=False),
        lambda x, **_: F.dropout(x, p=0.0),
        lambda x, **_: torch.dropout(x, 1.0, train=True),
        lambda x, **_: torch.nn.Dropout(0.1).eval()(x),
        lambda z, **_: torch.nn.Dropout1d(0.1).eval()(z),
        lambda z, **_: torch.feature_dropout(z, 1.0, True),
    ],
    "glu": [lambda x, **_: F.glu(x), lambda x, **_: F.glu(x, dim=0)],
    "labelled": [
        lambda z, **_: F.conv1d(z, z[:, :, :2], padding=1),
        lambda z, b, **_: torch.conv1d(z, z.new_full((8, 2, 3), 0.5), bias=b, groups=2),
        lambda z, **_: F.conv_transpose1d(z, z.new_full((4, 2, 3), 0.5), stride=2, output_padding=1),
        lambda z, **_: F.max_pool1d(z, kernel_size=2, stride=1),
        lambda z, **_: torch.nn.MaxPool1d(2, return_indices=True)(z),
        lambda z, **_: F.avg_pool1d(z, 2),
        lambda z, **_: F.adaptive_max_pool2d(z, (2, 3)),
        lambda z, **_: torch.nn.AdaptiveAvgPool2d(2)(z),
        lambda z, **_: F.interpolate(z, size=[5], mode="linear"),
        lambda z, **_: F.pixel_shuffle(z.reshape(1, 4, 4, 3), 2),
        lambda z, **_: F.grid_sample(z.unsqueeze(0), z[:1, :2, None, :2].tanh(), "nearest", "border", True),
        lambda z, **_: F.unfold(z, (2, 2)),
        lambda z, **_: F.group_norm(z, 2),
        lambda z, **_: torch.group_norm(z, 2, eps=1e-3),
        lambda z, **_: F.instance_norm(z),
        lambda z, **_: F.batch_norm(z, z.new_full((4,), 0.5), z.new_full((4,), 2.0)),
        lambda x, w, b, **_: F.bilinear(x, x, w.unsqueeze(-1).expand(-1, -1, 6), b),
        lambda x, y, **_: F.cosine_similarity(x, y, dim=0),
        lambda x, i, **_: F.multi_margin_loss(x, i[:, 0]),
        lambda i, w, **_: F.embedding_bag(i, w, mode="max"),
    ],
    "replicate": [
        lambda x, **_: x.sum().item(),
        lambda x, **_: x.tolist(),
        lambda x, **_: float(x.sum()),
        lambda x, **_: bool((x == x).all()),
        lambda x, y, **_: torch.equal(x, y),
        lambda x, **_: torch.allclose(x, x, rtol=1e-3),
    ],
    **MORE,
}

#: In place: each changes ``x`` (or returns it changed).
IN_PLACE: dict[str, list[Callable[..., Any]]] = {
    "add_": [lambda x, y, **_: x.add_(y, alpha=2), lambda x, **_: x.sub_(1), lambda x, y, **_: x.__iadd__(y)],
    "mul_": [lambda x, v, **_: x.mul_(v), lambda x, **_: x.__imul__(2)],
    "div_": [lambda x, y, **_: x.div_(y), lambda x, **_: x.__itruediv__(2)],
    "linear_": [lambda x, **_: x.zero_(), lambda x, y, **_: x.copy_(y), lambda x, **_: x.neg_()],
    "pointwise_": [
        lambda x, **_: x.relu_(),
        lambda x, **_: torch.relu_(x),
        lambda x, **_: x.clamp_(-1, 1),
        lambda x, **_: x.clamp_(max=0.5),
        lambda x, **_: x.fill_(2.0),
        lambda x, m, **_: x.masked_fill_(m, 0.0),
        lambda x, y, **_: x.lerp_(y, 0.5),
        lambda x, y, **_: x.addcmul_(y, y, value=2),
        lambda x, y, **_: x.addcdiv_(y, y),
        lambda x, **_: x.pow_(2),
        lambda x, **_: x.exp_(),
        lambda x, **_: x.__ipow__(2),
    ],
    "setitem_": [
        lambda x, **_: x.__setitem__((slice(None), 0), 1.0) or x,
        lambda x, y, **_: x.__setitem__((slice(None), slice(1, 3)), y[:, 1:3]) or x,
        lambda x, i, **_: x.__setitem__((slice(None), i[0, :2]), 2.0) or x,
    ],
}


def operands() -> dict[str, torch.Tensor]:
    integers = torch.arange(24).reshape(4, 6) % 4
    return {
        "x": randn(4, 6),
        "y": randn(4, 6, seed=1).abs() + 0.1,
        "v": randn(6, seed=2),
        "i": integers.to(device()),
        "m": (integers > 1).to(device()),
        "w": randn(8, 6, seed=3),
        "b": randn(8, seed=4),
        "z": randn(2, 4, 6, seed=5),
    }


def plain(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    return [plain(v) for v in value] if isinstance(value, (tuple, list)) else value


def cases(table: dict[str, list[Callable[..., Any]]]) -> list[Any]:
    return [pytest.param(name, call, id=f"{name}-{i}") for name, calls in table.items() for i, call in enumerate(calls)]


@pytest.fixture
def rows_used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the rows under which core looks rules up."""
    used: list[str] = []

    def spy(rules: Any) -> Any:
        class Spy(dict):
            def get(self, key: Any, default: Any = None) -> Any:
                used.append(key)
                return super().get(key, default)

        return Spy(rules)

    monkeypatch.setattr(core_dispatch, "OPERATIONS", spy(OPERATIONS))
    monkeypatch.setattr(core_dispatch, "_RECIPES", {})
    for calls in core_dispatch.CALLS.values():
        calls.clear()
    return used


def run(call: Callable[..., Any], change: Callable[[torch.Tensor], Any]) -> Any:
    names = call.__code__.co_varnames[: call.__code__.co_argcount]
    return call(**{name: change(x) for name, x in operands().items() if name in names})


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=["replicate", "shard"])
@pytest.mark.parametrize(("name", "call"), [*cases(CALLS), *cases(IN_PLACE)])
def test_call(name: str, call: Callable[..., Any], placement: Any, rows_used: list[str]) -> None:
    """Any matching row gives torch's result on a mesh of one rank, where a shard is the whole tensor."""
    mesh = init_device_mesh(None, (1,))
    with strict():
        got = run(call, lambda x: DTensor.from_local(x, mesh, [placement]))
    assert name in rows_used or name == "replicate"
    wanted = run(call, lambda x: x)
    torch.testing.assert_close(plain(got), plain(wanted), equal_nan=True)
    if isinstance(wanted, (torch.Tensor, tuple, list)) and name not in ("replicate",):
        assert type(got) is type(wanted) or isinstance(got, DTensor)


def test_every_canonical_operation_has_a_call() -> None:
    # Of torch_npu's operators, see tests/npu/test_fused_operators.py.
    of_npu = {"rotary", "fused_attention", "add_rms_norm"}
    by_handlers = {"amax", "amin", "index_add", "count", "nonzero", "unique", "unique_in_order"}
    assert {row.name for row in OP_TABLE.values()} - of_npu | by_handlers == CALLS.keys() | IN_PLACE.keys()
    assert {row.name for row in OP_TABLE.values()} <= OPERATIONS.keys()


def test_out() -> None:
    mesh = init_device_mesh(None, (1,))
    x = DTensor.from_local(randn(4, 6), mesh, [Shard(0)])
    out = torch.empty_like(x)
    assert torch.add(x, x, out=out) is out and out.placements == (Shard(0),)
    torch.testing.assert_close(out.full_tensor(), 2 * randn(4, 6))
    for call in (
        lambda: torch.add(x, x, out=torch.empty(4, 6)),
        lambda: torch.sort(x, out=(torch.empty(4, 6), torch.empty(4, 6, dtype=torch.int64))),
        lambda: torch.linalg.svdvals(x, out=torch.empty(4)),
    ):
        with pytest.raises(TypeError, match=r"out=...\) with distributed operands needs"):
            call()
    with pytest.raises(ValueError, match="the result \\(6,\\)"):
        torch.sum(x, 0, out=out)


@pytest.mark.parametrize("value", [2.0, torch.tensor(2.0)])
def test_writing_through_a_mask(value: Any) -> None:
    x, mask = randn(4, 6), randn(4, 6, seed=1) > 0
    mesh = init_device_mesh(None, (1,))
    distributed, rows = (DTensor.from_local(t, mesh, [Shard(0)]) for t in (x.clone(), mask[:, 0]))
    distributed[rows] = value
    distributed[DTensor.from_local(mask, mesh, [Shard(0)])] = 3.0
    distributed[rows, 2] = 4.0
    x[mask[:, 0]] = value
    x[mask] = 3.0
    x[mask[:, 0], 2] = 4.0
    torch.testing.assert_close(distributed.full_tensor(), x)
    with pytest.raises(TypeError, match="plain tensor"):
        x[rows] = 1.0


def test_torchs_own_errors_come_through() -> None:
    x = DTensor.from_local(randn(4, 6), init_device_mesh(None, (1,)), [Replicate()])
    with pytest.raises(IndexError, match="out of range"):
        x.transpose(0, 5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        torch.sum(x, 0, nonsense=True)
    with pytest.raises(TypeError, match="unsupported operand"):
        x + "a"
    assert (x == None) is False  # noqa: E711
