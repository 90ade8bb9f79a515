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
    """Context manager that lists the collectives issued inside it on this rank, forward and backward: from which module
    each comes, how many bytes it moves, how long it takes.

    Those of a backward have the module whose forward made them necessary. Where several modules read one input, it is
    the first of them. As in `CommDebugMode`, a collective that is emulated counts once. Collectives of pickled values,
    or without elements, do not count.

    Args:
        model: the model that runs. Collectives then have the path of the innermost module, also of one that no plan
            names, or the class for the model itself. Without it, only modules with a style are known.
        synchronize: wait for the device before and after each collective, which measures it alone, and keeps it from
            overlapping with computing. Otherwise an asynchronous device is measured for as long as the program is.

    Attributes:
        collectives: a `Collective` each, in the order in which they were issued.

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
        """See `collective_rows`: equal ones are one row, with their number."""
        return collective_rows(self.collectives)

    def table(self) -> str:
        """The rows for a terminal."""
        return collective_table(self.rows())

    def as_dict(self) -> dict[str, Any]:
        """The data for JSON: each collective, and the rows."""
        return {"collectives": [c.as_dict() for c in self.collectives], "rows": self.rows()}

    def to_json(self) -> str:
        """`as_dict` as JSON."""
        return json.dumps(self.as_dict(), indent=2)

    def save_chrome_trace(self, path: str | Path, rank: int | None = None) -> None:
        """Write a trace that ``chrome://tracing``, Perfetto and TensorBoard show: a process for each rank, and a thread
        for each mesh dimension.

        Args:
            path: of the file; each rank writes its own.
            rank: the name of the process; None is this rank, and 0 before there are groups.
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
    """Rows of `collective_rows` for a terminal."""
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
