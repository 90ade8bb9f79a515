"""Operations that are composed of other operations on DTensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.torch.basics.private import is_dispatch_on
from hyper_parallel.platform.torch.basics.tensor import State, dispatch, handles, is_dtensor, replaces
from hyper_parallel.platform.torch.handlers.gradients import forget_data, take_memory
from hyper_parallel.platform.torch.handlers.unknown import run_unknown
from hyper_parallel.platform.torch.op_table import OP_TABLE, UnboundCallError
from hyper_parallel.platform.torch.op_table.binding import Bound, dims_of, find, number_in, sizes_of
from hyper_parallel.platform.torch.op_table.elementwise import CONVERSIONS
from hyper_parallel.platform.torch.op_table.index import is_mask, without_masks
from hyper_parallel.platform.torch.op_table.reduction import OF_ALL

__all__ = ["set_method"]


@handles(*find("median nanmedian", torch, Tensor))
def median(func: Any, args: tuple, kwargs: dict) -> Any:
    """Choose between ``median(x)`` and ``median(x, dim)``, which are different operations."""
    return dispatch((OF_ALL if len(args) + len(kwargs) == 1 else OP_TABLE)[func], func, args, kwargs)


@handles(torch.max, Tensor.max, torch.min, Tensor.min)
def extremum(func: Any, args: tuple, kwargs: dict) -> Any:
    """Choose between ``max(x)``, ``max(x, other)`` and ``max(x, dim)``, which are different operations."""
    if len(args) + len(kwargs) == 1:
        return dispatch(OF_ALL[func], func, args, kwargs)
    if "other" in kwargs or (len(args) > 1 and isinstance(args[1], Tensor)):
        return (torch.maximum if func.__name__ == "max" else torch.minimum)(*args, **kwargs)
    return dispatch(OP_TABLE[func], func, args, kwargs)


@handles(Tensor.to, Tensor.type_as)
def convert(func: Any, args: tuple, kwargs: dict) -> Any:
    """Compute ``x.to(...)``. A conversion is linear, except to integers and booleans."""
    x, rest = args[0], args[1:]
    other = rest[0] if rest and isinstance(rest[0], Tensor) else kwargs.get("other")
    if other is not None:
        rest = (other.device, other.dtype, *rest[1:])
        kwargs = {name: value for name, value in kwargs.items() if name != "other"}
    if not is_dtensor(x):
        return x.to(*rest, **kwargs)
    dtype = kwargs.get("dtype")
    for value in rest:
        if isinstance(value, torch.dtype):
            dtype = value
    if dtype is None or dtype is x.dtype:
        with no_dispatch():
            if x.to(*rest, **kwargs) is x:
                return x
    linear = dtype is None or dtype.is_floating_point or dtype.is_complex
    return dispatch(CONVERSIONS["linear_unary" if linear else "pointwise"], func, (x, *rest), kwargs)


@handles(Tensor.add_, Tensor.sub_, Tensor.mul_, Tensor.div_)
def update(func: Any, args: tuple, kwargs: dict) -> Any:
    """Compute ``plain.mul_(number)`` with a distributed number, such as the total norm of partly distributed gradients.

    Every rank gathers the number, and the result stays plain.
    """
    if len(args) == 2 and not is_dtensor(args[0]) and is_dtensor(args[1]):
        x, number = args
        if not number.dim() and not (torch.is_grad_enabled() and number.requires_grad):
            number = number.full_tensor()
            with no_dispatch():
                return func(x, number, **kwargs)
    return dispatch(OP_TABLE[func], func, args, kwargs)


# ---------------------------------------------------------------------------------------------------- losses

_LOSSES = (
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.soft_margin_loss),
    *(F.poisson_nll_loss, F.hinge_embedding_loss),
)
#: Keywords that take tensors in some losses.
_TENSORS = ("weight", "pos_weight")
_DEPRECATED = ("size_average", "reduce")


def _bind_loss(func: Any, args: tuple, kwargs: dict) -> Bound:
    options = {name: number_in(value) for name, value in kwargs.items() if name not in _TENSORS}
    return (*args, *map(kwargs.get, _TENSORS)), options


def _call_loss(func: Any, operands: tuple, static_args: Any) -> Any:
    tensors = {n: x for n, x in zip(_TENSORS, operands[2:], strict=True) if x is not None}
    return func(*operands[:2], **tensors, **static_args, reduction="none")


#: The loss of each element.
_LOSS = NativeOp("pointwise", _bind_loss, _call_loss)


@handles(*_LOSSES)
def element_wise_loss(func: Any, args: tuple, kwargs: dict) -> Any:
    """Compute the loss of each element, then the reduction."""
    if len(args) != 2 or any(kwargs.get(name) is not None for name in _DEPRECATED):
        raise UnboundCallError
    reduction = kwargs.get("reduction", "mean")
    if reduction not in ("none", "mean", "sum", "batchmean"):
        raise ValueError(f"{reduction!r} is not a valid value for reduction")
    options = {name: value for name, value in kwargs.items() if name not in (*_DEPRECATED, "reduction")}
    losses = dispatch(_LOSS, func, args, options)
    if reduction == "none":
        return losses
    if reduction == "mean":
        weighted = func in (F.mse_loss, F.l1_loss) and kwargs.get("weight") is not None
        return losses.sum() / kwargs["weight"].sum() if weighted else losses.mean()
    return losses.sum() if reduction == "sum" else losses.sum() / losses.shape[0]


# ---------------------------------------------------------------------------------------------------- shapes


@replaces(torch.outer, Tensor.outer, torch.ger)
def outer(input: Any, vec2: Any, *, out: Any = None) -> Any:
    """Return the product of a column and a row. Mirrors `torch.outer`."""
    if out is not None:
        raise UnboundCallError  # `handlers.unknown` copies the result there
    return input.unsqueeze(1) * vec2.unsqueeze(0)


@handles(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_empty_strided)
def new_tensor(func: Any, args: tuple, kwargs: dict) -> Any:
    """Make a tensor as ``x.new_zeros(size)`` does. The new tensor has the layout of ``x`` if it has the same shape,
    else it is replicated."""
    options = {k: v for k, v in kwargs.items() if k not in ("size", "fill_value")}
    x, *given = (*args, *(v for k, v in kwargs.items() if k not in options))
    count = {Tensor.new_full: 1, Tensor.new_empty_strided: 1}.get(func, len(given))
    size, more = sizes_of(given[:count]), [*map(number_in, given[count:])]
    if not is_dtensor(x):  # a size is distributed
        return func(x, size, *more, **options)
    if size == tuple(x.shape) and func is not Tensor.new_empty_strided:
        return getattr(torch, func.__name__.replace("new_", "") + "_like")(x, *more, **options)
    # The new tensor does not depend on the values of x. So an empty tensor with its dtype and device replaces x, and
    # nothing is gathered.
    stand_in = torch.empty(0, dtype=x.dtype, device=x.device)
    return State.core.replicated(func(stand_in, size, *more, **options), x._layout.mesh)


@replaces(Tensor.new_tensor)
def new_plain_tensor(x: Any, data: Any, **options: Any) -> Any:
    """Make a plain tensor as ``x.new_tensor(data)`` does, the same on every rank."""
    return torch.tensor(data, **{"dtype": x.dtype, "device": x.device, **options})


# ---------------------------------------------------------------------------------------------------- in place

_IN_PLACE_VIEWS = ("unsqueeze", "squeeze", "transpose", "t", "swapaxes", "swapdims")


@handles(*(getattr(Tensor, f"{name}_") for name in _IN_PLACE_VIEWS))
def view_in_place(func: Any, args: tuple, kwargs: dict) -> Any:
    """Change the shape of ``x`` in place, as ``x.unsqueeze_(0)`` does."""
    x = args[0]
    if func is Tensor.squeeze_:
        args, kwargs = (x, _squeezed(x._layout, *args[1:], **kwargs)), {}
    view = getattr(Tensor, func.__name__[:-1])(*args, **kwargs)
    State.core.outdate_views(x)  # their indices are those of the shape before
    family, layout, strides = x._family, view._layout, view._strides
    with no_dispatch():
        func(*args, **kwargs)
    forget_data(x)
    x._layout, x._family, x._strides = layout, family, strides
    return x


@handles(Tensor.resize_, Tensor.resize_as_, Tensor.set_, Tensor.as_strided_)
def refuse_other_storage(func: Any, args: tuple, kwargs: dict) -> Any:
    """Reject another storage, or other sizes over the same storage: neither has a meaning for a shard."""
    raise TypeError(
        f"{func.__name__} of a DTensor would change the storage or the sizes of this rank's shard alone: make a new "
        "tensor (reshape, narrow, distribute_tensor), or assign a DTensor to x.data"
    )


@handles(*find("as_strided as_strided_copy as_strided_scatter", torch, Tensor))
def read_memory(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run ``x.as_strided(...)`` on a gathered copy, if its elements have the order in memory of a single device."""
    x = args[0] if args else kwargs["input"]
    if is_dtensor(x) and not _is_where_one_device_has_it(x):
        if not State.core.is_contiguous(x):
            raise ValueError(
                f"{func.__name__} addresses memory by strides, but this DTensor, placed {list(x._layout.placements)}, "
                "is not contiguous and has other strides than on one device. Use x.contiguous(), or index x"
            )
        positions = {"as_strided_scatter": 4}.get(func.__name__, 3)
        offset = args[positions] if len(args) > positions else kwargs.get("storage_offset")
        if offset is not None and x._family is not None:
            raise ValueError(
                f"{func.__name__}(storage_offset={offset}) counts from the start of the storage, but this DTensor, "
                f"placed {list(x._layout.placements)}, may be a view of a larger tensor. Leave storage_offset out and "
                "index x, or use x.clone()"
            )
    return run_unknown(func, args, kwargs)


def _is_where_one_device_has_it(x: Any) -> bool:
    """Return whether this rank's memory is like a single device's: ``x`` is replicated, and is not a view whose data
    were copied."""
    return x._layout.replicated and (x._family is None or x._family.source is None)


@handles(*find("to_sparse to_sparse_coo to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc", Tensor))
def refuse_sparse(func: Any, args: tuple, kwargs: dict) -> Any:
    """Reject sparse DTensors: the sizes of sparse parts depend on the data."""
    raise TypeError(
        f"{func.__name__} is not supported for DTensors, which are strided. Use x.full_tensor().{func.__name__}(...), "
        "a plain tensor that is the same on every rank, or x.to_local() for this rank's shard"
    )


def set_method(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Let ``x`` share data and layout with the DTensor ``other``, as ``x.set_(other)`` does. Torch cannot intercept
    `torch.Tensor.set_`."""
    if not is_dispatch_on():
        return Tensor.set_(self, *args, **kwargs)
    if len(args) != 1 or kwargs or not is_dtensor(args[0]):
        return refuse_other_storage(Tensor.set_, (self, *args), kwargs)
    take_memory(self, args[0], Tensor.set_)
    return self


def _squeezed(layout: Any, *dims: Any, dim: Any = None) -> tuple[int, ...]:
    """Return the dimensions that ``squeeze_`` removes. They have size 1 in the global shape, not only in the local
    shape."""
    asked = dims_of(dims[0] if len(dims) == 1 else dims or dim)
    if asked is None:
        asked = tuple(range(layout.ndim)) if dim is None and not dims else ()
    if any(not -layout.ndim <= d < layout.ndim for d in asked):
        raise IndexError(f"squeeze_{asked} is out of range for a tensor of {layout.ndim} dimension(s)")
    removed = tuple(d for d in {d % layout.ndim: None for d in asked} if layout.shape[d] == 1)
    if any(map(layout.shard_mesh_dims, removed)):
        raise ValueError(
            f"squeeze_ cannot remove a sharded dimension of a tensor of shape {tuple(layout.shape)} placed "
            f"{list(layout.placements)}: use x = x.squeeze(...)"
        )
    return removed


@replaces(Tensor.__setitem__)
def set_item(x: Any, index: Any, value: Any) -> None:
    """Write ``x[index] = value``. The number of elements that a mask selects depends on the data, so masks are handled
    separately."""
    if not is_dtensor(x):
        raise TypeError("a DTensor cannot be written into a plain tensor: distribute the plain tensor first")
    items = index if isinstance(index, tuple) else (index,)
    if not any(map(is_mask, items)):
        dispatch(OP_TABLE[Tensor.__setitem__], Tensor.__setitem__, (x, index, value), {})
        return
    mask = items[0]
    if (
        len(items) == 1
        and tuple(mask.shape) == tuple(x.shape[: mask.dim()])
        and (not isinstance(value, Tensor) or not value.dim())
    ):
        x.masked_fill_(mask.reshape((*mask.shape, *(1,) * (x.dim() - mask.dim()))), value)
    else:
        dispatch(OP_TABLE[Tensor.__setitem__], Tensor.__setitem__, (x, without_masks(items), value), {})


@replaces(Tensor.copy_)
def copy_into(x: Any, src: Any, non_blocking: bool = False) -> Any:
    """Copy ``src`` into ``x``. A plain ``src`` of the global shape, as in a full state dict, is sharded."""
    if is_dtensor(x) and type(src) in (Tensor, torch.nn.Parameter) and src.dim():
        layout = x._layout
        if tuple(src.shape) == tuple(layout.shape) and layout.cotangent is layout and not src.requires_grad:
            State.core.before_write(x)
            with no_dispatch():
                x.copy_(src[layout.local_index()])
            State.core.after_write(x)
            return x
    if is_dtensor(src) and not is_dtensor(x) and src.dim():
        raise ValueError(  # loading a state dict, torch adds the name of the parameter
            f"copy_ got a DTensor, global shape {tuple(src.shape)}, placements {list(src.placements)}, for a plain "
            f"tensor of shape {tuple(x.shape)}: pass source.full_tensor(), called on all ranks, or distribute the "
            "target. For a state dict, pass {name: value.full_tensor() for name, value in state_dict.items()}"
        )
    return dispatch(OP_TABLE[Tensor.copy_], Tensor.copy_, (x, src, non_blocking), {})
