"""A collective that `CommTrace` has recorded or `explain` predicts: its kind, its module, and its bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hyper_parallel.core.communication.recorder import CollectiveEvent, dim_name

__all__ = ["Collective", "bytes_on_the_wire", "collective_rows", "dtype_name"]


@dataclass
class Collective:
    """One collective, of one rank.

    Attributes:
        module: path of the module that issued it; the class for the model itself, empty outside of all modules.
        direction: ``"forward"`` or ``"backward"``.
        kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"shift"``,
            ``"broadcast"``, ``"scatter"``.
        op: operation of a reduction, for example ``"sum"``; empty otherwise.
        mesh_dim: name of the mesh dimension, or its number if it has no name.
        ranks: number of ranks that communicate.
        shape, dtype: shape and dtype of the local input tensor.
        bytes: bytes of that tensor.
        start, seconds: start time since the start of the trace, and duration; None for a predicted collective.
    """

    module: str
    direction: str
    kind: str
    op: str
    mesh_dim: str
    ranks: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    start: float | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, event: CollectiveEvent) -> Collective:
        """Return the collective of an event of the recorder."""
        mesh, dim = event.mesh, event.mesh_dim
        return cls(
            module=event.module,
            direction=event.direction,
            kind=event.kind,
            op=event.op,
            mesh_dim=dim_name(mesh, dim),
            ranks=mesh.shape[dim],
            shape=tuple(event.shape),
            dtype=dtype_name(event.dtype, mesh.platform.dtypes),
            bytes=event.bytes,
        )

    @property
    def wire_bytes(self) -> int:
        """Return the bytes that each rank sends, computed by `bytes_on_the_wire`."""
        return bytes_on_the_wire(self.kind, self.bytes, self.ranks)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {**asdict(self), "shape": list(self.shape), "wire_bytes": self.wire_bytes}


def dtype_name(dtype: Any, dtypes: Mapping[str, Any]) -> str:
    """Return the common name of a dtype on all frameworks, such as ``"float32"``. ``dtypes`` is `Platform.dtypes`."""
    return next((name for name, known in dtypes.items() if known == dtype), str(dtype).rpartition(".")[2])


def bytes_on_the_wire(kind: str, size: int, ranks: int) -> int:
    """Return the bytes that each rank sends, in a collective of ``size`` bytes a rank. Bandwidth-optimal algorithms are
    assumed, such as ring algorithms.

    Example:
        >>> bytes_on_the_wire("all_reduce", 1024, 4), bytes_on_the_wire("all_gather", 1024, 4)
        (1536, 3072)
    """
    others = ranks - 1
    if kind == "all_gather":
        return size * others
    if kind == "all_reduce":
        return 2 * size * others // ranks
    return size if kind in ("broadcast", "shift") else size * others // ranks


def collective_rows(collectives: Iterable[Collective]) -> list[dict[str, Any]]:
    """Merge equal collectives into rows, in the order of first occurrence, with count, bytes and seconds."""
    counts: Counter[tuple] = Counter()
    first: dict[tuple, dict[str, Any]] = {}
    for c in collectives:
        key = (c.module, c.direction, c.kind, c.op, c.mesh_dim, c.ranks, c.shape, c.dtype)
        counts[key] += 1
        row = first.get(key)
        if row is None:
            first[key] = row = {**c.as_dict(), "seconds": c.seconds}
            row.pop("start")
            continue
        row["bytes"] += c.bytes
        row["wire_bytes"] += c.wire_bytes
        row["seconds"] = None if row["seconds"] is None or c.seconds is None else row["seconds"] + c.seconds
    return [{**row, "count": counts[key]} for key, row in first.items()]
