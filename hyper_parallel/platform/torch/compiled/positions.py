"""Operations on a `Placed` that treat each position separately: the operations of a user-defined norm.

Each operation runs on local tensors. If all operands have one cut, the result has this cut. If some operands are
sharded, a replicated operand gets a partial gradient on each rank. All other calls are left to eager mode.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.platform.torch.basics.tensor import State
from hyper_parallel.platform.torch.compiled.functions import read_for_parts
from hyper_parallel.platform.torch.compiled.moves import placed_classes
from hyper_parallel.platform.torch.compiled.placed import plain

__all__ = ["class_of", "is_placed", "trace_positions"]


def class_of(number: int, size: int, cut: int | None) -> Any:
    """Return the class of a `Placed` with this cut; ``number`` is the ``id()`` of its mesh."""
    mesh = State.core.mesh_with_id(number)
    return None if mesh is None else placed_classes(mesh, size).get(cut)


def _group_of(number: int) -> Any:
    mesh = State.core.mesh_with_id(number)
    return None if mesh is None else mesh.platform_group(0)().group_name


# Called while a frame is traced, not by compiled code.
class_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
_group_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_placed(x: Any) -> bool:
    """Return whether ``x`` stands for a DTensor that is replicated, or sharded evenly."""
    return isinstance(x, State.tensor_class.__bases__[0]) and x.placed_on is not None and x.gathers is None


def trace_positions(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the result of ``func``, or None for a call that is not traced here."""
    if func in _ELEMENTWISE:
        return _elementwise(func, args, kwargs)
    if func in _ALONG:
        return _along(func, args, kwargs)
    if func in _NORMS:
        return _norm(func, args, kwargs)
    return None


def _is_fixed(x: Any) -> bool:
    return x is None or isinstance(x, (bool, int, float, str))


def _wrapped(y: Tensor, mesh: Any, cut: int | None) -> Any:
    own = class_of(id(mesh), mesh.shape[0], cut)
    return None if own is None else y.as_subclass(own)


def _for_parts(x: Any, mesh: Any) -> Any:
    """Return the local tensor of a replicated `Placed`, for a consumer that computes on a shard."""
    local = plain(x)
    if mesh.shape[0] == 1 or not local.is_floating_point():
        return local
    return read_for_parts(local, _group_of(id(mesh)))


def _elementwise(func: Any, args: tuple, kwargs: dict) -> Any:
    mesh, ndim = None, 0
    for x in args:
        if is_placed(x):
            if mesh is not None and x.placed_on is not mesh:
                return None
            mesh = x.placed_on
            ndim = max(ndim, x.ndim)
        elif not _is_fixed(x):
            return None
    for x in kwargs.values():
        if not _is_fixed(x):
            return None
    if mesh is None:
        return None
    # The cut is counted from the last dimension, as broadcasting aligns dimensions there.
    cut, length = None, 0
    for x in args:
        if is_placed(x) and x.placed_cut is not None:
            own = x.placed_cut % x.ndim - x.ndim
            if cut is not None and (own != cut or plain(x).shape[own] != length):
                return None
            cut, length = own, plain(x).shape[own]
    operands = []
    for x in args:
        if not is_placed(x):
            operands.append(x)
        elif cut is None or x.placed_cut is not None:
            operands.append(plain(x))
        elif x.ndim >= -cut and plain(x).shape[cut] != 1:
            return None  # this operand would have to be sharded first
        else:
            operands.append(_for_parts(x, mesh))
    y = func(*operands, **kwargs)
    return _wrapped(y, mesh, None if cut is None else cut % ndim)


def _along(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return a reduction along unsharded dimensions, or None for other calls."""
    x, *more = args
    if not is_placed(x) or len(more) > (1 if func in _UNBIASED else 2):
        return None
    dim = more[0] if more else kwargs.get("dim")
    keepdim = more[1] if len(more) == 2 else kwargs.get("keepdim", False)
    if isinstance(dim, (tuple, list)):
        dims = tuple(dim)
    elif isinstance(dim, int) and not isinstance(dim, bool):
        dims = (dim,)
    else:
        return None
    dtype = kwargs.get("dtype")
    if not dims or not isinstance(keepdim, bool) or not (dtype is None or isinstance(dtype, torch.dtype)):
        return None
    for key, value in kwargs.items():
        if key not in ("dim", "dtype") and not _is_fixed(value):
            return None
    own = [d % x.ndim for d in dims]
    cut = x.placed_cut
    if cut is not None:
        cut %= x.ndim
        if cut in own:
            return None
    y = func(plain(x), *more, **kwargs)
    if cut is not None and not keepdim:
        cut -= len([d for d in own if d < cut])
    return _wrapped(y, x.placed_on, cut)


def _norm(func: Any, args: tuple, kwargs: dict) -> Any:
    x, *more = args
    if not is_placed(x) or not more or not isinstance(more[0], (tuple, list)):
        return None
    mesh, cut, normalized = x.placed_on, x.placed_cut, len(more[0])
    if cut is not None:
        cut %= x.ndim
        if cut >= x.ndim - normalized:
            return None

    def read(p: Any) -> Any:
        if not is_placed(p):
            return p
        return plain(p) if cut is None else _for_parts(p, mesh)

    for p in (*more[1:], *kwargs.values()):
        if not _is_fixed(p) and not (is_placed(p) and p.placed_on is mesh and p.placed_cut is None):
            return None
    named = {key: read(p) for key, p in kwargs.items()}
    y = func(plain(x), more[0], *[read(p) for p in more[1:]], **named)
    return _wrapped(y, mesh, cut)


def _functions(names: str, *owners: Any) -> dict[Any, None]:
    """Return the functions with these names as keys of a dict, in which the compiler can look functions up."""
    return {getattr(owner, name): None for owner in owners for name in names.split() if hasattr(owner, name)}


_ELEMENTWISE = _functions(
    "add sub mul div true_divide multiply subtract divide pow square sqrt rsqrt reciprocal neg negative abs exp log "
    "sigmoid tanh relu float_power __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ "
    "__rdiv__ __pow__ __rpow__ __neg__ __abs__ clamp clamp_min clamp_max half bfloat16 double",
    torch,
    Tensor,
) | _functions("silu gelu sigmoid tanh relu softplus", F)
#: Functions whose second positional argument is not ``keepdim``.
_UNBIASED = _functions("var std", torch, Tensor)
_ALONG = _functions("mean sum amax amin", torch, Tensor) | _UNBIASED
_NORMS = _functions("layer_norm rms_norm", F, torch)
