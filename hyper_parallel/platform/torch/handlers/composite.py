"""Operations that are written with other operations on distributed tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.core.dtensor.placement_types import Replicate
from hyper_parallel.platform.torch.handlers.unknown import run_unknown
from hyper_parallel.platform.torch.op_table import OP_TABLE, UnboundCallError
from hyper_parallel.platform.torch.op_table.binding import elementwise, signature
from hyper_parallel.platform.torch.tensor import dispatch, handles, is_dtensor

__all__: list[str] = []

T = torch.Tensor


# ---------------------------------------------------------------------------------------------------- reductions

_dim_arguments = signature("input", "dim", keepdim=False)


@handles(torch.max, T.max, torch.min, T.min)
def extremum(func: Any, args: tuple, kwargs: dict) -> Any:
    """``max(x)``, ``max(x, other)`` and ``max(x, dim)``, the last one with the indices and torch's gradient."""
    is_max = func.__name__ == "max"
    if len(args) + len(kwargs) == 1:
        return dispatch(OP_TABLE[func], func, args, kwargs)
    if "other" in kwargs or (len(args) > 1 and isinstance(args[1], T)):
        return (torch.maximum if is_max else torch.minimum)(*args, **kwargs)
    x, dim, keepdim = _dim_arguments(func, args, kwargs)
    indices = (torch.argmax if is_max else torch.argmin)(x, dim, keepdim=True)
    values = torch.gather(x, dim, indices)
    if not keepdim:
        values, indices = values.squeeze(dim), indices.squeeze(dim)
    return (torch.return_types.max if is_max else torch.return_types.min)((values, indices))


@handles(torch.var_mean, torch.std_mean)
def spread_and_mean(func: Any, args: tuple, kwargs: dict) -> Any:
    """The two results one by one."""
    spread = torch.var if func is torch.var_mean else torch.std
    rest = {k: v for k, v in kwargs.items() if k in ("dim", "keepdim", "input")}
    if len(args) > 2 or (len(args) == 2 and isinstance(args[1], bool)):
        raise UnboundCallError
    return spread(*args, **kwargs), torch.mean(*args, **rest)


# ---------------------------------------------------------------------------------------------------- losses

_LOSSES: dict[Any, tuple[str, ...]] = {
    F.mse_loss: (),
    F.l1_loss: (),
    F.smooth_l1_loss: ("beta",),
    F.huber_loss: ("delta",),
    F.kl_div: ("log_target",),
    F.binary_cross_entropy: ("weight",),
    F.binary_cross_entropy_with_logits: ("weight", "pos_weight"),
    F.soft_margin_loss: (),
}
_POINTWISE_LOSSES = {loss: elementwise("pointwise", "input", "target", *options) for loss, options in _LOSSES.items()}
_DEPRECATED = ("size_average", "reduce")


@handles(*_LOSSES)
def element_wise_loss(func: Any, args: tuple, kwargs: dict) -> Any:
    """Loss of each element, then the reduction."""
    if len(args) > 2 or any(kwargs.get(k) is not None for k in _DEPRECATED):
        raise UnboundCallError
    options = {k: v for k, v in kwargs.items() if k not in (*_DEPRECATED, "reduction")}
    reduction = kwargs.get("reduction", "mean")
    if reduction not in ("none", "mean", "sum", "batchmean"):
        raise ValueError(f"{reduction!r} is not a valid value for reduction")
    losses = dispatch(_POINTWISE_LOSSES[func], func, args, {**options, "reduction": "none"})
    if reduction == "none":
        return losses
    if reduction == "mean":
        return losses.mean()
    return losses.sum() if reduction == "sum" else losses.sum() / losses.shape[0]


# ---------------------------------------------------------------------------------------------------- shapes


def whole_along(x: Any, dim: int) -> Any:
    """``x`` with tensor dimension ``dim`` whole on every rank."""
    placements = x._layout.placements
    dim %= max(x.dim(), 1)
    if not any(p.is_shard(dim) for p in placements):
        return x
    return x.redistribute(placements=[Replicate() if p.is_shard(dim) else p for p in placements])


@handles(T.unbind, torch.unbind)
def unbind(func: Any, args: tuple, kwargs: dict) -> tuple:
    """One tensor for each index of a dimension."""
    x, dim = signature("input", dim=0)(func, args, kwargs)
    if not x.dim():
        raise RuntimeError("Dimension specified as 0 but tensor has no dimensions")
    x = whole_along(x, dim)
    return tuple(x.select(dim, i) for i in range(x.shape[dim]))


@handles(T.repeat_interleave, torch.repeat_interleave)
def repeat_interleave(func: Any, args: tuple, kwargs: dict) -> Any:
    """By an int along a dimension: a broadcast and a reshape."""
    x, repeats, dim, _ = signature("input", "repeats", dim=None, output_size=None)(func, args, kwargs)
    if not isinstance(repeats, int) or dim is None:
        return run_unknown(func, args, kwargs)
    shape = list(x.shape)
    dim %= len(shape)
    expanded = x.unsqueeze(dim + 1).expand(*shape[: dim + 1], repeats, *shape[dim + 1 :])
    return expanded.reshape(*shape[:dim], shape[dim] * repeats, *shape[dim + 1 :])


@handles(torch.outer, T.outer, torch.ger)
def outer(func: Any, args: tuple, kwargs: dict) -> Any:
    """Product of a column and a row."""
    a, b = signature("input", "vec2")(func, args, kwargs)
    return a.unsqueeze(1) * b.unsqueeze(0)


_NEW = {"new_zeros": torch.zeros_like, "new_ones": torch.ones_like, "new_empty": torch.empty_like}


@handles(T.new_zeros, T.new_ones, T.new_empty, T.new_full)
def new_tensor(func: Any, args: tuple, kwargs: dict) -> Any:
    """``x.new_zeros(size)``: laid out like ``x`` when it has its shape, else replicated."""
    x, rest = args[0], list(args[1:])
    if func is T.new_full:
        size = rest.pop(0) if rest else kwargs["size"]
        fill = [rest.pop(0) if rest else kwargs["fill_value"]]
    else:
        size, fill = (rest if len(rest) != 1 or isinstance(rest[0], int) else rest[0]) if rest else kwargs["size"], []
        rest = []
    options = {k: v for k, v in kwargs.items() if k not in ("size", "fill_value")}
    size = (size,) if isinstance(size, int) else tuple(size)
    if size == tuple(x.shape):
        return torch.full_like(x, *fill, **options) if fill else _NEW[func.__name__](x, **options)
    # What is made does not depend on the values of x: an empty slice stands for it, so that nothing is gathered.
    return run_unknown(func, (_stand_in(x), size, *fill), options)


def _stand_in(x: Any) -> Any:
    """A replicated tensor without elements, with dtype and device of ``x``."""
    from hyper_parallel.core.dtensor.layout import get_layout
    from hyper_parallel.platform.torch.tensor import no_dispatch, wrap

    mesh = x._layout.mesh
    with no_dispatch():
        empty = torch.empty(0, dtype=x.dtype, device=x.device)
    return wrap(empty, get_layout(mesh, (Replicate(),) * mesh.ndim, (0,)))


@handles(T.new_tensor)
def new_plain_tensor(func: Any, args: tuple, kwargs: dict) -> Any:
    """``x.new_tensor(data)``: a plain tensor with dtype and device of ``x``, the same on every rank."""
    x, data = args[0], args[1] if len(args) > 1 else kwargs["data"]
    options = {k: v for k, v in kwargs.items() if k != "data"}
    return torch.tensor(data, **{"dtype": x.dtype, "device": x.device, **options})


# ---------------------------------------------------------------------------------------------------- einsum


@handles(torch.einsum)
def einsum(func: Any, args: tuple, kwargs: dict) -> Any:
    """Two operands without repeated labels as a matrix product; others on gathered operands."""
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    if not isinstance(args[0], str) or len(operands) != 2 or "." in args[0]:
        return run_unknown(func, args, kwargs)
    inputs, arrow, result = args[0].replace(" ", "").partition("->")
    if not arrow:
        counts = inputs.replace(",", "")
        result = "".join(sorted(c for c in set(counts) if counts.count(c) == 1))
    labels = inputs.split(",")
    if len(labels) != 2 or any(len(set(s)) != len(s) for s in (*labels, result)):
        return run_unknown(func, args, kwargs)
    return _product(*labels, result, *operands)


def _product(a_labels: str, b_labels: str, result: str, a: Any, b: Any) -> Any:
    a, a_labels = _sum_out(a, a_labels, b_labels + result)
    b, b_labels = _sum_out(b, b_labels, a_labels + result)
    batch = [c for c in a_labels if c in b_labels and c in result]
    inner = [c for c in a_labels if c in b_labels and c not in result]
    rows = [c for c in a_labels if c not in b_labels]
    columns = [c for c in b_labels if c not in a_labels]
    sizes = {**dict(zip(a_labels, a.shape, strict=True)), **dict(zip(b_labels, b.shape, strict=True))}
    a = _grouped(a, a_labels, (batch, rows, inner), sizes)
    b = _grouped(b, b_labels, (batch, inner, columns), sizes)
    y = torch.matmul(a, b)
    order = [*batch, *rows, *columns]
    if len(rows) != 1 or len(columns) != 1:
        y = y.reshape(tuple(sizes[c] for c in order))
    return y if "".join(order) == result else y.permute([order.index(c) for c in result])


def _sum_out(x: Any, labels: str, others: str) -> tuple[Any, str]:
    dims = [i for i, c in enumerate(labels) if c not in others]
    if not dims:
        return x, labels
    return x.sum(dims), "".join(c for c in labels if c in others)


def _grouped(x: Any, labels: str, groups: tuple[list[str], list[str], list[str]], sizes: dict[str, int]) -> Any:
    """Permute to (batch..., first, second), each of the latter two groups merged into one dimension."""
    batch, first, second = groups
    order = [*batch, *first, *second]
    if "".join(order) != labels:
        x = x.permute([labels.index(c) for c in order])
    if len(first) == 1 and len(second) == 1:
        return x
    shape = [sizes[c] for c in batch]
    for group in (first, second):
        merged = 1
        for c in group:
            merged *= sizes[c]
        shape.append(merged)
    return x.reshape(tuple(shape))


# ---------------------------------------------------------------------------------------------------- in place


@handles(T.copy_)
def copy_into(func: Any, args: tuple, kwargs: dict) -> Any:
    """``x.copy_(source)``; a plain ``source`` of the global shape (a state dict of the whole model) is cut up."""
    x, source = args[0], args[1] if len(args) > 1 else kwargs["src"]
    if is_dtensor(x) and type(source) in (T, torch.nn.Parameter) and source.dim():
        layout = x._layout
        if tuple(source.shape) == tuple(layout.shape) and layout.cotangent is layout and not source.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                x.copy_(source[layout.local_slices()])
            return x
    return dispatch(OP_TABLE[func], func, args, kwargs)
