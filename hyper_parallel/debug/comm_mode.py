"""Recording and counting of collectives. Mirrors ``torch.distributed.tensor.debug.CommDebugMode``."""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hyper_parallel.core.communication.recorder import LISTENERS, CollectiveEvent
from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.debug import comm_tables
from hyper_parallel.debug.comm_counts import CommCounts
from hyper_parallel.debug.module_tree import GLOBAL, ModuleTree
from hyper_parallel.platform import get_platform

__all__ = ["CommDebugMode"]


class CommDebugMode:
    """Context manager that lists and counts the collectives issued inside it, forward and backward, on this rank.

    It includes collectives of this library, and collectives that the program issues by functions of the framework. A
    collective that is emulated, because the backend lacks it, counts once under its own name. Collectives on a mesh
    dimension of size 1 are not issued and not counted. Collectives of this library for pickled values are not counted
    either.

    Attributes:
        events: the collectives, as `hyper_parallel.debug.CollectiveEvent`, in the order of issue.
        comm_module_counts: name of a called module -> ``{"forward": counts, "backward": counts}``, including
            submodules. A name is the class of the outermost module, and the path from there; ``"Global"`` counts all.

    Example:
        >>> from hyper_parallel import CommDebugMode
        >>> with CommDebugMode() as comm:
        ...     pass
        >>> comm.get_total_counts()
        0
        >>> [(event.module, event.direction, event.kind, event.bytes) for event in comm.events]
        []

    Source: ``torch.distributed.tensor.debug.CommDebugMode``.
    """

    def __init__(self) -> None:
        self.events: list[CollectiveEvent] = []
        self.comm_module_counts: dict[str, dict[str, CommCounts]] = {}
        self._tree: ModuleTree | None = None
        #: name of each event's module
        self._modules: list[str] = []
        self._inside = ExitStack()

    @property
    def comm_counts(self) -> CommCounts:
        """Return the counts of `get_comm_counts`."""
        return self.get_comm_counts()

    def get_comm_counts(self) -> CommCounts:
        """Return the number of collectives by name. Names are ``all_reduce``, ``all_gather``, ``reduce_scatter``,
        ``all_to_all``, ``broadcast`` and ``scatter``. Programs may also issue ``gather`` and ``reduce``. Operations of
        the framework can be used as names too (see `CommCounts`)."""
        return CommCounts(Counter(event.kind for event in self.events))

    def get_total_counts(self) -> int:
        """Return the number of collectives."""
        return len(self.events)

    def get_elements(self) -> dict[str, int]:
        """Return the number of elements of the local input tensors of collectives, by name."""
        elements: Counter[str] = Counter()
        for event in self.events:
            elements[event.kind] += math.prod(event.shape)
        return dict(elements)

    def get_bytes(self) -> dict[str, int]:
        """Return the bytes of the local input tensors of collectives, by name."""
        sizes: Counter[str] = Counter()
        for event in self.events:
            sizes[event.kind] += event.bytes
        return dict(sizes)

    def get_parameter_info(self) -> dict[str, dict[str, Any]]:
        """Return the parameters of each called module, by module name and parameter name."""
        modules = {} if self._tree is None else self._tree.modules
        return {name: dict(seen.parameters) for name, seen in modules.items() if seen.parameters}

    def get_sharding_info(self) -> dict[str, tuple[Any, ...]]:
        """Return the placements of distributed parameters: ``{"Mlp.up.weight": (Shard(dim=0),)}``."""
        return {
            f"{module}.{name}": p.placements
            for module, parameters in self.get_parameter_info().items()
            for name, p in parameters.items()
            if isinstance(p, DTensor)
        }

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """Return the called modules, and their collectives by direction, as text.

        Args:
            noise_level: 0 shows only counts and bytes of collectives; from 1 on modules have their class and their
                parameters with placements; from 2 on every collective has a line.
        """
        return comm_tables.as_text(self._records(), noise_level)

    def log_comm_debug_tracing_table_to_file(self, file_name: str = "comm_mode_log.txt", noise_level: int = 3) -> None:
        """Write `generate_comm_debug_tracing_table` to a file."""
        Path(file_name).write_text(self.generate_comm_debug_tracing_table(noise_level), encoding="utf-8")

    def generate_json_dump(self, file_name: str = "comm_mode_log.json", noise_level: int = 3) -> None:
        """Write the content of the table to a JSON file. Each module is an object with its path (``fqn``), class,
        parameters, ``collectives_forward`` and ``collectives_backward``. Its ``children`` are objects of the same
        form."""
        Path(file_name).write_text(json.dumps(comm_tables.as_tree(self._records(), noise_level), indent=4), "utf-8")

    def __enter__(self) -> CommDebugMode:
        self.events.clear()
        self._modules.clear()
        self.comm_module_counts = {GLOBAL: {"forward": CommCounts(), "backward": CommCounts()}}
        platform = get_platform()
        self._tree = ModuleTree(platform, self._listen_to_program)
        self._inside.enter_context(platform.observe(self._tree))
        LISTENERS.append(self._listen)
        return self

    def __exit__(self, *exc_info: object) -> None:
        LISTENERS.remove(self._listen)
        self._inside.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(get_total_counts()={self.get_total_counts()})"

    def _listen(self, event: CollectiveEvent) -> None:
        if not event.bytes:
            return
        assert self._tree is not None
        name = self._tree.current(event.direction)
        self.events.append(event)
        self._modules.append(name)
        for around in self._tree.with_parents(name):
            counts = self.comm_module_counts.setdefault(around, {"forward": CommCounts(), "backward": CommCounts()})
            counts[event.direction].add(event.kind)

    def _listen_to_program(self, kind: str, tensors: list[Any]) -> None:
        """Record a collective that the program issues. Its mesh dimension is unknown."""
        platform = get_platform()
        with platform.no_dispatch():
            count = sum(math.prod(platform.shape_of(x)) for x in tensors)
            shape = tuple(platform.shape_of(tensors[0])) if len(tensors) == 1 else (count,)
            dtype, size = (tensors[0].dtype, count * tensors[0].itemsize) if tensors else (None, 0)
        direction = "backward" if platform.in_backward() else "forward"
        event = CollectiveEvent(kind, None, None, "", shape, dtype, size, {}, None, "", direction)
        # Count the collective even if this rank's input is empty, because other ranks have data.
        self._listen(event if size else CollectiveEvent(kind, None, None, "", shape, dtype, 1, {}, None, "", direction))

    def _records(self) -> comm_tables.Records:
        modules = {} if self._tree is None else self._tree.modules
        return comm_tables.Records(modules, list(zip(self._modules, self.events, strict=True)))
