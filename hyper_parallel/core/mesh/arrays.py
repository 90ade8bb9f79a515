"""NumPy arrays of ranks: checks, sub-arrays and rows. Nothing here communicates."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


def ranks_of(mesh: Any) -> np.ndarray:
    """Return an int64 array of ranks from a (nested) sequence, an array or a tensor on any device.

    Example:
        >>> ranks_of([[0, 1], [2, 3]]).shape
        (2, 2)
    """
    return np.asarray(mesh.tolist() if hasattr(mesh, "tolist") else mesh, dtype=np.int64)


def check_ranks_of_mesh(ranks: np.ndarray, names: tuple[str, ...] | None, world_size: int) -> None:
    """Raise ValueError unless ``ranks`` and the dimension ``names`` form a valid mesh in a world of ``world_size``
    ranks."""
    if ranks.ndim == 0 or ranks.size == 0:
        raise ValueError(f"a mesh must be a non-empty array of ranks, got {ranks.tolist()!r}")
    flat = ranks.ravel().tolist()
    if len(set(flat)) != len(flat):
        raise ValueError(f"a rank appears twice in the mesh {ranks.tolist()}")
    if min(flat) < 0 or max(flat) >= world_size:
        raise ValueError(f"the mesh {ranks.tolist()} has ranks outside the world of {world_size} rank(s)")
    if names is not None:
        if len(names) != ranks.ndim:
            raise ValueError(f"a mesh of shape {ranks.shape} needs {ranks.ndim} mesh_dim_names, got {names}")
        if len(set(names)) != len(names):
            raise ValueError(f"mesh_dim_names must differ from each other, got {names}")


def index_of_dim(mesh: Any, mesh_dim: int | str | None, caller: str) -> int:
    """Return the non-negative index of a dimension of ``mesh``, from an index or a name.

    None stands for the only dimension of a 1-D mesh. ``caller`` is the method that messages name.

    Raises:
        ValueError: for a dimension that the mesh does not have, and for None on an n-D mesh.
    """
    if mesh_dim is None:
        if mesh.ndim != 1:
            raise ValueError(f"{mesh} has {mesh.ndim} dimensions: name one, {caller}(mesh_dim)")
        return 0
    if isinstance(mesh_dim, str):
        names: tuple[str, ...] | None = mesh.mesh_dim_names
        if names is None or mesh_dim not in names:
            raise ValueError(f"{mesh} has no dimension named {mesh_dim!r}")
        return names.index(mesh_dim)
    ndim: int = mesh.ndim
    if not -ndim <= mesh_dim < ndim:
        raise ValueError(f"{mesh} has {ndim} dimension(s), and no dimension {mesh_dim}")
    return mesh_dim % ndim


def sub_array(ranks: np.ndarray, along: Sequence[Sequence[int]], coordinate: Sequence[int]) -> np.ndarray:
    """Return the sub-array of ``ranks`` that contains ``coordinate``.

    It has one dimension for each entry of ``along``. An entry lists dimensions of ``ranks``, which are flattened into
    one.

    Example:
        >>> sub_array(np.arange(8).reshape(2, 2, 2), [(2,), (0,)], (0, 1, 0)).tolist()
        [[2, 6], [3, 7]]
        >>> sub_array(np.arange(8).reshape(2, 2, 2), [(0, 2)], (0, 1, 0)).tolist()
        [2, 3, 6, 7]
    """
    dims = [dim for entry in along for dim in entry]
    kept = sorted(dims)
    part = ranks[tuple(slice(None) if dim in kept else coordinate[dim] for dim in range(ranks.ndim))]
    shape = [int(np.prod([ranks.shape[dim] for dim in entry])) for entry in along]
    return part.transpose([kept.index(dim) for dim in dims]).reshape(shape)


def rows_along(ranks: np.ndarray, dims: Sequence[int]) -> list[list[int]]:
    """Return all rows of the array along ``dims``, with these dimensions flattened into one.

    Example:
        >>> rows_along(np.arange(8).reshape(2, 2, 2), (0, 2))
        [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    last = range(ranks.ndim - len(dims), ranks.ndim)
    size = int(np.prod([ranks.shape[dim] for dim in dims]))
    rows: list[list[int]] = np.moveaxis(ranks, list(dims), list(last)).reshape(-1, size).tolist()
    return rows


def rows_by_dims(ranks: np.ndarray) -> Iterator[tuple[tuple[int, ...], set[tuple[int, ...]]]]:
    """Yield each choice of dimensions, the smallest first, with all rows of the array along them (see `rows_along`).

    Example:
        >>> [dims for dims, rows in rows_by_dims(np.arange(8).reshape(2, 2, 2)) if (0, 1, 4, 5) in rows]
        [(0, 2)]
    """
    for count in range(1, ranks.ndim + 1):
        for dims in itertools.combinations(range(ranks.ndim), count):
            yield dims, set(map(tuple, rows_along(ranks, dims)))
