"""DTensor: a tensor with a global shape, distributed over a mesh. Mirrors ``torch.distributed.tensor.DTensor``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.caches import Cache
from hyper_parallel.core.communication.host_reads import read_by_all
from hyper_parallel.core.communication.parts import check_parts, even_global_shape, is_wrong_on_a_rank, misfit_of
from hyper_parallel.core.communication.rank_check import check_replicated
from hyper_parallel.core.communication.recorder import watch_as_told
from hyper_parallel.core.communication.redistribute import partial_grad_view, redistribute, redistribute_local
from hyper_parallel.core.communication.transitions import ConvertCotangent, to_owner, to_summands
from hyper_parallel.core.dtensor.redistribution import redistribute_as, redistribute_over
from hyper_parallel.core.dtensor.services import Services
from hyper_parallel.core.layouts.layout import Layout, get_layout, normalize_placements, requested_layout
from hyper_parallel.core.layouts.placement_types import Partial, Placement, Replicate, own_placements
from hyper_parallel.core.mesh.device_mesh import DeviceMesh, resolve_mesh
from hyper_parallel.core.mesh.first_use import FIRST_USE
from hyper_parallel.core.observers import CHECKS
from hyper_parallel.core.operations.operands import DTENSOR_CLASSES
from hyper_parallel.core.operations.views import CurrentLayout
from hyper_parallel.core.plain_code.following import FOLLOWING
from hyper_parallel.platform import Platform

_GIVEN = "the local tensor given to DTensor.from_local"
_BOUND: dict[Platform, type] = {}
#: Cache for `DTensor.redistribute`: (layout, placements) -> target layout.
_TARGETS: dict[tuple[Layout, tuple[Placement, ...]], Layout] = Cache(1 << 14, "targets of redistribute")
#: Cache for `DTensor.from_local` with equal shards: (mesh, placements, local shape) -> layout.
_EVEN_LAYOUTS: dict[tuple[DeviceMesh, tuple[Placement, ...], tuple[int, ...]], Layout] = Cache(
    1 << 14, "layouts of equal shards"
)


class DTensor:
    """A distributed tensor. It is also a tensor of the framework, and its shape is the global shape.

    Operations run on this rank's local tensor, with the communication that their sharding rules require. The local
    tensor is part of the framework's autograd graph. The gradient of a DTensor is a DTensor with the same placements,
    but with `Replicate` for `Partial`. Instances come from `from_local`, `distribute_tensor`, factories and operations.

    Example:
        >>> from hyper_parallel import DTensor, Shard, init_device_mesh
        >>> import torch
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]).shape
        torch.Size([2, 3])
    """

    __slots__ = ()

    #: Layout of the instance; None on the class. Access raises if the instance is a stale view.
    _layout: Any = CurrentLayout()
    #: The tensors that share memory with the instance, after a view of it was created (see `views`).
    _family: Any = None
    #: Strides of the tensor on a single device, where local strides do not determine them; None if contiguous.
    _strides: Any = None
    #: Set on the result of an all-gather: (source DTensor, step, gathered data, number of writes to the source,
    #: partial-gradient view or None, version of the instance). Partial-gradient views are functions of the source.
    _gathered: Any = None
    #: The plain tensor that `from_local` was called with. It caches partial-gradient views for several modules.
    _origin: Any = None
    #: Set on an instance whose gradient stays partial over some mesh dimensions: (these, ``make``, its version).
    #: ``make(mesh_dims)`` returns its local tensor for consumers whose cotangent is partial over ``mesh_dims``.
    _summands: Any = None
    #: Version of the instance whose gradient is incomplete, because an operation has read past it (see `read_past`).
    _read_past: Any = None
    #: Number of local elements that tie for the extreme value, where the reduction over ranks is pending.
    _ties: Any = None
    #: ``_collect(cotangent, mesh, mesh_dims)`` of a parameter of `fully_shard`, inside `coalesce_gradients`: accepts a
    #: cotangent that must still be summed over these mesh dimensions.
    _collect: Any = None
    #: Number of in-place writes to the instance that dispatch has run.
    _writes: int = 0

    @staticmethod
    def from_local(
        local_tensor: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> Any:
        """Return a DTensor of each rank's local tensor. It is differentiable. If neither ``run_check`` nor ``shape`` is
        passed, forward and backward do not communicate.

        Args:
            local_tensor: plain tensor, this rank's shard. It is copied to the mesh's device if necessary.
            device_mesh: the mesh; None for the mesh entered with ``with mesh:``.
            placements: one for each mesh dimension; None is `Replicate` everywhere.
            run_check: whether to compare shapes, dtypes and replicated data over the ranks. If they differ, all ranks
                raise.
            shape: global shape, required for uneven shards. Without it, all shards are assumed to have equal sizes.
                With it, ranks compare their shards in one small all-gather, and all raise if one does not fit.
            stride: accepted because torch has it, and ignored. Strides follow from the local tensor.
            grad_placements: placements of the gradient of ``local_tensor``; by default ``placements``, with `Replicate`
                for `Partial`. With ``[Partial()]`` for a `Replicate`, each rank keeps its local summand, without
                communication.

        Raises:
            TypeError: when ``local_tensor`` is not a plain tensor.
            ValueError: for wrong placements, a ``shape`` that ``local_tensor`` does not fit, or, with ``run_check``,
                ranks that differ.
        """
        mesh = resolve_mesh(device_mesh, "DTensor.from_local")
        platform = bind_platform(mesh.platform)
        if not platform.is_tensor(local_tensor) or isinstance(local_tensor, DTensor):
            raise TypeError(
                f"DTensor.from_local takes a plain tensor of the platform, got {type(local_tensor).__name__}"
            )
        local_tensor = platform.to_device(local_tensor)
        local_shape = tuple(platform.shape_of(local_tensor))
        key: Any = None
        if shape is None and not run_check and isinstance(placements, (tuple, list)):
            key = (mesh, tuple(placements), local_shape)
        layout = None if key is None else _EVEN_LAYOUTS.get(key)
        if layout is None:
            normal = normalize_placements(placements, mesh, len(local_shape), f"a tensor of local shape {local_shape}")
            whole = even_global_shape(local_shape, normal, mesh) if shape is None else tuple(shape)
            layout = get_layout(mesh, normal, whole)
            misfit = misfit_of(layout, local_shape)
            if mesh.get_coordinate() is not None and (
                run_check or (shape is not None and is_wrong_on_a_rank(layout, str(local_tensor.dtype), bool(misfit)))
            ):
                check_parts(local_tensor, layout, misfit, _GIVEN)
            if misfit is not None:
                raise ValueError(misfit)
            if key is not None:
                _EVEN_LAYOUTS[mesh, own_placements(placements), local_shape] = layout
        if FOLLOWING and grad_placements is None:
            FOLLOWING[-1].taken(local_tensor, layout)
        if CHECKS or mesh._coordinate is None or layout.summed_mesh_dims or grad_placements is not None:
            return _made_of(local_tensor, layout, grad_placements)
        with platform.no_dispatch():
            x = platform.wrap(platform.alias(local_tensor), layout)
            if platform.requires_grad(local_tensor):
                x._origin = local_tensor
            return x

    @staticmethod
    def _of_part(local: Any, layout: Layout) -> Any:
        """Return `from_local` of a shard that is known to have ``layout``. Ranks do not compare their shards.

        Raises:
            ValueError: on a rank whose shard has another shape.
        """
        platform = bind_platform(layout.mesh.platform)
        local = platform.to_device(local)
        misfit = misfit_of(layout, tuple(platform.shape_of(local)))
        if misfit is not None:
            raise ValueError(misfit)
        if FOLLOWING:
            FOLLOWING[-1].taken(local, layout)
        return _made_of(local, layout, None)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Any:
        """Return this rank's shard, as a plain tensor of the local shape. The conversion is differentiable, and does
        not communicate in forward.

        Args:
            grad_placements: placements of the gradient of the plain tensor. The default is the full gradient for
                `Replicate` and `Partial`, and its shard for `Shard`. Pass ``[Partial()]`` for a `Replicate` if each
                rank computes only a summand of the gradient.
        """
        layout: Layout = self._layout
        platform = layout.mesh.platform
        with platform.no_dispatch():
            if grad_placements is None:
                local = platform.alias(_for_summands(self, layout, to_summands) if layout.summed_mesh_dims else self)
                if FOLLOWING:
                    FOLLOWING[-1].given(local, layout)
                return local
            given = requested_layout(layout.mesh, grad_placements, layout.shape, "the gradient")
            partial = tuple(
                i
                for i, (g, p) in enumerate(zip(given.placements, layout.placements, strict=True))
                if g is Partial() and p is Replicate()
            )
            local = partial_grad_view(self, partial) if partial else self
            if layout.summed_mesh_dims:
                local = _for_summands(local, layout, to_summands)
            rest = layout.with_placements([Replicate() if i in partial else g for i, g in enumerate(given.placements)])
            local = platform.alias(_with_cotangent(local, rest, layout.cotangent))
            if FOLLOWING:
                FOLLOWING[-1].given(local, layout, partial)
            return local

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: Any = None,
        backward_dtype: Any = None,
    ) -> Any:
        """Return the tensor with other placements, by the cheapest sequence of collectives. It is differentiable.

        Args:
            device_mesh: None or the mesh of the tensor, or another mesh of the same ranks.
            placements: one for each mesh dimension; None is `Replicate` everywhere.
            async_op: whether to return while the last collective is pending. The first use of the result waits for it.
                The result is complete at once if shards differ in size, or the backend has no asynchronous collectives.
            forward_dtype: dtype of the communication and of the result; None for the dtype of the tensor.
            backward_dtype: dtype of the communication of the gradient; None for the dtype of the tensor. The gradient
                itself has the dtype of the tensor.

        Returns:
            A DTensor with new memory, or this DTensor if its layout does not change.

        Raises:
            ValueError: for a mesh of other ranks, wrong placements, or a `Partial` that the tensor does not have; for
                ``async_op`` or dtypes with another mesh.
        """
        layout: Layout = self._layout
        if device_mesh is not None and device_mesh is not layout.mesh:
            mesh = resolve_mesh(device_mesh, "redistribute")
            if async_op or forward_dtype is not None or backward_dtype is not None:
                raise ValueError(
                    f"redistribute to another mesh, {mesh}, does not support async_op, forward_dtype and "
                    "backward_dtype: use these options in a separate redistribute on the tensor's own mesh"
                )
            return redistribute_over(self, mesh, placements)
        key: Any = (layout, tuple(placements) if type(placements) is list else placements)
        target = _TARGETS.get(key) if type(key[1]) is tuple else None
        if target is None:
            target = _target_layout(layout, placements)
            _TARGETS[layout, target.placements if key[1] is None else own_placements(key[1])] = target
        if async_op or forward_dtype is not None or backward_dtype is not None:
            return redistribute_as(self, target, async_op, forward_dtype, backward_dtype)
        if target is layout:
            return self
        platform = layout.mesh.platform
        with platform.no_dispatch():
            if layout.mesh._coordinate is None:  # the local tensor is empty for all placements
                return platform.wrap(platform.alias(self), target)
            y = redistribute(self, target)
            # The result must have new memory, also on a mesh dimension of one rank.
            alias = 1 in layout.mesh.shape and platform.same_memory(self, y)
            return platform.wrap(platform.clone(y), target) if alias else y

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Any:
        """Return the full tensor, as a plain tensor of the global shape on every rank of the mesh. It is
        differentiable. It gathers sharded dimensions and reduces partial values. All ranks of the mesh must call it.

        Args:
            grad_placements: placements of the gradient of the full tensor, as in `to_local`.

        Raises:
            ValueError: on a rank outside the mesh.
        """
        return self._read_whole("full_tensor()", grad_placements)

    def _read_whole(self, what: str, grad_placements: Sequence[Placement] | None = None) -> Any:
        self._layout.mesh.require_member(what)
        whole = read_by_all(what, self._layout, lambda: self.redistribute(placements=None))
        return whole.to_local(grad_placements=grad_placements)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh dimension."""
        return self._layout.placements

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh."""
        return self._layout.mesh

    @property
    def _local_tensor(self) -> Any:
        """This rank's shard as a plain tensor that shares its memory, without gradients, as torch's attribute of this
        name. `to_local` is differentiable."""
        platform = self._layout.mesh.platform
        with platform.no_dispatch():
            return platform.detach(self)

    def __repr__(self) -> str:
        layout: Layout = self._layout
        platform = layout.mesh.platform
        with platform.no_dispatch():
            local = platform.detach(self)
            return (
                f"DTensor(local_tensor={local}, shape={tuple(layout.shape)}, placements={list(layout.placements)}, "
                f"device_mesh={layout.mesh})"
            )


def bind_platform(platform: Platform) -> Platform:
    """Create the DTensor class of ``platform`` if it does not exist, and return ``platform``."""
    if platform not in _BOUND:
        with FIRST_USE:
            if platform not in _BOUND:  # another thread may have done it meanwhile
                watch_as_told()
                cls = platform.make_dtensor_class(DTensor, _SERVICES)
                DTENSOR_CLASSES.update((cls, *cls.__subclasses__()))  # a platform may have a subclass for parameters
                _BOUND[platform] = cls
    return platform


def restore(rebuild: Callable[..., Any], layout: Layout, coordinate: tuple[int, ...] | None, *parts: Any) -> Any:
    """Return an unpickled DTensor. The process may not have created a DTensor yet.

    Args:
        rebuild: the backend's ``rebuild(layout, *parts)``, which creates the DTensor.
        layout: layout of the DTensor.
        coordinate: coordinate in the mesh of the rank that pickled the DTensor.
        parts: the local tensor and other values that the backend saved.

    Raises:
        RuntimeError: when a rank with another shard pickled the DTensor.
    """
    mesh = layout.mesh
    here = mesh.get_coordinate()
    for mesh_dim, placement in enumerate(layout.placements):
        if coordinate is None or placement.is_replicate() or (here and here[mesh_dim] == coordinate[mesh_dim]):
            continue
        raise RuntimeError(
            f"a distributed tensor of shape {tuple(layout.shape)} placed {list(layout.placements)} was saved by the "
            f"rank at coordinate {coordinate} of {mesh}, but this rank is at {here} and has another shard along mesh "
            f"dimension {mesh.dim_label(mesh_dim)}. Load the file of this rank, or save full_tensor(), which all "
            "ranks must call"
        )
    bind_platform(mesh.platform)
    return rebuild(layout, *parts)


_SERVICES = Services(restore, DTensor._of_part)


def dtensor_class(platform: Platform) -> type:
    """Return the DTensor class of the platform."""
    return _BOUND[bind_platform(platform)]


def _target_layout(layout: Layout, placements: Sequence[Placement] | None) -> Layout:
    """Return the layout that a call of `DTensor.redistribute` requests.

    Raises:
        ValueError, TypeError: as in `DTensor.redistribute`.
    """
    mesh = layout.mesh
    target = requested_layout(mesh, placements, layout.shape, f"a tensor of shape {tuple(layout.shape)}")
    for mesh_dim, (have, want) in enumerate(zip(layout.placements, target.placements, strict=True)):
        if want.is_partial() and have is not want:
            raise ValueError(
                f"cannot redistribute {have!r} to {want!r} on mesh dimension {mesh.dim_label(mesh_dim)}: "
                "redistribute() cannot make partial tensors. Make them with operations or DTensor.from_local"
            )
    return target


def _with_cotangent(local: Any, given: Layout, wanted: Layout) -> Any:
    """Return ``local`` through an identity whose backward redistributes the cotangent from ``given`` to ``wanted``."""
    if given is wanted:
        return local
    return ConvertCotangent(given.mesh.platform, lambda g: redistribute_local(g, given, wanted))(local)


def _for_summands(local: Any, layout: Layout, convert: Callable[[Any, Layout], Any]) -> Any:
    """Return ``local`` through an identity that only affects gradients of gradients.

    In gradients of gradients, each rank contributes to a plain partial tensor, but all ranks count once for a DTensor.
    ``convert`` is `to_owner` where a plain tensor becomes a DTensor, and `to_summands` where a DTensor becomes plain.
    """
    return ConvertCotangent(layout.mesh.platform, lambda g: convert(g, layout))(local)


def _made_of(local_tensor: Any, layout: Layout, grad_placements: Sequence[Placement] | None) -> Any:
    """Return the DTensor of ``layout`` whose local tensor on this rank is ``local_tensor`` (see
    `DTensor.from_local`)."""
    mesh = layout.mesh
    platform = mesh.platform
    if CHECKS:
        check_replicated(local_tensor, mesh, layout.placements, _GIVEN)
    if mesh._coordinate is None:
        local_tensor = platform.zeros((0,), local_tensor)  # this rank has no shard
    given = layout.cotangent
    wanted = given if grad_placements is None else requested_layout(mesh, grad_placements, layout.shape)

    def make(partial: tuple[int, ...] = ()) -> Any:
        summands = [Partial() if d in partial else p for d, p in enumerate(given.placements)]
        local = _with_cotangent(platform.alias(local_tensor), given.with_placements(summands), wanted)
        return _for_summands(local, layout, to_owner) if layout.summed_mesh_dims else local

    with platform.no_dispatch():
        x = platform.wrap(make(), layout)
        if not platform.requires_grad(local_tensor):
            return x
        if grad_placements is None and not layout.summed_mesh_dims:
            x._origin = local_tensor
        ways = zip(wanted.placements, layout.placements, strict=True)
        summed = tuple(d for d, (w, p) in enumerate(ways) if w is Partial() and p is Replicate())
        if summed:
            x._summands = summed, make, x._version
        return x
