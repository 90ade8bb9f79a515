"""Dropout layers between the modules of a plan: on plain tensors, all ranks that share a model drop the same
elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import mindspore as ms
from mindspore import nn, ops

from hyper_parallel.platform.mindspore.basics.seeds import Stream, drop_channels
from hyper_parallel.platform.mindspore.tensors.tensor import InterceptedTensor, is_dispatching

__all__ = ["share_draws", "drops_apart"]


def _is_distributed(x: Any) -> bool:
    """Return whether the rule of dropout draws for ``x``."""
    return isinstance(x, InterceptedTensor) and is_dispatching()


# MindSpore finds the kernel of a primitive by the name of its class.
class Dropout(ops.Dropout):
    """Primitive of `nn.Dropout`. A primitive with seeds draws from a `Stream`. A primitive without seeds draws as
    `ops.dropout` does."""

    def __call__(self, x: Any) -> tuple[Any, Any]:
        if _is_distributed(x):
            return super().__call__(x)
        seeds = (self.Seed0, self.Seed1)
        if seeds == (0, 0):
            return ops.dropout(x, 1.0 - self.keep_prob, True), None
        stream = self.__dict__.get("_stream")
        if stream is None:
            stream = self.__dict__["_stream"] = Stream(self.keep_prob, seeds)
        return stream(x), None


class _OfChannels:
    """Dropout of entire channels, in place of a primitive's kernel."""

    keep_prob: float

    def __call__(self, x: Any) -> tuple[Any, Any]:
        kernel: Any = super()
        return kernel.__call__(x) if _is_distributed(x) else (drop_channels(x, 1.0 - self.keep_prob), None)


class Dropout2D(_OfChannels, ops.Dropout2D):
    """Primitive of `nn.Dropout2d`."""


class Dropout3D(_OfChannels, ops.Dropout3D):
    """Primitive of `nn.Dropout3d`."""


class Dropout1d(nn.Dropout1d):
    """`nn.Dropout1d`, which has no primitive."""

    _of_style = True

    def construct(self, x: Any) -> Any:
        if not self.training or self.prob == 0 or _is_distributed(x):
            return super().construct(x)
        return drop_channels(x, self.prob) if x.ndim == 3 else drop_channels(x.expand_dims(0), self.prob).squeeze(0)


#: Primitive of a layer -> the class that replaces it.
_IN_PLACE: dict[type, type] = {ops.Dropout: Dropout, ops.Dropout2D: Dropout2D, ops.Dropout3D: Dropout3D}


def drops_apart(cell: Any) -> bool:
    """Return whether ranks would drop different elements when ``cell`` runs in a graph, with MindSpore's random
    numbers."""
    if not cell.training or ms.get_context("device_target") != "CPU":
        return False
    rates = [1.0 - it.keep_prob for it in cell._primitives.values() if type(it) in _IN_PLACE.values()]
    return any(rates) or (type(cell) is Dropout1d and cell.prob > 0)


def share_draws(cells: Iterable[Any], share: Callable[[Any], Any]) -> None:
    """Let ``modules`` draw the same random numbers on all ranks of a group; see `DeviceRole.share_draws`."""
    found = []
    for cell in cells:
        if type(cell) is nn.Dropout1d:
            cell.__class__ = Dropout1d
        found += [(cell, name, it) for name, it in cell._primitives.items() if type(it) in _IN_PLACE]
    if found:
        seeds = share([(it.Seed0, it.Seed1) if type(it) is ops.Dropout else () for _, _, it in found])
        for (cell, name, it), own in zip(found, seeds, strict=True):
            cell.__setattr__(name, _IN_PLACE[type(it)](it.keep_prob, *own))
