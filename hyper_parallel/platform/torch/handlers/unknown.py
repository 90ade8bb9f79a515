"""Functions without a handler or a row in the op table, and calls that these do not support."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.contract.interception import name_of
from hyper_parallel.platform.torch.basics.private import OpOverload, OpOverloadPacket, graph_task, in_dispatch_mode
from hyper_parallel.platform.torch.basics.tensor import State, dispatch, is_dtensor
from hyper_parallel.platform.torch.op_table.binding import UnboundCallError

__all__ = ["recover", "run_unknown"]

#: Namespaces of collectives among the operations of torch.
_COLLECTIVES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd")

#: Part of torch's message for writes to a leaf, or to a result of `DTensor.from_local`, which is a view of a leaf.
_OF_A_LEAF = "leaf Variable that requires grad"


def recover(error: RuntimeError, func: Any, args: tuple, kwargs: dict) -> Any:
    """Handle a call whose handler raised ``error``.

    The call runs on gathered operands if the op table's row does not cover the arguments.

    Raises:
        RuntimeError: ``error`` otherwise; with a remedy if torch refuses to write to a leaf that requires grad. Torch
            raises it before it writes, from facts that all ranks share.
    """
    if isinstance(error, UnboundCallError):
        return run_unknown(func, args, kwargs)
    words = str(error)
    if _OF_A_LEAF not in words or not args:
        raise error
    placements = list(args[0]._layout.placements) if getattr(args[0], "_layout", None) is not None else "..."
    raise RuntimeError(
        f"{getattr(func, '__name__', func)} on a DTensor placed {placements}: {words.rstrip('.')}. To change the "
        "values alone, write inside torch.no_grad(). For gradients through the change, make the DTensor from a copy: "
        "DTensor.from_local(x.clone(), ...)"
    ) from None


def run_unknown(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run on gathered operands, through core. An operation in place copies its result back into the first operand."""
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        return _run_overload(func, args, kwargs)
    if kwargs.get("out") is not None:
        return _run_into(func, args, kwargs)
    name = getattr(func, "__name__", "")
    if name in ("__set__", "__delete__"):
        raise TypeError(f"this attribute of a distributed tensor cannot be changed ({func})")
    if name == "meshgrid" and func is not torch.meshgrid:  # torch.meshgrid finds no DTensors in a list
        return torch.meshgrid(*args[0], **kwargs)
    if name.endswith("_") and not name.endswith("__"):
        return _run_in_place(func, args, kwargs)
    return dispatch(None, func, args, kwargs)


def _run_into(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run ``func(..., out=x)`` and copy the result into ``x``, which keeps its layout. Optimizers make such calls."""
    rest = {name: value for name, value in kwargs.items() if name != "out"}
    out, result = kwargs["out"], func(*args, **rest)
    if not isinstance(out, (tuple, list)):
        return _copied_into(func, out, result)
    if not isinstance(result, (tuple, list)) or len(out) != len(result):
        raise TypeError(f"{name_of(func)}(out=...) needs one tensor for each result, got {len(out)}")
    for x, y in zip(out, result, strict=True):
        _check_fits(func, x, y)
    return type(out)([x.copy_(y) for x, y in zip(out, result, strict=True)])


def _copied_into(func: Any, out: Any, result: Any) -> Any:
    _check_fits(func, out, result)
    return out.copy_(result)


def _check_fits(func: Any, out: Any, result: Any) -> None:
    if not is_dtensor(out) or not is_dtensor(result):
        raise TypeError(
            f"{name_of(func)}(out=...) with distributed operands needs one distributed tensor for each result: use the "
            "value that the function returns"
        )
    if out.shape != result.shape:
        shapes = f"out has shape {tuple(out.shape)}, the result {tuple(result.shape)}"
        raise ValueError(f"{name_of(func)}(out=...): {shapes}")
    _check_cast(func, out, result)


def _run_in_place(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run the function that returns a new tensor, and copy its result into the first operand. If torch has no such
    function, run ``func`` on a gathered copy of the first operand."""
    x: Any = args[0] if args else None
    if not is_dtensor(x):
        raise TypeError(
            f"{func.__name__} would write a distributed result into a plain tensor: distribute the plain tensor first"
        )
    served = _served(func.__name__)
    if served is None:
        return x.copy_(dispatch(None, _out_of_place(func), args, kwargs))
    # Backward may need the value that is about to be overwritten.
    given = (x, *args[1:], *kwargs.values())
    kept = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in given)
    y = served(x.clone() if kept else x, *args[1:], **kwargs)
    if tuple(y.shape) != tuple(x.shape):
        raise RuntimeError(
            f"{func.__name__}: the result has shape {tuple(y.shape)}, and cannot replace {tuple(x.shape)}"
        )
    _check_cast(func, x, y)
    return x.copy_(y)


def _check_cast(func: Any, x: Any, y: Any) -> None:
    """Reject a result ``y`` whose dtype torch does not write into ``x``, such as a float into integers."""
    if not torch.can_cast(y.dtype, x.dtype):
        raise RuntimeError(f"{name_of(func)}: result type {y.dtype} can't be cast to the desired output type {x.dtype}")


@functools.cache
def _served(name: str) -> Callable | None:
    """Return the out-of-place version of the in-place function ``name``. Return None unless that version has a rule or
    a handler."""
    found = (getattr(owner, name.rstrip("_"), None) for owner in (Tensor, torch, torch.nn.functional, torch.special))
    return next((f for f in found if f is not None and f in State.table), None)


@functools.cache
def _out_of_place(func: Any) -> Callable:
    """Return a function that runs ``func`` on a copy. The new function is cached, because core warns once per function
    without a rule."""

    def out_of_place(x: Any, *args: Any, **kwargs: Any) -> Any:
        return func(x.clone(), *args, **kwargs)

    out_of_place.__name__ = func.__name__.rstrip("_")
    return out_of_place


def _run_overload(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an overload such as ``torch.ops.aten.add.Tensor(x, y)``, which must not silently compute on the local shards.

    Torch itself calls overloads on tensors saved for backward while a `TorchDispatchMode` is active (selective
    checkpointing, FLOP counters): these are local computations.
    """
    if in_dispatch_mode() and graph_task() != -1:
        with no_dispatch():
            return func(*args, **kwargs)
    if _schemas(func)[0].name.split("::")[0] in _COLLECTIVES:
        raise TypeError(
            f"{func} is a functional collective of torch, which returns a different plain tensor on each rank: pass "
            "x.to_local(), or use the functions of torch.distributed, which act on the local tensor in place"
        )
    if kwargs.get("out") is not None or any(s.is_mutable for s in _schemas(func)):
        raise TypeError(
            f"{func} writes into its operands and cannot be called on distributed tensors: call the torch function or "
            "tensor method, such as x.add_(y)"
        )
    return dispatch(None, func, args, kwargs)


def _schemas(func: Any) -> list[Any]:
    """Return the schemas of an overload.

    For a packet of overloads, the first overload decides whether the operation writes.
    """
    if isinstance(func, OpOverloadPacket):
        return [getattr(func, func.overloads()[0])._schema]
    return [func._schema]
