"""Optimizers on distributed parameters.

MindSpore's optimizers update each element independently, with few exceptions: these run compiled on the local tensors,
as fast as on plain tensors. `nn.AdaFactor`, and optimizers that are not MindSpore's own, are dispatched operation by
operation. MindSpore's other optimizers that are not element-wise are rejected: they have no kernel on CPU, so they
could not be tested.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from mindspore import Tensor, nn
from mindspore.communication import get_process_group_ranks

from hyper_parallel.platform.mindspore.basics.private import GlobalComm
from hyper_parallel.platform.mindspore.gradients.grad import wrap_gradients
from hyper_parallel.platform.mindspore.tensors.observation import watched_step
from hyper_parallel.platform.mindspore.tensors.tensor import InterceptedTensor, NoDispatch, is_dispatching

__all__ = ["checked_reducer", "optimizer_call", "run_compiled_step"]

#: Optimizers that use norms, means or factors of full parameters, which a rank with a shard does not have.
_NEED_WHOLE_PARAMETERS = ("Lamb", "LARS", "thor", "AdaSumByDeltaWeightWrapCell", "AdaSumByGradWrapCell")


def optimizer_call(original: Callable, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``__call__`` of MindSpore's two optimizer base classes."""
    return watched_step(partial(_step, original), optimizer, *args, **kwargs)


def _step(original: Callable, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    elementwise = _is_elementwise(optimizer)
    _check_means(optimizer)
    if is_dispatching():
        args = tuple(_placed_as_parameters(optimizer, arg) for arg in args)
        kwargs = {name: _placed_as_parameters(optimizer, arg) for name, arg in kwargs.items()}
    if elementwise:
        if is_dispatching():
            _check_state(optimizer)
        return _stepped_locally(original, optimizer, args, kwargs)
    if not is_dispatching() or not _sharded_parameters(optimizer):
        return original(optimizer, *args, **kwargs)
    args = tuple(_distributed_gradients(optimizer, arg) for arg in args)
    # State that an optimizer made itself is replicated, and so are learning rates.
    with InterceptedTensor._core.implicit_replication(), _written_in_operations(optimizer):
        return original(optimizer, *args, **kwargs)


def _stepped_locally(original: Callable, optimizer: Any, args: tuple, kwargs: dict) -> Any:
    """Step on the local tensors. Views that had to move data of parameters then follow the rules of core."""
    core, parameters = InterceptedTensor._core, optimizer.parameters if is_dispatching() else ()
    core.before_writes(parameters)
    with NoDispatch():
        result = original(optimizer, *args, **kwargs)
    core.notice_writes(parameters)
    return result


def _is_elementwise(optimizer: Any) -> bool:
    names = {c.__name__ for c in type(optimizer).__mro__}
    for name in _NEED_WHOLE_PARAMETERS:
        if name in names and (sharded := _sharded_parameters(optimizer)):
            p = sharded[0]
            raise TypeError(
                f"{type(optimizer).__name__} needs unsharded parameters, but {p.name!r} is placed "
                f"{list(p._layout.placements)}: use an element-wise optimizer, such as AdamWeightDecay, or AdaFactor"
            )
    if isinstance(optimizer, (nn.Adagrad, nn.AdamOffload)) or getattr(optimizer, "use_offload", False):
        _check_elements(optimizer)
    if "AdaFactor" in names:
        return not _sharded_parameters(optimizer)
    return inspect.unwrap(type(optimizer).construct).__module__.startswith("mindspore.")


def _check_elements(optimizer: Any) -> None:
    """Raise TypeError, on all ranks, if the optimizer's kernel fails because a rank has no elements."""
    for p in optimizer.get_parameters():
        layout = getattr(p, "_layout", None)
        if layout is not None and 0 in map(layout.smallest_part, range(layout.ndim)):
            raise TypeError(
                f"{type(optimizer).__name__} does not support parameters with empty shards, but {p.name!r}, of shape "
                f"{tuple(layout.shape)}, is placed {list(layout.placements)}: use another optimizer, such as Adam or "
                "AdamWeightDecay"
            )


def _check_means(optimizer: Any) -> None:
    """Raise TypeError for gradients that the optimizer centralises, if a rank holds a part of the mean's elements."""
    asked = getattr(optimizer, "grad_centralization_flags", ())
    for flag, p in zip(asked, optimizer.parameters if any(asked) else (), strict=False):
        layout: Any = getattr(p, "_layout", None)
        placements = () if layout is None or not flag else enumerate(layout.placements)
        if any(x.is_shard() and not x.is_shard(0) and layout.mesh.shape[d] > 1 for d, x in placements):
            raise TypeError(
                f"{type(optimizer).__name__} subtracts means over the last dimensions of gradients, but {p.name!r} is "
                f"placed {list(layout.placements)}, so each rank would take the mean of its shard: leave "
                "grad_centralization out, and subtract means of gradients of hyper_parallel.mindspore before the step"
            )


def _check_state(optimizer: Any) -> None:
    """Raise ValueError for optimizer state of the full shape, made before the parameter was sharded."""
    shapes = {p.name: p._layout for p in _sharded_parameters(optimizer)}
    for state in optimizer.get_parameters() if shapes else ():
        # Named after its kind and the parameter: "moment1.layers.0.weight".
        layout = shapes.get(state.name.partition(".")[2])
        if layout is None or layout.mesh.size() == 1:
            continue
        before = getattr(state, "_layout", None)
        if isinstance(state, InterceptedTensor) and (before is None or before.mesh is layout.mesh):
            continue
        # On another mesh: state of a tensor-parallel parameter that data parallelism has sharded further.
        if before is not None or tuple(state.shape) == tuple(layout.shape):
            raise ValueError(
                f"{type(optimizer).__name__} has the state {state.name!r}, of shape {tuple(layout.shape)}, but its "
                f"parameter was distributed afterwards, as {list(layout.placements)}: make the optimizer after "
                "parallelize_module and fully_shard"
            )


def _sharded_parameters(optimizer: Any) -> list[Any]:
    distributed = [p for p in optimizer.get_parameters() if getattr(p, "_layout", None) is not None]
    return [p for p in distributed if not p._layout.replicated]


def _placed_as_parameters(optimizer: Any, gradients: Any) -> Any:
    """Redistribute DTensors among the gradients to the placements of their parameters, if there is one for each
    parameter."""
    if not isinstance(gradients, (tuple, list)) or not any(isinstance(g, InterceptedTensor) for g in gradients):
        return gradients
    parameters = tuple(optimizer.parameters)
    if len(gradients) != len(parameters):
        return gradients
    return tuple(_placed_as(optimizer, g, p) for g, p in zip(gradients, parameters, strict=True))


def _placed_as(optimizer: Any, gradient: Any, parameter: Any) -> Any:
    if not isinstance(gradient, InterceptedTensor):
        return gradient
    layout, given = getattr(parameter, "_layout", None), gradient._layout
    if tuple(given.shape) != tuple(parameter.shape) or (layout is not None and given.mesh != layout.mesh):
        where = "on no mesh" if layout is None else f"on {layout.mesh}"
        raise ValueError(
            f"{type(optimizer).__name__} got a gradient of shape {tuple(given.shape)} on {given.mesh} for "
            f"{parameter.name!r}, of shape {tuple(parameter.shape)} {where}: pass one gradient for each parameter, in "
            "the order of the optimizer's parameters, each on the mesh of its parameter"
        )
    if layout is None:
        return gradient.full_tensor()
    wanted = layout.cotangent
    return gradient if given is wanted else gradient.redistribute(placements=wanted.placements)


def _distributed_gradients(optimizer: Any, gradients: Any) -> Any:
    """Turn plain local gradients, as MindSpore's own functions return them, into DTensors."""
    parameters = tuple(optimizer.parameters)
    if not isinstance(gradients, (tuple, list)):
        return gradients
    if len(gradients) != len(parameters):
        if any(type(g) is Tensor and g.ndim for g in gradients):
            # The parameter of a shard is unknown, and the shard would be taken for a full gradient.
            raise ValueError(
                f"{type(optimizer).__name__} has {len(parameters)} parameters but got {len(gradients)} plain tensors: "
                "pass one gradient for each parameter, in the order of its parameters, or DTensors"
            )
        return gradients
    return tuple(wrap_gradients(tuple(gradients), parameters))


@contextmanager
def _written_in_operations(optimizer: Any) -> Iterator[None]:
    """Disable the fused implementation of `nn.AdaFactor` inside this context: on CPU it is a single primitive for full
    parameters."""
    fused = getattr(optimizer, "use_fused_ada_factor", None)
    if fused:
        optimizer.use_fused_ada_factor = False
    try:
        yield
    finally:
        if fused:
            optimizer.use_fused_ada_factor = True


def checked_reducer(
    original: Callable,
    reducer: Any,
    parameters: Any,
    *args: Any,
    group: str = GlobalComm.WORLD_COMM_GROUP,
    **kwargs: Any,
) -> None:
    """Replace the constructor of `nn.DistributedGradReducer`, which MindSpore's mode "data_parallel" uses too.

    Raises:
        ValueError: on all ranks, for a distributed parameter whose mesh has several ranks of the group.
    """
    given = tuple(parameters)
    group, args = (args[3], args[:3]) if len(args) > 3 else (group, args)
    ranks = set(get_process_group_ranks(group))
    for p in given:
        mesh: Any = getattr(getattr(p, "_layout", None), "mesh", None)
        for d in range(0 if mesh is None else mesh.ndim):
            if len(ranks.intersection(mesh.ranks_along(d))) > 1:
                raise ValueError(
                    f"nn.DistributedGradReducer adds gradients of ranks {', '.join(map(str, sorted(ranks)))}, but "
                    f"{p.name!r} is placed {list(p._layout.placements)} on {mesh}: these ranks hold different shards "
                    "of its gradient, or a gradient that is reduced already. Leave the reducer out, call "
                    'mindspore.reset_auto_parallel_context() if parallel_mode is "data_parallel", or pass group= with '
                    "ranks that hold the same shard"
                )
    original(reducer, given, *args, group=group, **kwargs)


def run_compiled_step(original: Any, executor: Any, args: tuple, kwargs: dict) -> Any:
    """Run the compiled ``construct`` of one of MindSpore's optimizers while interception is on.

    For `nn.AdaFactor`, which runs operation by operation, the uncompiled function is called. Otherwise the caller is a
    subclass of an element-wise optimizer, by ``super().construct``, and the step runs on the local tensors.
    """
    if isinstance(executor.obj, nn.AdaFactor):
        return executor.fn(*args, **kwargs)
    with NoDispatch():
        return original(executor, *args, **kwargs)
