"""The differentiable steps between placements on one mesh dimension, and the views that reduce gradients.

A step is a function of a local tensor. Its class defines the effect on local data (``forward``) and the step of the
cotangent (``back``). The latter is differentiable, so that gradients of gradients are right. All steps follow one
contract for the cotangent of a local tensor. For `Replicate` the cotangent is the full gradient, and for `Shard` a
shard of the gradient. For `Partial` the cotangent is the full gradient on each rank. The steps from and to shards are
in `shard_steps`.

====================  ====================  =========================  =======================
step                  in `STEPS`            placements                 forward
====================  ====================  =========================  =======================
`Gather`              ``gather``            Shard(d) -> Replicate      all-gather
`GatherForParts`      ``gather_for_parts``  the same, partial view     all-gather
`Slice`               ``slice``             Replicate -> Shard(d)      slice
`AllReduce`           ``sum``               Partial -> Replicate       all-reduce
`ReduceScatter`       ``scatter``           Partial -> Shard(d)        reduce-scatter
`AllToAll`            ``exchange``          Shard(a) -> Shard(b)       all-to-all
`OneSummand`          ``one_summand``       Replicate -> Partial       value on one rank
`SummandGradient`     ``summand_gradient``  a gradient, see there      identity
`IdentityReduceGrad`  ``read_for_parts``    partial-gradient view      identity
====================  ====================  =========================  =======================

`STEPS`, of `platform.contract.programs`, says the step of each cotangent, to these classes and to backends.

Frequent steps also have bound forms: functions of the tensor alone. They use `Platform.fast` to cost less, and give
equal results.

Source: the f, g and g-bar functions of Megatron-LM (Shoeybi et al. 2019; Korthikanti et al. 2022): f is
`IdentityReduceGrad`, g is `AllReduce`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from hyper_parallel.core.caches import Table
from hyper_parallel.core.communication import collectives
from hyper_parallel.core.communication.coalesce import BLOCKS
from hyper_parallel.core.communication.recorder import dim_name
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.placement_types import Partial, Replicate
from hyper_parallel.platform.contract import NOTHING_FASTER, Platform
from hyper_parallel.platform.contract.autograd import TensorFunction, named
from hyper_parallel.platform.contract.programs import STEPS

if TYPE_CHECKING:
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh


class Step(ABC):
    """A differentiable function of a local tensor. Steps are immutable.

    Args:
        platform: platform whose autograd records the step.
        where: the mesh dimension, for the name of the node in the graph: ``AllReduce_tp``.
    """

    #: The name in `STEPS`, if it is one of them.
    verb: ClassVar[str] = ""

    def __init__(self, platform: Platform, where: str = "") -> None:
        name = "_".join(filter(None, (type(self).__name__.strip("_"), where)))
        self.platform, self._take = platform, _FUNCTIONS[platform, name]

    def __call__(self, x: Any) -> Any:
        """Apply the step to ``x``. It is differentiable."""
        return self._take(x, self)

    @abstractmethod
    def forward(self, ctx: Any, x: Any) -> Any:
        """Apply the step to the data of ``x``, outside autograd. ``ctx`` saves values for `backward`."""

    @abstractmethod
    def backward(self, ctx: Any, g: Any) -> Any:
        """Return the cotangent of the step's input from the cotangent ``g`` of its output. It is differentiable."""


class _View(Step):
    """A step that returns the same data and changes the cotangent only."""

    def __call__(self, x: Any) -> Any:
        return self._take(x, self) if self.platform.requires_grad(x) else x

    def forward(self, ctx: Any, x: Any) -> Any:
        return x


class ConvertCotangent(_View):
    """Identity whose backward applies ``convert`` to the cotangent."""

    def __init__(self, platform: Platform, convert: TensorFunction) -> None:
        super().__init__(platform)
        self.convert = convert

    def backward(self, ctx: Any, g: Any) -> Any:
        return self.convert(g)


class IdentityReduceGrad(_View):
    """Identity whose backward all-reduces over ``mesh_dims``, for consumers whose cotangents are partial. Instances
    come from `identity_reduce_grad`."""

    verb = "read_for_parts"

    def __init__(self, mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> None:
        super().__init__(mesh.platform, "_".join(dim_name(mesh, d) for d in mesh_dims))
        self.mesh, self.mesh_dims = mesh, mesh_dims

    def backward(self, ctx: Any, g: Any) -> Any:
        for mesh_dim in self.mesh_dims:
            g = summation(self.mesh, mesh_dim)(g)
        return g

    @cached_property
    def of_parameter(self) -> TensorFunction:
        """The view as a function of a parameter, which supports `coalesce_gradients` (see `Platform.gradient_view`)."""
        platform, mesh, mesh_dims = self.platform, self.mesh, self.mesh_dims
        reducers = [collectives.bind_all_reduce(mesh, d) for d in mesh_dims]

        def reduce(x: Any, g: Any) -> Any:
            if platform.requires_grad(g):
                return self.backward(None, g)
            if BLOCKS and BLOCKS[-1].take(x, g, mesh, mesh_dims):
                return platform.zeros(platform.shape_of(g), g)
            g = platform.clone(g)
            for all_reduce in reducers:
                g = all_reduce(g)
            return g

        return platform.gradient_view(reduce, (mesh, mesh_dims))


#: By name in `STEPS`.
KINDS: dict[str, type[Move]] = {}


class Move(Step):
    """Step that changes the placement on one mesh dimension.

    Attributes:
        mesh, mesh_dim: the mesh dimension of the change.
        source, target: the placements before and after.
        source_sizes, target_sizes: for `Shard`, the number of elements of the sharded dimension on each rank of the
            mesh dimension; empty otherwise.
        layout: layout after the step, None for a step on a cotangent.
    """

    #: For the step of a cotangent: the placements before and after it, where its kind says them.
    starts: ClassVar[Any] = None
    ends: ClassVar[Any] = None

    def __init_subclass__(cls) -> None:
        if "verb" in vars(cls):
            KINDS[cls.verb] = cls

    def __init__(
        self,
        mesh: DeviceMesh,
        mesh_dim: int,
        source: Any,
        target: Any,
        source_sizes: tuple[int, ...] = (),
        target_sizes: tuple[int, ...] = (),
        layout: Layout | None = None,
    ) -> None:
        super().__init__(mesh.platform, dim_name(mesh, mesh_dim))
        self.mesh, self.mesh_dim, self.source, self.target, self.layout = mesh, mesh_dim, source, target, layout
        self.source_sizes, self.target_sizes, self.size = source_sizes, target_sizes, mesh.shape[mesh_dim]

    @cached_property
    def back(self) -> Step:
        """The step that converts the cotangent of the result into the cotangent of the input."""
        kind = KINDS[STEPS[self.verb].back]
        source, target = kind.starts or self.target, kind.ends or self.source
        return kind(self.mesh, self.mesh_dim, source, target, self.target_sizes, self.source_sizes)

    def move(self, x: Any) -> Any:
        """Apply the step to a DTensor and return a DTensor of `layout`. Call it under `Platform.no_dispatch`."""
        return self.platform.wrap(self(x), self.layout)

    def bind(self) -> TensorFunction:
        """Return the step as a function of the tensor alone, for frequent calls under `Platform.no_dispatch`."""
        return self

    def backward(self, ctx: Any, g: Any) -> Any:
        g = self.back(g)
        # A summand of a sum receives the full gradient, and a summand of an average 1/n of it.
        if self.source.is_partial("avg"):
            return g / self.size
        return g * self.size if self.target.is_partial("avg") else g


class AllReduce(Move):
    """Reduction of a sum or an average to a replicated tensor."""

    verb = "sum"

    @cached_property
    def back(self) -> Step:
        # A summand receives the full gradient, but each rank then uses it in a part of the computation. So the
        # cotangent of that gradient, in gradients of gradients, is a partial sum.
        return identity_reduce_grad(self.mesh, (self.mesh_dim,))

    def forward(self, ctx: Any, x: Any) -> Any:
        return collectives.all_reduce(self.platform.clone(x), self.mesh, self.mesh_dim, self.source.reduce_op)

    @cached_property
    def in_place(self) -> TensorFunction:
        """The all-reduce of a sum as a function that writes the result into its operand.

        No other code may refer to the operand. Backward of the operation that computed the operand must not need its
        value. On a platform with hooks, the function adds no node to the graph.
        """
        write, fast = collectives.bind_all_reduce(self.mesh, self.mesh_dim), self.platform.fast or NOTHING_FASTER
        in_place = _AllReduceInPlace(self.mesh, self.mesh_dim, self.source, self.target)
        return fast.in_place_step(write, self.back) or in_place


class _AllReduceInPlace(AllReduce):
    def forward(self, ctx: Any, x: Any) -> Any:
        return collectives.all_reduce(x, self.mesh, self.mesh_dim)


def differs(x: Any, y: Any) -> Any:
    """Return a mask that is true where ``x`` and ``y`` differ; NaN equals NaN."""
    return (x != y) & ((x == x) | (y == y))


class ReduceExtreme(AllReduce):
    """Reduction to the largest or the smallest of the ranks' elements. Elements that tie share the cotangent evenly, as
    in `amax` of one tensor."""

    def __call__(self, x: Any) -> Any:
        counts: list[Any] = []
        y = self._take(x, self, getattr(x, "_ties", None), counts)
        if counts and self.layout is not None and any(p.is_partial() for p in self.layout.placements):
            y._ties = counts[0]  # the reduction over another mesh dimension follows
        return y

    def forward(self, ctx: Any, x: Any, ties: Any = None, counts: Any = None) -> Any:
        platform, mesh, mesh_dim = self.platform, self.mesh, self.mesh_dim
        y = collectives.all_reduce_extreme(x, mesh, mesh_dim, self.source.reduce_op)
        if platform.is_floating_point(x):
            if ties is None:
                ties = platform.ones(platform.shape_of(x), x)
            chosen = platform.masked_fill(ties, differs(x, y), 0.0)
            count = collectives.all_reduce(platform.clone(chosen), mesh, mesh_dim)
            ctx.save_for_backward(chosen / count)
            counts.append(count)
        return y

    def backward(self, ctx: Any, g: Any) -> Any:
        return self.back(g) * ctx.saved_tensors[0]


class ReduceProduct(AllReduce):
    """Reduction to the product of the ranks' elements. Each rank's element receives the cotangent times the product of
    the other ranks' elements."""

    def forward(self, ctx: Any, x: Any) -> Any:
        platform, rank = self.platform, self.mesh.get_local_rank(self.mesh_dim)
        shape = tuple(platform.shape_of(x))
        column = x.reshape((1, *shape))
        everyone = collectives.bind_all_gather(self.mesh, self.mesh_dim, 0, (1,) * self.size)(column)
        parts = [part.reshape(shape) for part in platform.chunk(everyone, self.size, 0)]
        others = platform.ones(shape, x)
        for part in (*parts[:rank], *parts[rank + 1 :]):
            others = others * part
        ctx.save_for_backward(others)
        return others * parts[rank]

    def backward(self, ctx: Any, g: Any) -> Any:
        return g * ctx.saved_tensors[0]


class OneSummand(Move):
    """Conversion of a replicated tensor into a partial tensor. For a sum, one rank keeps the value, and the other ranks
    have zeros. For other reductions, all ranks keep the value."""

    verb = "one_summand"

    def forward(self, ctx: Any, x: Any) -> Any:
        if self.target.reduce_op != "sum" or self.mesh.get_local_rank(self.mesh_dim) == 0:
            return self.platform.clone(x)
        return self.platform.zeros(self.platform.shape_of(x), x)


class SummandGradient(_View, Move):
    """Conversion of the gradient of a partial tensor into the gradient of its replicated sum.

    In gradients of gradients, a value computed from the result counts once, not once per rank (see `AllReduce.back`).
    """

    verb = "summand_gradient"

    @property
    def back(self) -> Step:
        return one_summand(self.mesh, self.mesh_dim)

    def backward(self, ctx: Any, g: Any) -> Any:
        return self.back(g)


def _make_function(key: tuple[Platform, str]) -> Callable[..., Any]:
    """Return ``take(x, step, *more)``, which applies a step and records it under a name. ``more`` are arguments of
    `Step.forward`."""
    platform, name = key
    detach = platform.detach

    def forward(ctx: Any, x: Any, step: Step, *more: Any) -> Any:
        ctx.step = step
        return step.forward(ctx, detach(x), *more)

    return platform.autograd_function(named(name, forward), lambda ctx, g: ctx.step.backward(ctx, g))


_FUNCTIONS: Table = Table(_make_function)
#: (class, mesh, mesh dimension or dimensions, ...) -> the step.
_STEPS: Table = Table(lambda key: key[0](*key[1:]), 1 << 12, "steps of sums")


def summation(mesh: DeviceMesh, mesh_dim: int) -> AllReduce:
    """Return the cached step from ``Partial()`` to ``Replicate()`` on a mesh dimension."""
    return _STEPS[AllReduce, mesh, mesh_dim, Partial(), Replicate()]


def one_summand(mesh: DeviceMesh, mesh_dim: int) -> OneSummand:
    """Return the cached step from ``Replicate()`` to ``Partial()`` on a mesh dimension."""
    return _STEPS[OneSummand, mesh, mesh_dim, Replicate(), Partial()]


def identity_reduce_grad(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> IdentityReduceGrad:
    """Return the cached partial-gradient view over some mesh dimensions, Megatron's f."""
    return _STEPS[IdentityReduceGrad, mesh, mesh_dims]


def linear_key(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> Any:
    """Return the key of the view that a tensor caches for linear layers.

    Linear layers read this view in place of the view of `partial_grad_view`. The two views are equal, except that the
    view for linear layers may be 2-D, with the leading dimensions flattened.
    """
    return mesh, mesh_dims, "linear"


def to_owner(gradient: Any, layout: Layout) -> Any:
    """Return a local gradient converted to the gradient of a DTensor (see `platform.contract.Core.to_owner`).

    In gradients of gradients, a value computed from the result counts once, because it is equal on all ranks.
    """
    for mesh_dim in layout.summed_mesh_dims:
        gradient = one_summand(layout.mesh, mesh_dim).back(gradient)
    return gradient


def to_summands(gradient: Any, layout: Layout) -> Any:
    """Return a DTensor's gradient converted for its local partial tensors (see `platform.contract.Core.to_summands`).
    Each rank uses the converted gradient in a different computation."""
    dims = layout.summed_mesh_dims
    return identity_reduce_grad(layout.mesh, dims)(gradient) if dims else gradient
