"""Normalisation over the batch, with the statistics of the global batch for any sharding."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.torch.basics.tensor import State, dispatch, handles, is_dtensor
from hyper_parallel.platform.torch.op_table import OP_TABLE

__all__: list[str] = []

_HALVES = (torch.float16, torch.bfloat16)


#: Argument names of torch's functions; `instance_norm` has one other name.
_NAMES = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled")


def _arguments(args: tuple, kwargs: dict) -> dict[str, Any]:
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    return {**given, "training": given.pop("use_input_stats", given.get("training"))}


@handles(torch.batch_norm)
def batch_norm(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run torch's kernel if the batch is unsharded. Otherwise compose the norm from mean and variance. Each takes one
    all-reduce with one number per channel."""
    given = _arguments(args, kwargs)
    x = given["input"]
    if not given["training"] or not is_dtensor(x) or _is_whole_but_for_channels(x):
        return _by_row(func, given)
    _check(func, given)
    return _over_the_mesh(*(given[name] for name in (*_NAMES[:5], "momentum", "eps")))


@handles(torch.instance_norm)
def instance_norm(func: Any, args: tuple, kwargs: dict) -> Any:
    """Normalise each sample and channel separately. The running statistics are means over the samples."""
    given = _arguments(args, kwargs)
    x, running = given["input"], (given["running_mean"], given["running_var"])
    if not given["training"] or running[0] is None or running[1] is None or not is_dtensor(x) or x.dim() < 3:
        return _by_row(func, given)
    _check(func, given)
    y = _by_row(func, {**given, "running_mean": None, "running_var": None})
    with torch.no_grad():
        values, dims = x.float() if x.dtype in _HALVES else x, list(range(2, x.dim()))
        for old, new in zip(running, (values.mean(dims), values.var(dims)), strict=True):
            _move(old, _reduced(new.mean(0)), given["momentum"])
    return y


def _by_row(func: Any, given: dict[str, Any]) -> Any:
    """Run the op table's operation, which returns the running statistics instead of writing them.

    Plain statistics are assumed to be the same on all ranks.
    """
    _check(func, given)
    mesh = next(x.device_mesh for x in given.values() if is_dtensor(x))
    running = ("running_mean", "running_var")
    whole = {name: _distributed(given[name], mesh) for name in running}
    results = dispatch(OP_TABLE[func], func, tuple({**given, **whole}[name] for name in _NAMES), {})
    if not isinstance(results, tuple):
        return results
    result, *statistics = results
    for name, new in zip(running, statistics, strict=True):
        _write(given[name], new)
    return result


def _distributed(running: Any, mesh: Any) -> Any:
    if running is None or is_dtensor(running):
        return running
    with no_dispatch():
        return State.core.replicated(running.detach(), mesh)


def _check(func: Any, given: dict[str, Any]) -> None:
    for name in ("running_mean", "running_var"):
        running = given[name]
        if given["training"] and is_dtensor(running) and any(p.is_partial() for p in running.placements):
            raise ValueError(
                f"{func.__name__} writes in place into {State.core.owner_of(running) or name}, placed "
                f"{list(running.placements)}, which is not supported: redistribute it to Replicate() first"
            )


def _is_whole_but_for_channels(x: Any) -> bool:
    return all(p.is_replicate() or p.is_shard(1) for p in x.placements)


def _over_the_mesh(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> Any:
    dtype = x.dtype
    if dtype in _HALVES:
        x = x.float()
    x = _reduced(x)
    dims = [d for d in range(x.dim()) if d != 1]
    mean = _reduced(x.mean(dims, keepdim=True))
    centred = x - mean
    var = _reduced(centred.square().mean(dims, keepdim=True))
    y = centred * torch.rsqrt(var + eps)
    channels = tuple(-1 if d == 1 else 1 for d in range(x.dim()))
    if weight is not None:
        y = y * weight.view(channels)
    if bias is not None:
        y = y + bias.view(channels)
    count = x.numel() // x.shape[1]
    with torch.no_grad():
        for running, new, scale in ((running_mean, mean, 1.0), (running_var, var, count / max(count - 1, 1))):
            if running is not None:
                _move(running, new.detach().reshape(-1) * scale, momentum)
    return y.to(dtype)


def _reduced(x: Any) -> Any:
    """Reduce partial sums now, so that following operations do not each reduce them again."""
    if not any(p.is_partial() for p in x.placements):
        return x
    return x.redistribute(placements=x._layout.cotangent.placements)


def _move(running: Any, new: Any, momentum: float) -> None:
    """Update a running statistic with a new value, which is distributed."""
    new = new.to(running.dtype)
    _write(running, running * (1 - momentum) + (new if is_dtensor(running) else new.full_tensor()) * momentum)


def _write(running: Any, new: Any) -> None:
    with torch.no_grad():
        running.copy_(new if is_dtensor(running) or not is_dtensor(new) else new.full_tensor())
