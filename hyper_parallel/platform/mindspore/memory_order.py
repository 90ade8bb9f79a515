"""Tensors whose memory order differs from the memory order of new tensors in MindSpore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor, mint

from hyper_parallel.platform.mindspore.basics.private import AutogradFunction, untracked
from hyper_parallel.platform.mindspore.processes.collectives import copied


class _WithStrides(AutogradFunction):
    """Change of memory order as one node, because MindSpore loses gradients of gradients through views of computed
    tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strides: tuple[int, ...], behind: bool) -> Tensor:
        return untracked(_with_strides(x, strides, behind))

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple:
        return cotangent, None, None


def with_strides(x: Tensor, strides: Sequence[int], behind: bool = False) -> Tensor:
    """Copy ``x`` to new memory with these strides; see `Platform.with_strides`."""
    return _WithStrides.apply(x, tuple(strides), behind)


def _with_strides(x: Tensor, strides: tuple[int, ...], behind: bool) -> Tensor:
    # New tensors are in row-major order, so dimensions are permuted, and gaps are filled with zeros and sliced off.
    order = tuple(sorted(range(x.ndim), key=lambda d: (-strides[d], -x.shape[d])))
    shape = [x.shape[d] for d in order]
    steps = [strides[d] for d in order]
    y = copied(mint.permute(x, order))
    if not steps or steps[-1] > 1:
        y, shape, steps = y.reshape((*shape, 1)), [*shape, 1], [*steps, 1]
    for at in range(1, len(steps)):
        wide = [*y.shape]
        wide[at] = steps[at - 1] // steps[at] - shape[at]
        if wide[at]:
            y = mint.cat((y, mint.zeros(wide, dtype=x.dtype)), at)
    if behind:
        y = mint.cat((mint.zeros((1, *y.shape[1:]), dtype=x.dtype), y), 0)
    for at, size in enumerate(shape):
        y = y if y.shape[at] == size else mint.narrow(y, at, y.shape[at] - size if at == 0 else 0, size)
    if len(shape) > x.ndim:
        y = mint.squeeze(y, -1)
    return mint.permute(y, tuple(sorted(range(x.ndim), key=order.__getitem__)))
