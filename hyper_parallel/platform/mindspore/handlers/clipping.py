"""Gradient clipping by norm, and detection of infinities, which need the gradients of all ranks.

A DTensor has a layout. `LocalGradients` has the layouts of plain local gradients. A plain tensor that may have been
computed from a local gradient is rejected where its norm matters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Tensor, nn
from mindspore.ops.function.clip_func import _ClipByGlobalNorm

from hyper_parallel.platform.mindspore.basics.private import is_recording
from hyper_parallel.platform.mindspore.gradients.local_gradients import LocalGradients, layout_of_gradient
from hyper_parallel.platform.mindspore.tensors.tensor import InterceptedTensor, NoDispatch, is_dispatching

__all__ = ["clipping", "looking", "norm_of_all", "refuse_parts"]

#: Orders of norms that can be added up from shards. MindSpore adds powers of signed numbers, so for other orders the
#: sum of a shard may be negative, without a root.
_ORDERS = (1, 2, float("inf"))


def clipping(plain: Callable, *args: Any, name: str, place: int, **kwargs: Any) -> Any:
    """Call ``plain``, which clips the gradients in its argument ``place``.

    Local gradients are treated as shards. Errors name ``name``.
    """
    given = args[place] if len(args) > place else kwargs.get("x")
    tensors = [given] if isinstance(given, Tensor) else given
    if not is_dispatching() or not isinstance(tensors, (tuple, list)):
        return plain(*args, **kwargs)
    layouts = [_layout_of(t, name) for t in tensors]
    if all(layout is None for layout in layouts) and not any(isinstance(t, InterceptedTensor) for t in tensors):
        return plain(*args, **kwargs)
    # A tensor that is not distributed is replicated.
    own = [_own_layout(t) or known for t, known in zip(tensors, layouts, strict=True)]
    joined = InterceptedTensor._core.on_joined_meshes(own)
    whole = [_distributed(t, layout) for t, layout in zip(tensors, joined, strict=True)]
    argument: Any = whole[0] if isinstance(given, Tensor) else tuple(whole)
    if len(args) > place:
        args = (*args[:place], argument, *args[place + 1 :])
    else:
        kwargs["x"] = argument
    with InterceptedTensor._core.implicit_replication():
        clipped = plain(*args, **kwargs)
    if isinstance(given, Tensor):
        return _as_given(clipped, given, own[0], joined[0])
    parts = [_as_given(*each) for each in zip(clipped, tensors, own, joined, strict=True)]
    return tuple(parts) if isinstance(clipped, tuple) else parts


def norm_of_all(plain: Callable, x: Any, norm_type: Any) -> Any:
    """Replace the function that computes the norm for `ops.clip_by_norm`: one all-reduce for all gradients."""
    layouts = list(map(_own_layout, x))
    core = InterceptedTensor._core
    if (
        not is_dispatching()
        or is_recording()  # the norm may be differentiated
        or norm_type not in _ORDERS
        or len({t.dtype for t in x}) != 1
        or not any(layouts)
        or any(layout is not None and layout.cotangent is not layout for layout in layouts)
    ):
        return plain(x, norm_type)
    with NoDispatch():
        total, mesh = core.total_norm(x, layouts, norm_type, lambda some: plain(some, norm_type))
        # A plain number can be combined with DTensors of any mesh.
        alone = len({layout.mesh for layout in layouts if layout is not None}) == 1
        return core.replicated(total, mesh) if alone else total


def looking(plain: Callable, inputs: Any) -> Any:
    """Replace the function that checks whether all ``inputs`` are finite, so that all ranks get the same answer."""
    if not is_dispatching() or not isinstance(inputs, (tuple, list)):
        return plain(inputs)
    layouts = [_layout_of(t) for t in inputs]
    own = [_own_layout(t) or known for t, known in zip(inputs, layouts, strict=True)]
    joined = InterceptedTensor._core.on_joined_meshes(own)
    if all(layout is None for layout in layouts) and joined == own:
        return plain(inputs)
    whole = tuple(_distributed(t, layout) for t, layout in zip(inputs, joined, strict=True))
    with InterceptedTensor._core.implicit_replication():
        answer = plain(whole)
    return answer.full_tensor() if isinstance(answer, InterceptedTensor) else answer


def refuse_parts(cell: Any, given: Any) -> None:
    """Raise ValueError if a graph of ``cell`` clips gradients and would treat shards of gradients as full gradients."""
    if isinstance(cell, (_ClipByGlobalNorm, nn.ClipByNorm)):
        name = type(cell).__name__
        for tensor in given if isinstance(given, (tuple, list)) else [given]:
            if _layout_of(tensor, name) is not None:
                raise ValueError(f"{name} in graph mode got this rank's shard of a gradient: clip in PyNative mode")


def _layout_of(tensor: Any, name: str = "") -> Any:
    """Return the layout of the gradient that a plain tensor is a shard of, None for other tensors.

    Raises:
        ValueError: in a function called ``name``, for a tensor that may have been computed from such a shard.
    """
    if not isinstance(tensor, Tensor) or isinstance(tensor, InterceptedTensor):
        return None
    known, layout = layout_of_gradient(tensor)
    if known or is_recording():
        return layout
    layout = LocalGradients.could_have(tensor)
    if layout is not None and name:
        raise ValueError(
            f"{name} got a plain tensor of shape {tuple(tensor.shape)}, like this rank's shard of a gradient of shape "
            f"{tuple(layout.shape)}, placed {list(layout.placements)} on {layout.mesh}. MindSpore's own "
            "value_and_grad and grad return such shards, and each rank would clip by the norm of its shard. Use "
            "value_and_grad or grad of hyper_parallel.mindspore, which return DTensors, or clip the gradients before "
            "other computations with them"
        )
    return layout


def _own_layout(tensor: Any) -> Any:
    return tensor._layout if isinstance(tensor, InterceptedTensor) else None


def _distributed(tensor: Any, layout: Any) -> Any:
    """Return the tensor as a DTensor of ``layout``, which differs from the tensor's own layout in the mesh alone."""
    if layout is None or getattr(tensor, "_layout", None) is layout:
        return tensor
    platform = layout.mesh.platform
    with NoDispatch():
        return platform.wrap(platform.alias(tensor), layout)


def _as_given(clipped: Any, given: Any, layout: Any, joined: Any) -> Any:
    """Return the clipped gradient in the form and the layout of ``given``, which is plain or distributed."""
    if not isinstance(clipped, InterceptedTensor):
        return clipped
    if isinstance(given, InterceptedTensor):
        if joined is layout:
            return clipped
        return _distributed(clipped.redistribute(placements=joined.cotangent.placements), layout.cotangent)
    if layout is None:
        local, known = clipped.full_tensor(), layout_of_gradient(given)[0]
    else:
        local, known = clipped.redistribute(placements=joined.placements).to_local(), True
    if known:
        LocalGradients.mark_one(local, layout)
    return local
