"""`CommTrace`: every collective of a run, with module, direction, bytes and time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hyper_parallel.core.communication.recorder import LISTENERS, CollectiveEvent, attributed_backwards
from hyper_parallel.debug.collective import Collective, collective_rows
from hyper_parallel.debug.module_scopes import ModuleScopes
from hyper_parallel.debug.text import format_bytes, format_seconds, format_table
from hyper_parallel.platform import get_platform

__all__ = ["CommTrace", "collective_table"]


class CommTrace:
    """Context manager that lists the collectives issued inside it on this rank, forward and backward. For each it
    records the module, the bytes and the duration.

    A collective in backward belongs to the module whose forward made it necessary. If several modules read one input,
    the collective belongs to the first of these modules. As in `CommDebugMode`, an emulated collective counts once.
    Collectives of pickled values, or without elements, do not count.

    Args:
        model: the model that runs. Then collectives have the path of the innermost module, even if no plan names it, or
            the class for the model itself. Without it, only modules with a style are known.
        synchronize: wait for the device before and after each collective. This measures the collective alone, and
            prevents overlap with computation. Without it, an asynchronous device is measured only until the call
            returns.

    Attributes:
        collectives: a `Collective` for each, in the order of issue.

    Example:
        >>> from hyper_parallel import CommTrace
        >>> with CommTrace() as trace:
        ...     pass
        >>> trace.collectives, trace.rows()
        ([], [])
    """

    def __init__(self, model: Any = None, *, synchronize: bool = True) -> None:
        self._model, self._synchronize = model, synchronize
        self._stack = ExitStack()
        self.collectives: list[Collective] = []

    def __enter__(self) -> CommTrace:
        self.collectives.clear()
        self._began = time.perf_counter()
        if self._model is not None:
            self._stack.enter_context(ModuleScopes(self._model, get_platform()))
        self._stack.enter_context(attributed_backwards())
        LISTENERS.append(self._listen)
        return self

    def __exit__(self, *exc_info: object) -> None:
        LISTENERS.remove(self._listen)
        self._stack.close()

    def rows(self) -> list[dict[str, Any]]:
        """Return the collectives as rows of `collective_rows`: equal ones form one row, with their count."""
        return collective_rows(self.collectives)

    def table(self) -> str:
        """Return the rows as a table for a terminal."""
        return collective_table(self.rows())

    def as_dict(self) -> dict[str, Any]:
        """Return the data as JSON values: each collective, and the rows."""
        return {"collectives": [c.as_dict() for c in self.collectives], "rows": self.rows()}

    def to_json(self) -> str:
        """Return `as_dict` as JSON text."""
        return json.dumps(self.as_dict(), indent=2)

    def save_chrome_trace(self, path: str | Path, rank: int | None = None) -> None:
        """Write a trace file for ``chrome://tracing``, Perfetto and TensorBoard. It has a process for each rank, and a
        thread for each mesh dimension.

        Args:
            path: path of the file; each rank writes its own file.
            rank: number of the process in the trace; None is this rank, or 0 without process groups.
        """
        platform = get_platform()
        name = rank
        if name is None:
            name = 0 if platform.world() is None else platform.rank()
        dims = sorted({c.mesh_dim for c in self.collectives})
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": name, "args": {"name": f"rank {name}"}},
            *(
                {"ph": "M", "name": "thread_name", "pid": name, "tid": i, "args": {"name": f"mesh dimension {dim}"}}
                for i, dim in enumerate(dims)
            ),
        ]
        for c in self.collectives:
            events.append(
                {
                    "ph": "X",
                    "name": f"{c.kind} {c.module}".strip(),
                    "cat": c.direction,
                    "pid": name,
                    "tid": dims.index(c.mesh_dim),
                    "ts": (c.start or 0.0) * 1e6,
                    "dur": (c.seconds or 0.0) * 1e6,
                    "args": c.as_dict(),
                }
            )
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")

    def _listen(self, event: CollectiveEvent) -> Callable[[], None] | None:
        if not event.bytes:
            return None
        found, platform = Collective.of(event), event.mesh.platform
        self.collectives.append(found)
        if self._synchronize:
            platform.synchronize()
        started = time.perf_counter()
        found.start = started - self._began

        def done() -> None:
            if self._synchronize:
                platform.synchronize()
            found.seconds = time.perf_counter() - started

        return done


def collective_table(rows: list[dict[str, Any]]) -> str:
    """Return rows of `collective_rows` as a table for a terminal."""
    timed = any(row["seconds"] is not None for row in rows)
    head = ("module", "direction", "collective", "over", "count", "bytes", "sent", *(("time",) if timed else ()))
    cells = [
        (
            row["module"] or "-",
            row["direction"],
            f"{row['kind']} ({row['op']})" if row["op"] else row["kind"],
            f"{row['mesh_dim']} ({row['ranks']} ranks)",
            row["count"],
            format_bytes(row["bytes"]),
            format_bytes(row["wire_bytes"]),
            *((format_seconds(row["seconds"]),) if timed else ()),
        )
        for row in rows
    ]
    return format_table(head, cells, right=(4, 5, 6, 7))
