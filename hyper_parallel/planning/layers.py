"""The repeated layers of a model. Data parallelism and recomputation are applied to each layer, and `search` shortens
the list of layers."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.tensor_parallel.checks.paths import Paths

__all__ = ["cut_to", "matching", "module_at", "repeated_layers"]


def repeated_layers(model: Any, platform: Any) -> tuple[str, list[str]]:
    """Return the path of the largest list of equal modules, and the paths of these modules.

    Both results are empty if no list has two equal modules.

    Args:
        model: module of the platform.
        platform: the platform.
    """
    lists: dict[str, list[str]] = {}
    looks: dict[str, list[tuple]] = {}
    for path, module in platform.named_modules(model):
        parent, _, name = path.rpartition(".")
        if name.isdigit():
            lists.setdefault(parent, []).append(path)
            shapes = [
                (below, type(m).__name__, tuple((n, tuple(p.shape)) for n, p in platform.named_parameters(m)))
                for below, m in platform.named_modules(module)
            ]
            looks.setdefault(parent, []).append(tuple(shapes))
    alike = {parent: paths for parent, paths in lists.items() if len(set(looks[parent])) == 1 and len(paths) > 1}
    if not alike:
        return "", []
    parent = max(alike, key=lambda name: (sum(len(look) for look in looks[name]), -len(name)))
    return parent, alike[parent]


def module_at(model: Any, path: str, platform: Any) -> Any:
    """Return the module at a path."""
    return dict(platform.named_modules(model))[path]


def matching(pattern: str, model: Any, platform: Any) -> list[str]:
    """Return the paths of modules that match a pattern, with ``*`` for a segment."""
    return list(Paths(path for path, _ in platform.named_modules(model)).matching(pattern))


def cut_to(model: Any, parent: str, count: int, platform: Any) -> Any:
    """Return a copy of ``model`` without data, with only the first ``count`` layers of the list at ``parent``.

    Raises:
        TypeError: if the module at ``parent`` is no list.
    """
    new = platform.copy_without_data(model)
    layers = module_at(new, parent, platform)
    try:
        del layers[count:]
    except (TypeError, AttributeError) as error:
        raise TypeError(
            f"{parent!r} is a {type(layers).__name__}, and its list of layers cannot be shortened: {error}"
        ) from error
    return new
