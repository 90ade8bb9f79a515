"""Functions of torch, other than attention, that mix positions; and the lengths of the mixed dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["MIXING"]

Lengths = Callable[..., Sequence[int]]


def _along(input: Any, dim: Any = -1, *_: Any, **__: Any) -> Sequence[int]:
    """Return the lengths of one or several dimensions."""
    dims = (dim,) if isinstance(dim, int) else dim if isinstance(dim, (tuple, list)) else ()
    return [input.shape[d] for d in dims if isinstance(d, int)]


def _mean(input: Any, dim: Any = None, *args: Any, **_: Any) -> Sequence[int]:
    """Return the lengths of the reduced dimensions, except the last dimension.

    Norms average over the last dimension, which holds features. Losses have no such dimension.
    """
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    return _along(input, [d for d in dims if d not in (None, -1, input.ndim - 1)]) if input.ndim > 2 else ()


def _flip(input: Any, *dims: Any, **named: Any) -> Sequence[int]:
    return _along(input, dims[0] if dims and not isinstance(dims[0], int) else dims or named["dims"])


def _roll(input: Any, shifts: Any, dims: Any = (), **_: Any) -> Sequence[int]:
    return _along(input, dims) if dims not in ((), None) else tuple(input.shape)


def _convolution(input: Any, weight: Any, *_: Any, **__: Any) -> Sequence[int]:
    kernel = weight.shape[2:]
    return [n for n, k in zip(input.shape[-len(kernel) :], kernel, strict=True) if k > 1]


def _behind_channels(input: Any, *_: Any, **__: Any) -> Sequence[int]:
    return tuple(input.shape[2:])


def _batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    **_: Any,
) -> Sequence[int]:
    return tuple(input.shape[2:]) if training else ()


def _scores(input: Any, dim: Any = None, *_: Any, **__: Any) -> Sequence[int]:
    """Return the number of positions if the input is a matrix of attention scores, which is square.

    Three dimensions do not count, because they may be logits with as many classes as positions.
    """
    square = input.ndim > 3 and dim in (-1, input.ndim - 1) and input.shape[-1] == input.shape[-2]
    return (input.shape[-1],) if square else ()


def _recurrent(input: Any, *_: Any) -> Sequence[int]:
    return tuple(input.shape[:-1])


#: function -> (its name, lengths of the dimensions that a call mixes).
MIXING: dict[Any, tuple[str, Lengths]] = {
    **{getattr(torch, name): (name, _convolution) for name in ("conv1d", "conv2d", "conv3d")},
    **{getattr(torch, f"conv_transpose{n}d"): (f"conv_transpose{n}d", _convolution) for n in (1, 2, 3)},
    **{getattr(torch, name): (name, _recurrent) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **{
        getattr(home, name): (name, _along)
        for name in ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
        for home in (torch, torch.Tensor)
    },
    **{home.mean: ("mean", _mean) for home in (torch, torch.Tensor)},
    **{home.flip: ("flip", _flip) for home in (torch, torch.Tensor)},
    **{home.roll: ("roll", _roll) for home in (torch, torch.Tensor)},
    **{home.softmax: ("softmax", _scores) for home in (torch, torch.Tensor, F)},
    **{getattr(F, f"{kind}_pool1d"): (f"{kind}_pool1d", _behind_channels) for kind in ("avg", "max")},
    F.batch_norm: ("batch_norm", _batch_norm),
    F.instance_norm: ("instance_norm", _behind_channels),
    F.group_norm: ("group_norm", _behind_channels),
}
