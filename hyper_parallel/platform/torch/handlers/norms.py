"""Normalisation with statistics over the batch: those of the whole batch, wherever its samples are."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.platform.torch.op_table import OP_TABLE
from hyper_parallel.platform.torch.tensor import dispatch, handles, is_dtensor

__all__: list[str] = []

_HALVES = (torch.float16, torch.bfloat16)


@handles(torch.batch_norm)
def batch_norm(func: Any, args: tuple, kwargs: dict) -> Any:
    """With a batch that is not sharded, torch's kernel for each channel; otherwise from its mean and variance, of which
    each is one all-reduce of as many numbers as there are channels."""
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, training = given["input"], given["training"]
    if not training or not is_dtensor(x) or _is_whole_but_for_channels(x):
        return normalise(func, tuple(given[name] for name in names), {})
    return _over_the_mesh(x, *(given[name] for name in names[1:5]), given["momentum"], given["eps"])


@handles(torch.instance_norm)
def normalise(func: Any, args: tuple, kwargs: dict) -> Any:
    """By the row, which gives the running statistics as results instead of writing them."""
    results = dispatch(OP_TABLE[func], func, args, kwargs)
    if not isinstance(results, tuple):
        return results
    result, *statistics = results
    for running, new in zip(args[3:5], statistics, strict=True):
        _write(running, new)
    return result


def _is_whole_but_for_channels(x: Any) -> bool:
    return all(
        size == 1 or p.is_replicate() or p.is_shard(1)
        for size, p in zip(x.device_mesh.shape, x.placements, strict=True)
    )


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
                new = new.detach().reshape(-1).to(running.dtype) * scale
                _write(
                    running, running * (1 - momentum) + (new if is_dtensor(running) else new.full_tensor()) * momentum
                )
    return y.to(dtype)


def _reduced(x: Any) -> Any:
    """With partial sums reduced: they would be in each of the operations that follow."""
    if not any(p.is_partial() for p in x.placements):
        return x
    return x.redistribute(placements=x._layout.cotangent.placements)


def _write(running: Any, new: Any) -> None:
    with torch.no_grad():
        running.copy_(new if is_dtensor(running) or not is_dtensor(new) else new.full_tensor())
