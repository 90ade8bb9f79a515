"""Tensors with sharded classes: the local classes, and statistics of each sample that all ranks need.

The statistics are the largest logit and the sum of the exponentials. They are computed outside autograd, in float32 for
narrower logits. Sums that are needed together share one all-reduce.

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
    """The sharded class dimension of a tensor, and the classes that this rank holds.

    Attributes:
        mesh: the mesh.
        mesh_dims: mesh dimensions that shard the classes.
        dim: the tensor dimension of the classes.
        total: the number of classes.
        offset: index of the first class of this rank.
        size: number of classes of this rank; may be 0.
        sample_count: number of samples of this rank; may be 0.
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
        """Return dimension ``dim`` of a tensor with ``layout``, or None if it is not sharded."""
        classes = Classes.along(layout, dim)
        return classes if classes.mesh_dims else None

    @staticmethod
    def along(layout: Layout, dim: int) -> Classes:
        """Return dimension ``dim`` of a tensor with ``layout``, sharded or not."""
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
    """Building blocks of softmax and losses over sharded classes, on one platform.

    All methods take local tensors under `Platform.no_dispatch`.
    """

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        make = platform.autograd_function
        self._resize = make(self._resize_forward, self._resize_cotangent)
        self._noting = make(self._noting_forward, self._noting_cotangent)
        self._with_path = platform.joint_function(self._with_path_forward, self._with_path_cotangent)

    def summed(self, x: Any, classes: Classes) -> Any:
        """Return the sum of every rank's ``x`` over the ranks that share the classes. It is differentiable."""
        for mesh_dim in classes.mesh_dims:
            x = summation(classes.mesh, mesh_dim)(x)
        return x

    # ------------------------------------------------------------ statistics, outside autograd
    def _sums(self, parts: list[Any], classes: Classes) -> list[Any]:
        """Return the sums over ranks of several tensors, by one collective."""
        add_up = collectives.all_reduce_over
        return collectives.together(parts, self.platform, add_up, classes.mesh, classes.mesh_dims)

    def _largest(self, x: Any, classes: Classes) -> Any:
        largest = self.platform.clone(self.platform.amax(x, classes.dim))
        return collectives.all_reduce_over(largest, classes.mesh, classes.mesh_dims, "max")

    def _sums_of_exponentials(self, x: Any, classes: Classes, finite: bool = False) -> tuple[Any, Any]:
        """Return the largest element, and the sum of exp(x - largest).

        With ``finite``, an infinite largest element is replaced by 0. The logarithm of the sum then has the right
        limit.
        """
        platform, x = self.platform, self.platform.detach(x)
        largest = self._largest(x, classes)
        if finite:
            largest = platform.masked_fill(largest, (largest == math.inf) | (largest == -math.inf), 0.0)
        (sums,) = self._sums([platform.sum_along(platform.shifted_exp(x, largest), classes.dim)], classes)
        return largest, sums

    # ------------------------------------------------------------ sums in gradients
    def _full_sum(self, x: Any, classes: Classes) -> Any:
        """Return the sum over all classes, for use in this rank's shard of the gradient."""
        total = self.summed(self.platform.sum_along(x, classes.dim), classes)
        return self._for_parts(total, classes)

    def _for_parts(self, x: Any, classes: Classes) -> Any:
        """Return the replicated ``x``, for a computation of this rank's shard only. So backward sums the gradient of
        ``x`` over ranks."""
        return identity_reduce_grad(classes.mesh, classes.mesh_dims)(x)

    # ------------------------------------------------------------ ranks without classes
    def _with_a_class(self, x: Any, classes: Classes, dim: int | None = None, value: float = -math.inf) -> Any:
        """Return ``x``, with at least one class on each rank.

        A rank without classes gets one class filled with ``value``, so that every rank takes part in each collective.
        """
        dim = classes.dim if dim is None else dim
        return x if self.platform.shape_of(x)[dim] else self._resize(x, dim, 1, value)

    # Separate autograd functions, because backends drop gradients of empty tensors, and these gradients may lead to
    # communication.
    def _resize_forward(self, ctx: Any, x: Any, dim: int, size: int, value: float) -> Any:
        """Return a tensor filled with ``value``, of the shape of ``x``, but with ``size`` classes.

        The gradient of ``x`` is zero.
        """
        shape = list(self.platform.shape_of(x))
        ctx.dim, ctx.before, shape[dim] = dim, shape[dim], size
        y = self.platform.zeros(shape, x)
        return y + value if value else y

    def _resize_cotangent(self, ctx: Any, g: Any) -> Any:
        return self._resize(g, ctx.dim, ctx.before, 0.0)

    def _noting_forward(self, ctx: Any, y: Any, x: Any, without_samples: bool = False) -> Any:
        """Return ``y``, and make backward fail on all ranks if ``x`` was written to after forward.

        The framework makes only ranks with elements of ``x`` fail. The other ranks would then wait in a collective.
        """
        ctx.save_for_backward(x)
        ctx.without_samples = without_samples
        return self.platform.detach(y)

    def _noting_cotangent(self, ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        # Ranks without classes compute like the others, with a filler class.
        return self._with_path(None, g, self.platform.to_dtype(x, g.dtype))[0] if ctx.without_samples else g

    def _with_path_forward(self, ctx: Any, static: Any, g: Any, x: Any) -> tuple[Any]:
        """Return ``g``, and record in the graph that ``g`` also depends on ``x``, as on ranks with samples.

        Gradients of gradients may communicate along this path, so all ranks need it.
        """
        ctx.like = self.platform.detach(x)
        return (g,)

    def _with_path_cotangent(self, ctx: Any, g: Any) -> tuple[Any, Any]:
        return g, self.platform.zeros(self.platform.shape_of(ctx.like), ctx.like)
