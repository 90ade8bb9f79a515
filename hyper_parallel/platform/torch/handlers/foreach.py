"""Kernels over lists of tensors, which optimizers and gradient clipping call.

These kernels are element-wise. So they can run on local tensors, if the tensors at each index have equal layouts. The
first list, which the kernel writes, determines the layouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.torch.basics.tensor import State, handles, is_dtensor, layout_of, replaces, wrap

__all__ = ["reduced", "widened"]


#: Not element-wise: each tensor is handled by its ordinary operation.
_ONE_BY_ONE = ("_foreach_max", "_foreach_mm")
_OWN_HANDLER = ("_foreach_norm", "_foreach_powsum", "_foreach_copy_")
_NAMES = [
    n
    for n in dir(torch)
    if n.startswith(("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad"))
    and n not in _ONE_BY_ONE
    and n not in _OWN_HANDLER
]


@handles(*(getattr(torch, name) for name in _NAMES))
def on_locals(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run on the local tensors; results have the layouts of the first list."""
    first = next(a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple)))
    layouts = [layout_of(x) for x in first]
    args = tuple(reduced(a) if is_dtensor(a) else a for a in args)
    kwargs = {name: reduced(value) if is_dtensor(value) else value for name, value in kwargs.items()}
    if not all(_fits(a, layouts) for a in (*args, *kwargs.values())):
        return one_by_one(func, args, kwargs)
    writes = func.__name__.endswith("_")
    shared = [x for x in _tensors(args, kwargs) if x._family is not None] if writes else []
    for x in shared:
        State.core.before_write(x)
    with no_dispatch():
        results = func(*args, **kwargs)
        for x in _tensors(args, kwargs) if writes else ():
            if x._gathered is not None or x._summands is not None:  # not all versions of torch count these writes
                State.core.forget_history(x)
    for x in shared:
        State.core.after_write(x)
    if results is None:
        return None
    return type(results)(
        r if layout is None or r is x else wrap(r, layout) for r, x, layout in zip(results, first, layouts, strict=True)
    )


def _tensors(args: tuple, kwargs: dict) -> list[Any]:
    """Return the DTensors in the lists. Fused optimizers write to several lists, so every list counts as written."""
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple))]
    return [x for values in lists for x in values if is_dtensor(x)]


def _fits(value: Any, layouts: list[Any]) -> bool:
    """Return whether the tensors of a list have these ``layouts``, and none is a partial sum."""
    if is_dtensor(value):
        return not value.dim()
    if not isinstance(value, (list, tuple)) or not value:
        return True
    others = [layout_of(x) for x in value]
    if others != layouts:
        for x, layout, other in zip(value, layouts, others, strict=True):
            # Step counters are plain 0-d tensors next to distributed parameters.
            if other is not layout and not (other is None and (not isinstance(x, Tensor) or not x.dim())):
                return False
    return all(layout is None or layout.cotangent is layout for layout in others)


#: Functions whose third operand besides the list is a keyword of the function for a single tensor.
_WITH_VALUE = ("addcmul", "addcdiv", "addcmul_", "addcdiv_")


@handles(*(getattr(torch, name, None) for name in _ONE_BY_ONE))
def one_by_one(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run the function for single tensors on each tensor of the lists. Layouts may differ, and shapes may broadcast."""
    name = func.__name__.removeprefix("_foreach_")
    single = getattr(Tensor, name, None)
    if single is None:  # fused optimizers
        raise ValueError(f"{func.__name__} needs tensors with equal layouts, without Partial() placements")
    count = len(args[0])
    columns = [a if isinstance(a, (list, tuple)) else [a] * count for a in args]
    rows = list(zip(*columns, strict=True))
    if name in _WITH_VALUE:
        rows, kwargs = [row[:3] for row in rows], dict(kwargs)
        values = columns[3] if len(columns) > 3 else [kwargs.pop("value", kwargs.pop("scalars", 1))] * count
        results = [single(*row, value=value, **kwargs) for row, value in zip(rows, values, strict=True)]
    else:
        results = [single(*row, **kwargs) for row in rows]
    return None if name.endswith("_") else results


@replaces(torch._foreach_copy_)
def copy_each(targets: Any, sources: Any, non_blocking: bool = False) -> Any:
    """Copy the local tensors if the layouts are equal. Else copy each DTensor separately, with redistribution."""
    if [layout_of(x) for x in targets] == [layout_of(x) for x in sources]:
        return on_locals(torch._foreach_copy_, (targets, sources, non_blocking), {})
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking)
    return targets


# ---------------------------------------------------------------------------------------------------- norms


@replaces(torch._foreach_norm)
def norm_each(tensors: Any, ord: float = 2, dtype: torch.dtype | None = None) -> list[Any]:
    """Return global norms, with one all-reduce for all tensors that are sharded over the same mesh dimensions."""
    tensors, order = [reduced(x) for x in tensors], float(ord)
    with no_dispatch():
        # An empty shard contributes nothing; torch has no maximum of it.
        nothing = math.inf if order < 0 else 0.0
        locals_ = [x if x.numel() else x.new_full((1,), nothing) for x in tensors]
        return _over_ranks(torch._foreach_norm(locals_, order, dtype=dtype), tensors, order)


@replaces(getattr(torch, "_foreach_powsum", None))
def power_sum_each(tensors: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """Return global sums of powers: the norms without the root."""
    tensors = [reduced(x) for x in tensors]
    with no_dispatch():
        return _over_ranks(torch._foreach_powsum(tensors, *args, **kwargs), tensors, 1)


def reduced(x: Any) -> Any:
    """Return ``x``, with a partial sum reduced. Interception is on."""
    layout = layout_of(x)
    if layout is None or layout.cotangent is layout:
        return x
    return x.redistribute(placements=list(layout.cotangent.placements))


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which norms of ``dtype`` and their powers are computed: in 16 bits, squares overflow
    early."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _over_ranks(norms: Sequence[Any], tensors: list[Any], order: float) -> list[Any]:
    """Return the norms of full tensors, as DTensors, from the norms of local tensors. Interception is off."""
    layouts = [layout_of(x) for x in tensors]
    wide = State.core.norms_over_ranks([n.to(widened(n.dtype)) for n in norms], layouts, order)
    return [
        n if layout is None else State.core.replicated(w.to(n.dtype).view_as(n), layout.mesh)
        for n, w, layout in zip(norms, wide, layouts, strict=True)
    ]


# ---------------------------------------------------------------------------------------------------- loss scaling


@replaces(torch._amp_foreach_non_finite_check_and_unscale_)
def unscale_each(gradients: Any, found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscale the local gradients. An infinity on one rank counts for all ranks that share a tensor."""
    with no_dispatch():
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)
        found_inf.copy_(State.core.largest_over_ranks(found_inf, [layout_of(x) for x in gradients]))
    State.core.notice_writes(gradients)  # torch counts no write here
