"""Recording of this rank's local part of a tensor as an entry of a record. Nothing is communicated."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.layouts.rectangles import held_rectangles
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.debug.records.files import Entry, Place, Writer
from hyper_parallel.debug.records.samples import SUMS, grid_of, signed_sums

__all__ = ["Parts", "numbers_of"]

#: dtypes that NumPy supports.
_NUMPY = frozenset({"bool", "float16", "float32", "float64", "complex64", "complex128"}) | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}


def numbers_of(local: Any, platform: Any) -> tuple[str, np.ndarray | None, bytes]:
    """Return a plain tensor's dtype name, its numbers in float64, and its bytes. Complex numbers get one more
    dimension. The numbers are None for unknown dtypes."""
    local = platform.detach(local)
    values, shape = platform.bytes_of(local), tuple(platform.shape_of(local))
    dtype = next((name for name, own in platform.dtypes.items() if own == local.dtype), str(local.dtype))
    if dtype == "bfloat16":
        wide = np.frombuffer(values, "<u2").astype(np.uint32) << 16
        return dtype, wide.view(np.float32).astype(np.float64).reshape(shape), values
    if dtype not in _NUMPY:
        return dtype, None, values
    x = np.frombuffer(values, np.dtype(dtype)).reshape(shape)
    if x.dtype.kind == "c":
        x = x.view(x.real.dtype).reshape(*shape, 2)
    return dtype, x.astype(np.float64), values


class Parts:
    """Entries of this rank, and the writer of their files.

    Args:
        platform: platform of the tensors.
        writer: writer of the files.
        largest: maximum number of elements of a tensor that is written in full.
    """

    def __init__(self, platform: Any, writer: Writer, largest: int) -> None:
        self._platform, self._writer, self._largest = platform, writer, largest
        self.entries: list[Entry] = []
        self.places: list[Place] = []
        self.notes: dict[str, None] = {}
        self.root: Place | None = None
        self._place_of: dict[tuple[DeviceMesh, tuple[str, ...]], int] = {}

    def see(self, mesh: DeviceMesh) -> None:
        """Record the root mesh of ``mesh``. The first root mesh with several ranks is stored."""
        root = mesh.get_root_mesh()
        if self.root is None and root.size() > 1:
            self.root = _place(root, ("?",) * root.ndim)

    def add(
        self,
        key: tuple[str, int, str, int, str, str],
        x: Any,
        *,
        layout: Layout | None = None,
        mesh: DeviceMesh | None = None,
        placement: Placement | None = None,
        tensor: int = -1,
        scale: float = 0.0,
        array: np.ndarray | None = None,
    ) -> None:
        """Record ``x``, a plain tensor or the local tensor of a DTensor.

        Args:
            key: result of `Entry.key`.
            x: the tensor. Interception is off.
            layout: layout of a DTensor.
            mesh, placement: 1-D mesh and placement of a plain tensor that a style placed.
            tensor, scale: fields of `Entry`.
            array: numbers to record in place of the numbers of ``x``.
        """
        platform = self._platform
        what = platform.foreign_tensor(x)
        name = f"{key[0]} of {key[2] or 'the model'}"
        if what is not None or not platform.has_values(x):
            self.notes[f"{name}: {what or 'a tensor without values'}"] = None
            return
        dtype, numbers, data = numbers_of(x, platform)
        if array is not None:
            numbers, data = array, array.tobytes()
        if numbers is None:
            self.notes[f"{name}: numbers of {dtype} are not recorded"] = None
            return
        local = tuple(numbers.shape)
        if layout is not None and len(local) > len(layout.shape):  # of complex numbers
            self.notes[f"{name}: distributed complex numbers are not recorded"] = None
            return
        place, alone = -1, True
        whole: tuple[int, ...] | None = None
        boxes: tuple[tuple[tuple[int, ...], ...], ...] = ()
        if layout is not None:
            coordinate = layout.mesh.get_coordinate()
            if coordinate is None:
                return
            place, whole = self._of(layout.mesh, tuple(map(_letter, layout.placements))), tuple(layout.shape)
            boxes = tuple(tuple(map(tuple, box)) for box in held_rectangles(layout, coordinate))
            alone = not any(p is Replicate() and index for p, index in zip(layout.placements, coordinate, strict=True))
        elif mesh is not None and placement is not None:
            if isinstance(placement, Shard):
                placement = placement.with_dim(placement.dim % max(len(local), 1))
            place = self._of(mesh, (_letter(placement),))
            alone = not (placement is Replicate() and mesh.get_local_rank())
        elif platform.world() is None or platform.world_size() == 1:
            whole, boxes = local, (((0,) * len(local), local, (0,) * len(local)),)
        finite = np.isfinite(numbers)
        clean = numbers if finite.all() else np.where(finite, numbers, 0.0)
        sampled, taken = self._taken(numbers, whole, boxes)
        sums = np.zeros(SUMS if sampled and whole is not None else 0)
        for offsets, sizes, starts in boxes if alone and sums.size else ():
            index = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
            sums += signed_sums(clean[index], whole or (), offsets)
        # Replicas have no values in the files, and samples lack the other elements: sums of the local part stand in for
        # both.
        own = signed_sums(clean, local, (0,) * len(local)) if place >= 0 or (sampled and whole is None) else np.zeros(0)
        self.entries.append(
            Entry(
                *key,
                tensor=tensor,
                dtype=dtype,
                local=local,
                whole=whole,
                place=place,
                boxes=boxes,
                sampled=sampled,
                values=self._writer.values(taken) if alone else None,
                digest=hashlib.blake2b(data, digest_size=12).hexdigest(),
                squares=float(np.square(clean).sum()) if alone else 0.0,
                not_finite=int(numbers.size - finite.sum()),
                sums=tuple(sums.tolist()),
                own_sums=tuple(own.tolist()),
                scale=scale,
            )
        )

    def _taken(
        self, numbers: np.ndarray, whole: tuple[int, ...] | None, boxes: Sequence[Any]
    ) -> tuple[bool, np.ndarray]:
        """Return whether the tensor is sampled, and the numbers to write.

        The numbers are the elements of each box at sampled indices.
        """
        shape = numbers.shape if whole is None else whole
        grid = grid_of(shape, self._largest)
        sampled = math.prod(map(len, grid)) < math.prod(shape)
        if whole is None:
            return sampled, numbers[np.ix_(*grid)] if grid else numbers
        taken = [np.zeros(0)]
        for offsets, sizes, starts in boxes:
            own = [
                places[(places >= offset) & (places < offset + size)] - offset + start
                for places, offset, size, start in zip(grid, offsets, sizes, starts, strict=True)
            ]
            taken.append((numbers[np.ix_(*own)] if own else numbers).reshape(-1))
        return sampled, np.concatenate(taken)

    def _of(self, mesh: DeviceMesh, placements: tuple[str, ...]) -> int:
        """Return the index of the `Place` for a mesh and placements. A new place is added to `places`."""
        found = self._place_of.get((mesh, placements))
        if found is None:
            self.see(mesh)
            found = self._place_of[mesh, placements] = len(self.places)
            self.places.append(_place(mesh, placements))
        return found


def _place(mesh: DeviceMesh, placements: tuple[str, ...]) -> Place:
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return Place(tuple(names), tuple(mesh.shape), tuple(mesh.ranks.reshape(-1).tolist()), placements)


def _letter(placement: Placement) -> str:
    """Return the letter of a placement, as in `Place.placements`. Reductions other than sums are unknown."""
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    return "R" if placement is Replicate() else "P" if placement.is_partial("sum") else "?"
