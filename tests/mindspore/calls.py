"""Calls as users write them: functions of MindSpore, tensor methods, operators and layers that run on CPU.

Each is an expression over the names in `operands`, evaluated once on plain tensors and once on DTensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

__all__ = ["CALLS", "INPLACE_CALLS", "evaluate", "operands"]

_ELEMENTWISE = """
    x + y; x + 2; 2 + x; x - y; x - 2; 2 - x; x * y; x * 2; x / y; x / 2; 2 / x; x // y; x // 2; x % 2; x % y; x**2
    x**2.0; x**y; 2**x; -x; abs(x); x == y; x != 1; x < y; x < 1; x >= 0; x <= y; x > y; m & m; m | m; ~m; m ^ m
    mint.add(x, y); mint.add(x, y, alpha=2); mint.sub(x, y, alpha=2); mint.mul(x, y); mint.mul(x, 2.0)
    mint.div(x, y); mint.pow(x, 2); mint.square(x); ops.square(x); x.square(); ops.add(x, y); ops.sub(x, y)
    ops.mul(x, y); ops.div(x, y); ops.pow(x, 2); ops.exp(x); mint.exp(x); mint.log(x); mint.sqrt(x); mint.rsqrt(x)
    ops.rsqrt(x); mint.sin(x); mint.cos(x); mint.tanh(x); ops.tanh(x); mint.sigmoid(x); ops.sigmoid(x); ops.relu(x)
    F.relu(x); nn.ReLU()(x); ops.silu(x); F.silu(x); nn.SiLU()(x); mint.nn.SiLU()(x); ops.gelu(x); nn.GELU()(x)
    nn.GELU(False)(x); ops.gelu(x, approximate='tanh'); ops.softplus(x); F.softplus(x); ops.elu(x); ops.hardswish(x)
    ops.clamp(x, 0.2, 0.8); mint.clamp(x, 0.2, 0.8); x.clamp(0.2, 0.8); x.clip(0.2, 0.8); mint.abs(x); mint.neg(x)
    mint.reciprocal(x); mint.sign(x); mint.floor(x); mint.erf(x); ops.erf(x); mint.maximum(x, y); ops.maximum(x, y)
    mint.minimum(x, y); mint.where(m, x, y); ops.where(m, x, y); mint.where(m, x, 0.0); ops.select(m, x, y)
    x.where(m, y); ops.masked_fill(x, m, -1.0); x.masked_fill(m, -1.0); ops.logical_not(m); mint.logical_and(m, m)
    ops.logical_or(m, m); mint.isnan(x); ops.isnan(x); ops.isfinite(x); mint.isfinite(x); ops.zeros_like(x)
    ops.ones_like(x); ops.cast(x, ms.float16); x.astype(ms.float16); x.to(ms.float16); x.to(ms.float32)
    x.type_as(y); x.int(); x.bool(); x.float(); x.half(); x.contiguous(); x.copy(); ops.stop_gradient(x)
    ops.identity(x); mint.nn.Identity()(x); ops.depend(x, y); ops.addn([x, y]); ops.lerp(x, y, 0.5)
    mint.lerp(x, y, 0.5); x.lerp(y, 0.5); ops.addcmul(x, x, y, 1.0); ops.logaddexp(x, y); ops.xlogy(x, y)
    ops.relu6(x); ops.hardsigmoid(x); ops.mish(x); ops.selu(x); ops.softsign(x); ops.logsigmoid(x); ops.log1p(x)
    ops.expm1(x); ops.atan2(x, y); ops.round(x); ops.trunc(x); ops.ceil(x); ops.bitwise_and(i, i); ops.nan_to_num(x)
    ops.clip_by_value(x, 0.2, 0.8); ops.glu(x); x + v; v - x; x * s; s * x; x.isclose(y); i + i; i * 2; i.float()
    scalar - x; scalar * x; x / scalar; scalar**x; x + scalar; mint.nn.functional.glu(x)
"""

_PRODUCTS_AND_REDUCTIONS = """
    F.linear(x, w); F.linear(x, w, b); F.linear(x3, w, b); ops.dense(x, w, b); ops.matmul(x, w.T)
    mint.matmul(x, w.T); mint.matmul(x3, z3); x3 @ z3; x.matmul(w.T); x.mm(w.T); mint.bmm(x3, z3); ops.bmm(x3, z3)
    ops.MatMul(False, True)(x, w); ops.BatchMatMul(transpose_b=True)(x3, x3); x3 @ w.T; x @ v; v @ v
    ops.addmm(b.reshape(1, 5), x, w.T); ops.tensor_dot(x, w, ((1,), (1,))); ops.outer(v, v)
    x.sum(); x.sum(0); x.sum(axis=0); x.sum(dim=(0, 1), keepdim=True); mint.sum(x); mint.sum(x, dim=-1, keepdim=True)
    ops.sum(x, 1); ops.ReduceSum()(x, 1); ops.ReduceSum(keep_dims=True)(x, 1); x.mean(); x.mean(-1)
    x.mean(-1, keep_dims=True); x.mean(axis=-1); mint.mean(x, -1, True); ops.mean(x, -1, True); ops.ReduceMean()(x, 1)
    x.max(); x.max(axis=1); x.max(1); mint.max(x); mint.max(x, 1); ops.max(x, 1); mint.min(x, 1); ops.min(x, 1)
    x.min(); mint.amax(x, 1); ops.amax(x, 1); x.amax(1); ops.ReduceMax()(x, 1); ops.amin(x, 1); ops.argmax(x, 1)
    x.argmax(1); ops.argmin(x, 1); ops.Argmax()(x); mint.prod(x, 1); ops.prod(x, 1); ops.var(x, 1); x.var(1)
    ops.std(x, 1); x.std(1); mint.any(m, 1); ops.any(m, 1); m.any(); m.all(); mint.all(m, 1); ops.logsumexp(x, 1)
    ops.norm(x); x.norm(); ops.norm(x, 2, 1); ops.cumsum(x, 1); x.cumsum(1); ops.cumprod(x, 1); ops.sort(x)
    x.sort(); ops.argsort(x); ops.topk(x, 2); x.topk(2); ops.flip(x, (1,)); mint.flip(x, (1,)); ops.tril(x)
    ops.triu(x); mint.triu(x); ops.nonzero(m); ops.masked_select(x, m); ops.equal(x, y); mint.eq(x, y)
    ops.square(x).mean(); x3.sum((0, 2)); x3.mean((0, 1)); mint.mean(x3, 1)
"""

_SHAPES = """
    x.reshape(2, 12); x.reshape((2, 12)); ops.reshape(x, (2, 12)); mint.reshape(x, (2, 12)); x.view(2, 12)
    x.view((2, 12)); mint.flatten(x); ops.flatten(x3); mint.flatten(x3, 1); ops.flatten(x3, start_dim=1); x.flatten()
    x.ravel(); nn.Flatten()(x3); x.view_as(y); x.reshape_as(y); x.T; x.t(); mint.t(x); mint.transpose(x, 0, 1)
    x.transpose(0, 1); x.transpose(1, 0); x.transpose((1, 0)); x3.transpose(0, 2, 1); ops.transpose(x, (1, 0))
    ops.permute(x, (1, 0)); mint.permute(x, (1, 0)); x.permute(1, 0); ops.swapaxes(x, 0, 1); x.swapaxes(0, 1)
    mint.swapaxes(x, 0, 1); x.swapdims(0, 1); x3.mT; ops.movedim(x3, 0, 1); ops.expand_dims(x, 0)
    mint.unsqueeze(x, 0); x.unsqueeze(0); x.unsqueeze(-1); x.expand_dims(0); ops.unsqueeze(x, 0)
    ops.squeeze(x.reshape(4, 1, 6)); ops.squeeze(x.reshape(4, 1, 6), 1); mint.squeeze(x.reshape(4, 1, 6), 1)
    x.reshape(4, 1, 6).squeeze(1); x.reshape(4, 1, 6).squeeze(); ops.broadcast_to(x, (3, 4, 6))
    mint.broadcast_to(x, (3, 4, 6)); x.broadcast_to((3, 4, 6)); x.expand(3, 4, 6); x.expand((3, -1, -1))
    x.expand_as(x3); ops.tile(x, (2, 1)); mint.tile(x, (2, 1)); x.tile((2, 1)); ops.repeat_interleave(x, 2, 1)
    x.repeat_interleave(2, 1); ops.cat([x, y], 1); ops.concat([x, y], 0); mint.cat([x, y], 1); mint.concat([x, y], 1)
    ops.stack([x, y]); ops.stack((x, y), -1); ops.hstack([x, y]); ops.vstack([x, y]); mint.split(x, 2, 1)
    mint.split(x, [2, 4], 1); x.split(2); x.split(2, dim=1); x.split([2, 4], 1); ops.split(x, 2, 1)
    ops.split(x, [2, 4], 1); mint.chunk(x, 2, 1); ops.chunk(x, 2, 1); x.chunk(2, 1); x.chunk(2, dim=-1); ops.unbind(x)
    mint.unbind(x); x.unbind(0); mint.unbind(x3); mint.unbind(x3, 1)
    mint.narrow(x, 1, 0, 2); ops.narrow(x, 1, 0, 2); x.narrow(1, 0, 2)
    mint.select(x, 0, 1); x.select(0, 1); x.select(-1, -1); x[0]; x[:, :2]; x[..., None]; x[:, 1]; x[i]; x[i, i]
    x[:, i]; x[1:3, 0]; x[-1]; x3[:, 0, ::2]; x[None]; list(x); ops.strided_slice(x, (0, 0), (2, 2), (1, 1))
    ops.slice(x, (0, 0), (2, 2)); ops.gather(x, i, 0); ops.gather(x, i, 1); ops.Gather()(x, i, 0)
    ops.gather(w, ids, 0); mint.gather(x, 1, index); ops.gather_elements(x, 1, index); ops.gather_d(x, 1, index)
    x.gather(1, index); x.take(i); ops.gather_nd(x, ids); ops.index_select(x, 0, i); x.index_select(0, i)
    ops.one_hot(i, 5); ops.one_hot(i, 5, 1, 0); nn.OneHot(depth=5)(i); ops.scatter(x, 1, index, y)
    ops.tensor_scatter_elements(x, index, y, 1); ops.index_add(x, i, y, 0); ops.pad(x, (1, 1)); ops.meshgrid(v, v)
    ops.diag(v); x.diagonal(); mint.squeeze(x[:, :1], 1)
"""

_LAYERS = """
    ops.softmax(x, -1); ops.softmax(x, axis=-1); F.softmax(x, -1); nn.Softmax()(x); mint.nn.Softmax(-1)(x)
    ops.log_softmax(x, -1); nn.LogSoftmax()(x); ops.cross_entropy(x, i); ops.cross_entropy(x, i, reduction='none')
    ops.cross_entropy(x, i, reduction='sum'); ops.cross_entropy(x, y); ops.cross_entropy(x, i, label_smoothing=0.1)
    nn.CrossEntropyLoss()(x, i); nn.SoftmaxCrossEntropyWithLogits(sparse=True)(x, i); ops.nll_loss(x, i)
    nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction='mean')(x, i); nn.NLLLoss()(x, i); ops.mse_loss(x, y)
    nn.MSELoss()(x, y); ops.l1_loss(x, y); nn.L1Loss()(x, y); ops.LayerNorm(-1, -1, 1e-5)(x, v, v)[0]
    ops.LayerNorm(-1, -1, 1e-5)(x3, v, v)[0]; ops.dropout(x, 0.5, False); nn.Dropout(p=0.5).set_train(False)(x)
    mint.nn.Dropout(0.5).set_train(False)(x); ops.silu(x) * y; ops.EmbeddingLookup()(w, ids, 0)
    ops.SparseSoftmaxCrossEntropyWithLogits()(x, i); F.binary_cross_entropy_with_logits(x, y)
    ops.binary_cross_entropy(x, y); ops.smooth_l1_loss(x, y); ops.clip_by_norm(x, 1.0)
    ops.NLLLoss()(x, i, v)[0]; ops.NLLLoss('sum')(x, i, v)[0]; ops.NLLLoss('none')(x, i, v)[0]
"""

#: Whole pictures, matrices, indices: calls that the table of operators lacks.
_MORE = """
    ops.kl_div(x, y, 'none'); ops.kl_div(x, y, 'batchmean'); ops.binary_cross_entropy(x, y, reduction='none')
    F.binary_cross_entropy_with_logits(x, y, reduction='sum'); ops.smooth_l1_loss(x, y, reduction='mean')
    ops.multi_margin_loss(x, i.long(), reduction='none'); ops.multi_margin_loss(x, i.long(), weight=v)
    ops.histc(x, 4, 0.2, 0.8); ops.histc(x, 3); ops.bincount(i); ops.bincount(i, minlength=7)
    ops.bincount(v.int(), v); ops.meshgrid(v, y[0], indexing='ij'); mint.meshgrid(v, b); ops.trace(x)
    ops.nanmean(x, 1); ops.nanmean(x); ops.fft(x, 4).real(); ops.fftn(x, (4,)).real()
    ops.irfft(ops.rfft(x, dim=0), dim=0); ops.fftshift(x); ops.searchsorted(x, y)
    mint.cross(x3[:, :3], z3[:, :3, :1].broadcast_to((2, 3, 6)), 1); ops.cross(x[:, :3], y[:, :3]); ops.cdist(x3, x3)
    ops.tensor_scatter_add(x, ids, w[0, :2]); ops.tensor_scatter_update(x, ids, w[0, :2]); ops.diag_embed(x)
    ops.tensor_scatter_max(x, ids, w[0, :2]); ops.scatter_nd(ids, w[0, :2], (4, 6)); ops.count_nonzero(x, 1)
    ops.unsorted_segment_max(x, i, 4); ops.unsorted_segment_sum(x3, ids[:, :1].broadcast_to((2, 4)), 4); x.diff()
    x.addmv(y, v) if x.ndim == 1 else x[:, 0].addmv(y, v); v.int().bincount(); x.histc(3)
    ops.index_fill(x, 1, i, 2.0); ops.scatter(x, 1, index, y); x.isneginf(); ops.diagonal(x3, 1, 0, 2)
    ops.threshold(x, 0.4, 2.0); ops.isposinf(x); x.isposinf(); ops.select_scatter(x, v, 0, 1)
    ops.slice_scatter(x, y[:2], 0, 1, 3); ops.sequence_mask(i, 5); ops.vander(v); ops.diff(x, axis=0); ops.trapz(x)
    ops.median(x, axis=1); x.median(); ops.avg_pool1d(x3, 2, 2); ops.max_pool2d(x3.unsqueeze(0), 2)
    ops.interpolate(x3, size=(8,), mode='nearest'); ops.unfold(x3.unsqueeze(0), (2, 2)); ops.lrn(x3.unsqueeze(0))
    ops.prelu(x3, i.float()); ops.bias_add(x3, x[:, 0])
    ops.max_unpool2d(*ops.max_pool2d(x3.unsqueeze(0), 2, return_indices=True), 2)
    ops.max_unpool2d(*ops.max_pool2d(x3.unsqueeze(0), 2, return_indices=True), 2, output_size=(1, 2, 4, 6))
    ops.conv1d(x3, w[:, :4].unsqueeze(-1)); ops.conv2d(x3.unsqueeze(0), x3.unsqueeze(1)[:, :, :1, :1], groups=2)
    ops.reverse_sequence(x, i, 1, 0); ops.renorm(x, 2, 0, 1.0); ops.pad(x3, (1, 2, 3, 0), value=2.0)
    ops.pad(x3, (1, 1), mode='reflect'); ops.group_norm(x3, 2, x[:, 0], x[:, 1]); ops.cumsum(x, 1); x.cummax(0)
    ops.cholesky(ops.matmul(x, x.T) + ops.diag(i.float() + 4)); ops.svd(x3, compute_uv=False); ops.det(z3[:, :4])
    ops.lu_solve(y[:, :2], ops.diag(x[:, 0]), ops.cumsum(i * 0 + 1, 0).int())
    x.index_add(1, index[0], y[:, index[0] * 0]); ops.outer(v, b)
    ops.batch_norm(x3, x[:, 0], x[:, 1], y[:, 0], y[:, 1])
    ops.batch_norm(x3.half(), *(t[:, 0] for t in (x, y, x, y)), True)
"""

_INPLACE = """
    x.add_(y); x.mul_(2); x.sub_(y); x.div_(2); x.copy_(y); x.exp_(); x.floor_divide_(2); x.__iadd__(y)
    x.__imul__(2); x.__isub__(y); x.__itruediv__(2.0); ops.assign(x, y); ops.assign_add(x, y)
"""


def _calls(*blocks: str) -> list[str]:
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [call for line in lines for call in line.split("; ") if call]


CALLS = _calls(_ELEMENTWISE, _PRODUCTS_AND_REDUCTIONS, _SHAPES, _LAYERS)
MORE_CALLS = _calls(_MORE)
INPLACE_CALLS = _calls(_INPLACE)


def operands(distribute: Callable[[Tensor], Any] = lambda t: t) -> dict[str, Any]:
    """The names in the calls; ``distribute`` makes DTensors of the tensors. ``scalar`` stays a plain 0-d tensor."""
    rng = np.random.default_rng(0)

    def floats(*shape: int) -> Any:
        return distribute(Tensor(rng.random(shape).astype(np.float32) * 0.8 + 0.1))

    def integers(high: int, *shape: int) -> Any:
        return distribute(Tensor(rng.integers(0, high, shape).astype(np.int32)))

    return {
        "x": floats(4, 6),
        "y": floats(4, 6),
        "x3": floats(2, 4, 6),
        "z3": floats(2, 6, 4),
        "w": floats(5, 6),
        "b": floats(5),
        "v": floats(6),
        "s": floats(1),
        "m": distribute(Tensor(rng.random((4, 6)) > 0.5)),
        "i": integers(4, 4),
        "ids": integers(4, 2, 2),
        "index": integers(6, 4, 6),
        "scalar": Tensor(2.0),
    }


def evaluate(call: str, names: dict[str, Any]) -> list[Any]:
    """The results of a call, flat."""
    result = eval(call, {"ms": ms, "mint": mint, "nn": nn, "ops": ops, "F": mint.nn.functional}, names)
    return list(_flat(result))


def _flat(result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        for item in result:
            yield from _flat(item)
    else:
        yield result
