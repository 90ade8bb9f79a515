"""Results of `CommDebugMode` as text and as nested dicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hyper_parallel.core.communication.recorder import CollectiveEvent
from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.debug.module_tree import GLOBAL, SeenModule

__all__ = ["Records", "as_text", "as_tree"]

_DIRECTIONS = ("forward", "backward")


class Records(NamedTuple):
    """Modules and collectives to show.

    Attributes:
        modules: modules by name.
        events: each collective with the name of its module.
    """

    modules: Mapping[str, SeenModule]
    events: Sequence[tuple[str, CollectiveEvent]]

    def within(self, name: str, direction: str) -> list[CollectiveEvent]:
        """Return the collectives of a module and its submodules."""
        return [
            event
            for module, event in self.events
            if event.direction == direction and name in (*self.modules[module].parents, module)
        ]

    def of(self, name: str, direction: str) -> list[CollectiveEvent]:
        """Return the collectives of a module, without its submodules."""
        return [event for module, event in self.events if event.direction == direction and module == name]


def as_text(records: Records, noise_level: int) -> str:
    """Return the text for `CommDebugMode.generate_comm_debug_tracing_table`."""
    return "".join(f"{line}\n" for line in _lines(records, GLOBAL, 0, noise_level)) if records.modules else ""


def _lines(records: Records, name: str, depth: int, noise_level: int) -> Iterator[str]:
    seen, indent = records.modules[name], "  " * depth
    yield indent + name
    if noise_level > 0 and seen.kind:
        yield f"{indent}  *module type: {seen.kind}"
        if seen.parameters:
            yield f"{indent}  *parameters"
            yield from (f"{indent}    *{key}: {_placed(p)}" for key, p in seen.parameters.items())
    for direction in _DIRECTIONS:
        events = records.within(name, direction)
        if not events:
            continue
        yield f"{indent}  {direction.upper()} PASS"
        for kind, count in Counter(event.kind for event in events).items():
            size = sum(event.bytes for event in events if event.kind == kind)
            yield f"{indent}    *{kind}: {count} ({size} bytes)"
        if noise_level > 1:
            yield from (f"{indent}    **{_described(event)}" for event in records.of(name, direction))
    for child in seen.children:
        yield from _lines(records, child, depth + 1, noise_level)


def _described(event: CollectiveEvent) -> str:
    where = "" if event.mesh is None or event.mesh_dim is None else f" along {event.mesh.dim_label(event.mesh_dim)}"
    return f"{event.kind}{f' ({event.op})' if event.op else ''} of {event.shape} {event.dtype}{where}"


def _placed(p: Any) -> str:
    return str(tuple(p.placements)) if isinstance(p, DTensor) else "not distributed"


def as_tree(records: Records, noise_level: int) -> dict[str, Any]:
    """Return the nested dicts for `CommDebugMode.generate_json_dump`."""
    return _tree(records, GLOBAL, noise_level) if records.modules else {}


def _tree(records: Records, name: str, noise_level: int) -> dict[str, Any]:
    seen = records.modules[name]
    found: dict[str, Any] = {"fqn": name, "module_type": "", "parameters": []}
    if noise_level > 0:
        found["module_type"] = seen.kind
        found["parameters"] = [[key, _placed(p)] for key, p in seen.parameters.items()]
    for direction in _DIRECTIONS:
        events = records.within(name, direction)
        found[f"collectives_{direction}"] = [list(item) for item in Counter(e.kind for e in events).items()]
        found[f"bytes_{direction}"] = sum(event.bytes for event in events)
        if noise_level > 1:
            found[f"operations_{direction}"] = [_described(event) for event in records.of(name, direction)]
    found["children"] = [_tree(records, child, noise_level) for child in seen.children]
    return found
