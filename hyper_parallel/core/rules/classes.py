"""Tensors whose classes are sharded: this rank's classes, and the numbers that all ranks need of a sample.

That is the largest logit and the sum of the exponentials. They are computed outside autograd, in float32 for narrower
logits, and sums that are needed together travel in one all-reduce.

Source: Micikevicius et al. 2018 for the float32 sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.communication import collectives
from hyper_parallel.core.communication.transitions import identity_reduce_grad, summation
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.platform.contract import Platform


@dataclass(frozen=True)
class Classes:
    """The sharded class dimension of a tensor, as this rank sees it.

    Attributes:
        mesh: the mesh.
        mesh_dims: its dimensions that shard the classes.
        dim: the tensor dimension.
        total: the number of classes.
        offset: the first class of this rank.
        size: how many this rank has; may be 0.
        sample_count: how many samples this rank has; may be 0.
    """

    mesh: DeviceMesh
    mesh_dims: tuple[int, ...]
    dim: int
    total: int
    offset: int
    size: int
    sample_count: int

    @staticmethod
    def of(layout: Layout, dim: int) -> Classes | None:
        """Dimension ``dim`` of a tensor with ``layout``, None when each rank has all of it."""
        classes = Classes.along(layout, dim)
        return classes if classes.mesh_dims else None

    @staticmethod
    def along(layout: Layout, dim: int) -> Classes:
        """Dimension ``dim`` of a tensor with ``layout``, sharded or not."""
        return Classes(
            layout.mesh,
            tuple(d for d in layout.shard_mesh_dims(dim) if layout.mesh.shape[d] > 1),
            dim,
            layout.shape[dim],
            layout.local_offset[dim],
            layout.local_shape[dim],
            math.prod(n for d, n in enumerate(layout.local_shape) if d != dim),
        )


class ClassFunctions:
    """Functions on one platform that softmax and losses over sharded classes are made of.

    All methods take local tensors under `Platform.no_dispatch`.
    """

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        make = platform.autograd_function
        self._resize = make(self._resize_forward, self._resize_cotangent)
        self._noting = make(self._noting_forward, self._noting_cotangent)
        self._with_path = platform.joint_function(self._with_path_forward, self._with_path_cotangent)

    def summed(self, x: Any, classes: Classes) -> Any:
        """The sum of every rank's ``x`` over the ranks that share the classes; differentiable."""
        for mesh_dim in classes.mesh_dims:
            x = summation(classes.mesh, mesh_dim)(x)
        return x

    # ------------------------------------------------------------ statistics, outside autograd
    def _sums(self, parts: list[Any], classes: Classes) -> list[Any]:
        """The sums over ranks of several tensors, in one collective."""
        add_up = collectives.all_reduce_over
        return collectives.together(parts, self.platform, add_up, classes.mesh, classes.mesh_dims)

    def _largest(self, x: Any, classes: Classes) -> Any:
        largest = self.platform.clone(self.platform.amax(x, classes.dim))
        return collectives.all_reduce_over(largest, classes.mesh, classes.mesh_dims, "max")

    def _sums_of_exponentials(self, x: Any, classes: Classes, finite: bool = False) -> tuple[Any, Any]:
        """The largest element, and the sum of the exponentials of the others' distances to it. With ``finite``, an
        infinite largest element counts as 0, which gives the logarithm of the sum its limit."""
        platform, x = self.platform, self.platform.detach(x)
        largest = self._largest(x, classes)
        if finite:
            largest = platform.masked_fill(largest, (largest == math.inf) | (largest == -math.inf), 0.0)
        (sums,) = self._sums([platform.sum_along(platform.shifted_exp(x, largest), classes.dim)], classes)
        return largest, sums

    # ------------------------------------------------------------ in gradients
    def _full_sum(self, x: Any, classes: Classes) -> Any:
        """The sum over all classes, for use in this rank's part of the gradient."""
        total = self.summed(self.platform.sum_along(x, classes.dim), classes)
        return self._for_parts(total, classes)

    def _for_parts(self, x: Any, classes: Classes) -> Any:
        """A replicated ``x`` of which each rank uses its part: its own gradient is a sum over ranks."""
        return identity_reduce_grad(classes.mesh, classes.mesh_dims)(x)

    # ------------------------------------------------------------ ranks without classes
    def _with_a_class(self, x: Any, classes: Classes, dim: int | None = None, value: float = -math.inf) -> Any:
        """``x``; on a rank without classes one with ``value``, so that the rank takes part in every collective."""
        dim = classes.dim if dim is None else dim
        return x if self.platform.shape_of(x)[dim] else self._resize(x, dim, 1, value)

    # Functions of their own, because backends lose track of gradients without elements, and these may lead to
    # communication.
    def _resize_forward(self, ctx: Any, x: Any, dim: int, size: int, value: float) -> Any:
        """A tensor of ``value`` with ``size`` classes in place of ``x``, whose gradient is zero."""
        shape = list(self.platform.shape_of(x))
        ctx.dim, ctx.before, shape[dim] = dim, shape[dim], size
        y = self.platform.zeros(shape, x)
        return y + value if value else y

    def _resize_cotangent(self, ctx: Any, g: Any) -> Any:
        return self._resize(g, ctx.dim, ctx.before, 0.0)

    def _noting_forward(self, ctx: Any, y: Any, x: Any, without_samples: bool = False) -> Any:
        """``y``. Backward fails if ``x`` was written to in the meantime, as it does on ranks that have elements of
        ``x``: if only those failed, the others would wait for them."""
        ctx.save_for_backward(x)
        ctx.without_samples = without_samples
        return self.platform.detach(y)

    def _noting_cotangent(self, ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        # Ranks without classes compute as the others do, with a class of their own.
        return self._with_path(None, g, self.platform.to_dtype(x, g.dtype))[0] if ctx.without_samples else g

    def _with_path_forward(self, ctx: Any, static: Any, g: Any, x: Any) -> tuple[Any]:
        """``g``, with a path to ``x`` such as the gradient has on ranks with samples: gradients of gradients may
        communicate on the way."""
        ctx.like = self.platform.detach(x)
        return (g,)

    def _with_path_cotangent(self, ctx: Any, g: Any) -> tuple[Any, Any]:
        return g, self.platform.zeros(self.platform.shape_of(ctx.like), ctx.like)
