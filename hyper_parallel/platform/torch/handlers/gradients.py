"""``.grad``, ``.data``, hooks and backward of DTensors.

A gradient has the layout of its tensor, with `Partial` replaced by `Replicate` (``layout.cotangent``). The engine works
on the local tensors: below Python, a DTensor is its local tensor. The engine runs with dispatch on, because hooks,
recomputation and user-defined autograd functions run inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch
from torch.autograd import graph

from hyper_parallel.platform.torch.basics.private import make_grads, run_engine
from hyper_parallel.platform.torch.basics.tensor import State, handles, is_dtensor, layout_of, replaces, wrap
from hyper_parallel.platform.torch.gradients.autograd import telling_engine
from hyper_parallel.platform.torch.op_table.binding import words

__all__ = ["FACTS", "forget_data", "take_memory"]

_run_engine = telling_engine(run_engine)


# ---------------------------------------------------------------------------------------------------- .grad and .data


@handles(Tensor.grad.__get__, Tensor._grad.__get__)
def get_grad(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the accumulated gradient, turned into a DTensor in place."""
    x = args[0]
    with no_dispatch():
        gradient = func(x)
        if gradient is None or is_dtensor(gradient):
            return gradient
        layout = x._layout
        if layout.summed_mesh_dims and gradient.requires_grad:
            # Made with create_graph=True. Stored, because x.grad is one object until more is accumulated.
            gradient = State.core.to_owner(gradient, layout)
            Tensor.grad.__set__(x, gradient)
    return wrap(gradient, layout.cotangent)


@handles(Tensor.grad.__set__, Tensor._grad.__set__)
def set_grad(func: Any, args: tuple, kwargs: dict) -> None:
    """Set a DTensor as gradient, redistributed to the layout of the tensor's gradients."""
    x, gradient = args
    if gradient is not None:
        if not isinstance(gradient, Tensor):
            raise TypeError(f"a gradient must be a tensor or None, got {type(gradient).__name__}")
        gradient = State.core.as_cotangent(gradient, x._layout, "a gradient")
    with no_dispatch():
        func(x, gradient)


@handles(Tensor.data.__set__)
def set_data(func: Any, args: tuple, kwargs: dict) -> None:
    """Replace data and layout of a DTensor, for ``x.data = other``."""
    x, value = args
    layout = layout_of(value)
    if layout is None:
        raise TypeError(
            "x.data = value needs a distributed value for a distributed x: make the value a DTensor with "
            "distribute_tensor or DTensor.from_local"
        )
    if x.is_leaf:
        get_grad(Tensor.grad.__get__, (x,), {})  # a gradient that was not read yet has the previous layout
    elif layout.cotangent is not x._layout.cotangent:
        raise ValueError(
            f"x.data = value, where autograd computed x, needs a value placed {list(x._layout.placements)} with shape "
            f"{tuple(x._layout.shape)}, got a value placed {list(layout.placements)} with shape "
            f"{tuple(layout.shape)}: redistribute the value first"
        )
    take_memory(x, value, func)


def take_memory(x: Any, other: Any, exchange: Callable[[Any, Any], Any]) -> None:
    """Let ``x`` leave its memory and take that of the DTensor ``other``, by ``exchange(x, other)`` on local tensors."""
    if x is not other:
        State.core.outdate_views(x)
    with no_dispatch():
        exchange(x, other)
    if x is not other:
        forget_data(x)
        x._layout, x._strides = other._layout, other._strides
        State.core.share_memory(other, x)


#: Attributes of a DTensor that depend on its data or shape.
FACTS = words("_cached _gathered _origin _summands _read_past _plain _family _strides _ties")


def forget_data(x: Any) -> None:
    """Discard values cached for the previous data or shape of ``x``. Also count the change, since torch does not count
    it."""
    for name in FACTS:
        x.__dict__.pop(name, None)
    x._writes += 1


# ---------------------------------------------------------------------------------------------------- backward


@replaces(Tensor.backward)
def tensor_backward(
    x: Any, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """Run ``x.backward(gradient, ...)``."""
    _run((x,), (gradient,), retain_graph, create_graph, inputs)


@replaces(torch.autograd.backward)
def autograd_backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """Run backward. Mirrors `torch.autograd.backward`."""
    tensors = _to_tuple(tensors)
    _run(tensors, _one_each(grad_tensors, tensors), retain_graph, create_graph, inputs)


def _run(
    tensors: tuple,
    gradients: tuple,
    retain_graph: Any,
    create_graph: bool,
    inputs: Any,
    allow_unreachable: bool = True,
    accumulate: bool = True,
) -> tuple:
    """Run the engine, which accumulates into ``.grad`` of all leaves or of ``inputs``, or returns the gradients of
    ``inputs``."""
    inputs = None if inputs is None else _to_tuple(inputs)
    for x in inputs or ():
        if is_dtensor(x) and x._read_past is not None:
            State.core.keep_gradient(x, "backward(inputs=...)" if accumulate else "autograd.grad()")
    if accumulate and inputs == ():
        raise RuntimeError("`inputs` argument to `backward()` cannot be empty.")
    roots = [_root(t, g) for t, g in zip(tensors, gradients, strict=True)]
    found = _run_engine(
        tuple([root for root, _ in roots]),
        tuple([cotangent for _, cotangent in roots]),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        inputs or (),
        allow_unreachable=allow_unreachable,
        accumulate_grad=accumulate,
    )
    if accumulate and State.core.moved_views:  # in place, into gradients whose views may be in use
        State.core.notice_writes()
    return found


@replaces(torch.autograd.grad)
def autograd_grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: Any = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple:
    """Return gradients. The gradient of a distributed input is a DTensor. Mirrors `torch.autograd.grad`."""
    if is_grads_batched:
        raise ValueError(
            "autograd.grad(is_grads_batched=True) is not supported with distributed tensors: call autograd.grad once "
            "for each of the grad_outputs, with retain_graph=True"
        )
    outputs, inputs = _to_tuple(outputs), _to_tuple(inputs)
    unused = materialize_grads if allow_unused is None else allow_unused
    results = _run(outputs, _one_each(grad_outputs, outputs), retain_graph, create_graph, inputs, unused, False)
    return tuple(_wrap_result(g, x, materialize_grads, create_graph) for g, x in zip(results, inputs, strict=True))


def _wrap_result(gradient: Any, x: Any, materialize: bool, create_graph: bool) -> Any:
    if gradient is None:
        return torch.zeros_like(x, requires_grad=create_graph) if materialize else None
    layout = layout_of(x)
    if layout is None:
        return gradient
    return State.core.for_user(gradient, layout)


def _root(x: Any, gradient: Any) -> tuple[Any, Any]:
    """Return the tensor at which backward starts for ``x``, and the local cotangent."""
    layout = x._layout if is_dtensor(x) else None
    if layout is None:
        if is_dtensor(gradient):
            raise TypeError("the gradient of a plain tensor must be plain: use gradient.full_tensor() or to_local()")
        return x, make_grads((x,), (gradient,), is_grads_batched=False)[0]
    if layout.cotangent is not layout:
        return _root_to_reduce(x, gradient)
    return x, _root_cotangent(x, gradient)


def _root_to_reduce(x: Any, gradient: Any) -> tuple[Any, Any]:
    """Return tensor and cotangent as `_root` does, for a tensor with a pending reduction."""
    layout = x._layout
    if any(p.is_partial() and p.reduce_op != "sum" for p in layout.placements):
        # Not every rank's value receives the full gradient: backward starts at the reduced tensor.
        with torch.enable_grad():
            x = x.redistribute(placements=list(layout.cotangent.placements))
        return x, _root_cotangent(x, gradient)
    cotangent = _root_cotangent(x, gradient)
    if cotangent is not None:
        with no_dispatch():
            cotangent = State.core.to_summands(cotangent, layout)
    return x, cotangent


def _root_cotangent(x: Any, gradient: Any) -> Any:
    """Return the local cotangent with which backward starts at the DTensor ``x``."""
    if gradient is not None:
        gradient = State.core.as_cotangent(gradient, x._layout, "the gradient passed to backward")
        with no_dispatch():
            return gradient.as_subclass(Tensor)
    if not x.requires_grad:
        return None
    if x.numel() != 1:
        raise RuntimeError(
            f"grad can be implicitly created only for scalar outputs, not for a tensor of shape {tuple(x.shape)}"
        )
    with no_dispatch():
        return torch.ones_like(x)


def _to_tuple(x: Any) -> tuple:
    if isinstance(x, Mapping):
        return tuple(x.values())
    return tuple(x) if isinstance(x, Sequence) and not isinstance(x, graph.GradientEdge) else (x,)


def _one_each(gradients: Any, tensors: tuple) -> tuple:
    return (None,) * len(tensors) if gradients is None else _to_tuple(gradients)
