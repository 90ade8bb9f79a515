"""Layout: mesh, placements and global shape of a distributed tensor. Layouts are interned, so that plans are cached by
identity."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from hyper_parallel.core.layouts.chunking import shard_sizes
from hyper_parallel.core.layouts.cuts import cut_order, ranges_of, strided_factors
from hyper_parallel.core.layouts.placement_types import (
    PackedShard,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    own_placement,
)
from hyper_parallel.core.lookalikes import import_hint

if TYPE_CHECKING:
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh


class Layout:
    """Mesh, placements and global shape of a distributed tensor, and the facts that follow from them for this rank.

    One mesh dimension cannot shard two tensor dimensions. Several mesh dimensions may shard one tensor dimension, in
    the order that the placements define (see `cuts`). Layouts come from `get_layout`; equal layouts are the same
    object.

    Attributes:
        mesh: the `DeviceMesh`.
        placements: one placement per mesh dimension, with non-negative tensor dimensions.
        shape: global shape.
        local_shape: shape of this rank's shard, ``(0,)`` on a rank outside the mesh.
        local_offset: global index of this rank's first element, per tensor dimension; meaningless in a packed
            dimension.
        replicated: whether every placement is `Replicate`.
        summed_mesh_dims: mesh dimensions of more than one rank whose placement is a `Partial` sum or average.
    """

    def __init__(self, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> None:
        self.mesh = mesh
        self.placements = placements
        self.shape = mesh.platform.Size(shape)
        self.replicated = all(p is Replicate() for p in placements)
        self.summed_mesh_dims = tuple(
            d for d, p in enumerate(placements) if (p.is_partial("sum") or p.is_partial("avg")) and mesh.shape[d] > 1
        )
        #: sharded tensor dimension -> the mesh dimensions that shard it, in the order of their splits.
        self._cuts = {p.dim: cut_order(placements, mesh.shape, p.dim) or () for p in placements if isinstance(p, Shard)}
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            self.local_shape: tuple[int, ...] = (0,)
            self.local_offset: tuple[int, ...] = (0,) * len(shape)
            return
        sizes, offsets = list(shape), [0] * len(shape)
        for dim, cuts in self._cuts.items():
            pieces = ranges_of(shape[dim], cuts, placements, mesh.shape, coordinate)
            sizes[dim] = sum(length for _, length in pieces)
            offsets[dim] = pieces[0][0]
        self.local_shape = tuple(sizes)
        self.local_offset = tuple(offsets)

    @property
    def ndim(self) -> int:
        """Number of tensor dimensions."""
        return len(self.shape)

    @cached_property
    def cotangent(self) -> Layout:
        """Layout of the gradient with respect to a tensor of this layout, with `Replicate` for `Partial`."""
        return self.with_placements([Replicate() if p.is_partial() else p for p in self.placements])

    @cached_property
    def tells_strides(self) -> bool:
        """Return whether the global strides follow from the strides of every rank's shard.

        The result is False if some rank has at most one element of a dimension that is longer globally. On that rank,
        the stride of the dimension is meaningless.
        """
        parts = [(size, self.smallest_part(dim)) for dim, size in enumerate(self.shape)]
        return all(part > 1 or size == part == 1 for size, part in parts)

    def part_sizes(self, dim: int) -> frozenset[int]:
        """Return the sizes that tensor dimension ``dim`` has on the ranks of the mesh."""
        sizes = frozenset({self.shape[dim]})
        for mesh_dim in self.shard_mesh_dims(dim):
            placement: Any = self.placements[mesh_dim]
            sizes = frozenset(n for size in sizes for n in shard_sizes(placement, size, self.mesh.shape[mesh_dim]))
        return sizes

    def smallest_part(self, dim: int) -> int:
        """Return the smallest size that tensor dimension ``dim`` has on any rank."""
        return min(self.part_sizes(dim))

    def may_be_local(self, shape: tuple[int, ...]) -> bool:
        """Return whether some rank may have a shard of this shape."""
        return len(shape) == self.ndim and all(size in self.part_sizes(dim) for dim, size in enumerate(shape))

    def with_placements(self, placements: Sequence[Placement]) -> Layout:
        """Return the layout of the same tensor with other placements."""
        return get_layout(self.mesh, tuple(placements), self.shape)

    def shard_mesh_dims(self, dim: int) -> tuple[int, ...]:
        """Return the mesh dimensions that shard tensor dimension ``dim``, in the order of their splits."""
        return self._cuts.get(dim, ())

    def shard_count(self, dim: int) -> int:
        """Return the number of shards of tensor dimension ``dim``."""
        count = 1
        for mesh_dim in self.shard_mesh_dims(dim):
            count *= self.mesh.shape[mesh_dim]
        return count

    def size_within(self, dim: int, mesh_dim: int) -> int:
        """Return the size of tensor dimension ``dim`` on this rank before ``mesh_dim`` splits it."""
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            return 0
        size = self.shape[dim]
        for outer in self.shard_mesh_dims(dim):
            if outer == mesh_dim:
                break
            placement: Any = self.placements[outer]
            size = shard_sizes(placement, size, self.mesh.shape[outer])[coordinate[outer]]
        return size

    def shape_at(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the shard of the rank at ``coordinate`` of the mesh."""
        ranges = (
            ranges_of(size, self.shard_mesh_dims(dim), self.placements, self.mesh.shape, coordinate)
            for dim, size in enumerate(self.shape)
        )
        return tuple(sum(length for _, length in pieces) for pieces in ranges)

    @property
    def packed_mesh_dim(self) -> int | None:
        """The mesh dimension whose placement is `PackedShard`, or None."""
        return next((i for i, p in enumerate(self.placements) if isinstance(p, PackedShard)), None)

    def local_ranges(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return the global (start, length) ranges of this rank's shard, for each tensor dimension. A dimension has one
        range, unless it is packed."""
        coordinate = self.mesh.get_coordinate()
        ranges: list[tuple[tuple[int, int], ...]] = [
            ((o, n),) for o, n in zip(self.local_offset, self.local_shape, strict=False)
        ]
        packed = self.packed_mesh_dim
        if packed is not None and coordinate is not None:
            placement: Any = self.placements[packed]
            dim = placement.dim
            ranges[dim] = ranges_of(self.shape[dim], self._cuts[dim], self.placements, self.mesh.shape, coordinate)
        return tuple(ranges)

    def local_index(self) -> tuple[slice | list[int], ...]:
        """Return the index that selects this rank's shard in the global tensor or array."""
        return tuple(
            slice(pieces[0][0], sum(pieces[0]))
            if len(pieces) == 1
            else [i for start, length in pieces for i in range(start, start + length)]
            for pieces in self.local_ranges()
        )

    def __reduce__(self) -> tuple:
        return (get_layout, (self.mesh, self.placements, tuple(self.shape)))

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: dict) -> Layout:
        return self

    def __repr__(self) -> str:
        return f"Layout(shape={tuple(self.shape)}, placements={list(self.placements)}, mesh={self.mesh})"


_LAYOUTS: WeakValueDictionary[tuple, Layout] = WeakValueDictionary()


def get_layout(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Sequence[int]) -> Layout:
    """Return the layout of a tensor of global ``shape`` with ``placements`` on ``mesh``. Equal arguments give the same
    object.

    Raises:
        ValueError: when the number of placements is not the number of mesh dimensions, a `Shard` names a tensor
            dimension that does not exist, or the sizes of a `PackedShard` do not add up to its dimension.
        TypeError: when an item is not a placement.
    """
    key = (mesh, placements, tuple(shape))
    layout = _LAYOUTS.get(key)
    if layout is None:
        normal = tuple(
            _resolve(p, key[2], mesh.dim_label(mesh_dim)) if isinstance(p, PackedShard) else p
            for mesh_dim, p in enumerate(normalize_placements(placements, mesh, len(key[2])))
        )
        if normal != placements:
            return get_layout(mesh, normal, shape)
        layout = _LAYOUTS.setdefault(key, Layout(mesh, placements, key[2]))
    return layout


def replicated_layout(mesh: DeviceMesh, shape: Sequence[int]) -> Layout:
    """Return the layout of a tensor that is replicated on all ranks of ``mesh``."""
    return get_layout(mesh, (Replicate(),) * mesh.ndim, shape)


def requested_layout(
    mesh: DeviceMesh, placements: Sequence[Placement] | None, shape: Sequence[int], what: str = "a tensor"
) -> Layout:
    """Return `get_layout` for placements as users write them (see `normalize_placements`)."""
    return get_layout(mesh, normalize_placements(placements, mesh, len(shape), what), shape)


def normalize_placements(
    placements: Sequence[Placement] | None, mesh: DeviceMesh, ndim: int, what: str = "a tensor"
) -> tuple[Placement, ...]:
    """Return checked placements with non-negative dimensions; None means `Replicate` on every mesh dimension.

    Raises:
        ValueError, TypeError: as in `get_layout`; ``what`` names the tensor in the message.
    """
    if placements is None:
        return (Replicate(),) * mesh.ndim
    if isinstance(own_placement(placements), Placement):
        raise TypeError(
            f"placements must be a sequence with one placement per mesh dimension, got {placements!r}: "
            f"write [{placements!r}]"
        )
    if not isinstance(placements, Sequence):
        raise TypeError(
            f"placements must be a sequence with one placement per mesh dimension, got {placements!r}"
            f"{import_hint(placements)}"
        )
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"{what} on a mesh with {mesh.ndim} dimension(s) of shape {mesh.shape} needs {mesh.ndim} placement(s), "
            f"got {len(placements)}: {list(placements)}"
        )
    own = map(own_placement, placements)
    normal = tuple(_normalize(p, mesh_dim, mesh, ndim, what) for mesh_dim, p in enumerate(own))
    kinds = {"sum" if p.is_partial("avg") else p.reduce_op for p in normal if isinstance(p, Partial)}
    if len(kinds) > 1:
        raise ValueError(
            f"{what} is placed {list(normal)}: a {' and a '.join(sorted(kinds))} do not commute, so the value depends "
            "on the order of the reductions. Redistribute one mesh dimension to Replicate() first"
        )
    if any(isinstance(p, (PackedShard, StridedShard)) for p in normal):
        _check_order(normal, mesh, what)
    return normal


def _check_order(placements: tuple[Placement, ...], mesh: DeviceMesh, what: str) -> None:
    """Raise ValueError if strided and packed shards do not define an order of the splits."""
    packed = [p for p in placements if isinstance(p, PackedShard)]
    if len(packed) > 1:
        raise ValueError(f"{what} is placed {list(placements)}: at most one placement may be a PackedShard")
    for mesh_dim in reversed(range(mesh.ndim)):
        placement: Any = placements[mesh_dim]
        if not isinstance(placement, StridedShard):
            continue
        dim, factors = placement.dim, strided_factors(placements, mesh.shape, mesh_dim, placement.dim)
        if placement.split_factor not in factors:
            use = "".join(f", or {StridedShard(dim, factor)!r}" for factor in factors)
            raise ValueError(
                f"{what} is placed {list(placements)}: {placement!r} on mesh dimension {mesh.dim_label(mesh_dim)} "
                "means that later mesh dimensions, whose sizes multiply to split_factor, shard tensor dimension "
                f"{dim} first. No mesh dimensions do so in the mesh of shape {mesh.shape}: use Shard({dim}){use}"
            )
    for shard in packed:
        if cut_order(placements, mesh.shape, shard.dim) is None:
            raise ValueError(
                f"{what} is placed {list(placements)}: {shard!r} must be the first placement that shards tensor "
                f"dimension {shard.dim}. Shard another tensor dimension, or shard this dimension on later mesh "
                f"dimensions, or on earlier ones with StridedShard({shard.dim}, split_factor)"
            )


def _resolve(placement: PackedShard, shape: tuple[int, ...], mesh_dim: str) -> PackedShard:
    try:
        return placement.resolve(shape[placement.dim])
    except ValueError as error:
        raise ValueError(
            f"{placement!r} on mesh dimension {mesh_dim} does not fit dimension {placement.dim} of a tensor of shape "
            f"{shape}: {error}"
        ) from None


def _normalize(placement: Any, mesh_dim: int, mesh: DeviceMesh, ndim: int, what: str) -> Placement:
    if isinstance(placement, Shard):
        if not -ndim <= placement.dim < ndim:
            raise ValueError(
                f"{placement!r} on mesh dimension {mesh.dim_label(mesh_dim)} is out of range: {what} has {ndim} "
                f"dimension(s); use a dimension from {-ndim} to {ndim - 1}"
                if ndim
                else f"{placement!r} on mesh dimension {mesh.dim_label(mesh_dim)} is out of range: {what} has no "
                "dimensions; use Replicate() or Partial()"
            )
        if isinstance(placement, StridedShard) and placement.split_factor == 1:
            placement = Shard(placement.dim)
        return placement if placement.dim >= 0 else placement.with_dim(placement.dim + ndim)
    if isinstance(placement, (Replicate, Partial)):
        return placement
    raise TypeError(
        f"the placement on mesh dimension {mesh.dim_label(mesh_dim)} must be Shard(dim), Replicate() or Partial(), "
        f"got {placement!r}{import_hint(placement)}"
    )
