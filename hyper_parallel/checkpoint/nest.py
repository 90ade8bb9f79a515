"""Flattening of a nest of modules, optimizers, tensors and values: tensors by name, and all else as JSON.

Names are paths: the keys of the dicts, then the path inside a module, joined by dots. An optimizer's tensors are named
after the parameter: ``optimizer.model.layers.0.weight.exp_avg``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hyper_parallel.checkpoint.values import KIND, encode, is_key, is_plain
from hyper_parallel.core.data_parallel.unit import shows_whole_parameters
from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.platform import Platform

__all__ = ["Flat", "Kinds", "check_depth", "flatten", "joined", "layout_of"]

#: Maximum nesting depth of containers. The functions here are recursive, and Python limits recursion.
DEEPEST = 100


def joined(path: str, name: str) -> str:
    """Return ``path`` extended by ``name``, with a dot between the two."""
    return f"{path}.{name}" if path and name else path or name


def layout_of(x: Any) -> Any:
    """Return the layout of a DTensor; None for a plain tensor."""
    return x._layout if isinstance(x, DTensor) else None


def check_depth(state: Any) -> None:
    """Raise ValueError for containers that are nested too deeply, such as a list that contains itself."""
    left = [(state, 0)]
    while left:
        x, depth = left.pop()
        if depth > DEEPEST:
            raise ValueError(
                f"the state is nested more than {DEEPEST} levels deep, or contains itself: flatten the deep part into "
                "one dict"
            )
        if isinstance(x, (Mapping, list, tuple)):
            left += [(value, depth + 1) for value in (x.values() if isinstance(x, Mapping) else x)]


class Kinds:
    """Classification of the values in a nest, for example as tensor or module, on one platform."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    def of(self, x: Any, path: str) -> str:
        """Return the kind of ``x``: ``"value"``, ``"tensor"``, ``"module"``, ``"optimizer"``, ``"dict"``, ``"list"``,
        ``"tuple"`` or ``"object"``. An ``"object"`` has the methods ``state_dict`` and ``load_state_dict``.

        Raises:
            TypeError: for any other object.
        """
        platform = self.platform
        if is_plain(x):
            return "value"
        if platform.is_optimizer(x):
            return "optimizer"
        if isinstance(x, platform.Module):
            return "module"
        if platform.is_tensor(x):
            self.check_tensor(x, path)
            return "tensor"
        for kind, cls in (("dict", Mapping), ("list", list), ("tuple", tuple)):
            if isinstance(x, cls):
                return kind
        if callable(getattr(x, "state_dict", None)) and callable(getattr(x, "load_state_dict", None)):
            return "object"
        raise TypeError(
            f"{path or 'the state'} is a {type(x).__name__}. A checkpoint takes modules, optimizers, tensors, "
            "numbers, strings, bytes, None, NumPy arrays, dicts, lists and tuples of such values, and objects with "
            "state_dict() and load_state_dict()"
        )

    def check_tensor(self, x: Any, path: str) -> None:
        """Raise TypeError for a tensor subclass that overrides operations, except a DTensor."""
        foreign = None if isinstance(x, DTensor) else self.platform.foreign_tensor(x)
        if foreign is not None:
            raise TypeError(f"{path or 'the state'} is {foreign}")

    def modules(self, x: Any, path: str = "") -> Iterator[tuple[str, Any]]:
        """Yield (path, module) for the modules in a nest."""
        kind = self.of(x, path)
        if kind == "module":
            yield path, x
        elif kind == "dict":
            for name, value in x.items():
                yield from self.modules(value, joined(path, str(name)))
        elif kind in ("list", "tuple"):
            for i, value in enumerate(x):
                yield from self.modules(value, joined(path, str(i)))

    def parameter_names(self, state: Any) -> dict[int, str]:
        """Return id of a tensor -> its name, for the modules in a nest. A tensor with several names gets the first.

        Raises:
            ValueError: inside the forward of a `fully_shard` unit, and for a nest that is too deep.
        """
        check_depth(state)
        names: dict[int, str] = {}
        for path, module in self.modules(state):
            for below, submodule in self.platform.named_modules(module):
                if shows_whole_parameters(submodule):
                    raise ValueError(
                        f"module {joined(path, below)!r} has unsharded parameters at present: do not save or load "
                        "during a forward"
                    )
            for name, x in self.platform.saved_tensors(module):
                names.setdefault(id(x), joined(path, name))
        return names


class Flat:
    """A flattened nest.

    Attributes:
        tensors: tensors by name.
        aliases: further names of the same tensors -> the name in ``tensors``.
        values: the nest as JSON.
        own: path -> this rank's value, for objects with ``per_rank``.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self.aliases: dict[str, str] = {}
        self.values: Any = None
        self.own: dict[str, Any] = {}
        self._names: dict[int, str] = {}

    def add(self, name: str, x: Any) -> None:
        """Add a tensor.

        Raises:
            ValueError: if another tensor has that name, or ``x`` has a pending sum (`Partial`).
        """
        first = self._names.setdefault(id(x), name)
        if name in self.tensors and self.tensors[name] is not x:
            raise ValueError(f"two tensors of the state have the same path {name!r}: choose other keys")
        if first != name:
            self.aliases[name] = first
            return
        layout = layout_of(x)
        if layout is not None and any(p.is_partial() for p in layout.placements):
            raise ValueError(
                f"{name!r} is placed {list(layout.placements)}: redistribute it to Replicate() or Shard(dim) first"
            )
        self.tensors[name] = x


def flatten(state: Any, platform: Platform) -> Flat:
    """Flatten a nest.

    Raises:
        TypeError: for a part that a checkpoint cannot store. The message names it.
        ValueError: as `Flat.add` and `Kinds.parameter_names` raise.
    """
    flat, kinds = Flat(), Kinds(platform)
    names = kinds.parameter_names(state)

    def visit(x: Any, path: str, alone: str = "") -> Any:
        kind = kinds.of(x, path)
        if kind == "value":
            return encode(x)
        if alone and kind in ("tensor", "module", "optimizer", "object"):
            raise TypeError(f"{path} is a {kind}, but the per-rank state of {alone} may only contain plain values")
        if kind == "tensor":
            flat.add(path, x)
            return {KIND: "tensor", "name": path}
        if kind == "module":
            for name, tensor in platform.saved_tensors(x):
                kinds.check_tensor(tensor, joined(path, name))
                flat.add(joined(path, name), tensor)
            return {KIND: "module"}
        if kind == "optimizer":
            return _optimizer(x, path)
        if kind == "object":
            inside = x.state_dict()
            check_depth(inside)
            if getattr(x, "per_rank", False):
                flat.own[path] = visit(inside, path, type(x).__name__)
                return {KIND: "ranks", "path": path}
            return {KIND: "object", "state": visit(inside, path)}
        if kind == "dict":
            if all(isinstance(key, str) for key in x) and KIND not in x:
                return {key: visit(value, joined(path, key), alone) for key, value in x.items()}
            for key in x:
                if not is_key(key):
                    raise TypeError(f"a key of {path or 'the state'} is a {type(key).__name__}: use strings")
            return {KIND: "dict", "items": [[encode(k), visit(v, joined(path, str(k)), alone)] for k, v in x.items()]}
        items = [visit(value, joined(path, str(i)), alone) for i, value in enumerate(x)]
        return items if kind == "list" else {KIND: "tuple", "items": items}

    def _optimizer(x: Any, path: str) -> Any:
        state = platform.optimizer_state(x)
        rows, count, groups = iter(state.state), 0, []
        numbers: dict[str, dict[str, Any]] = {}
        for parameters, options in zip(state.parameters, state.options, strict=True):
            called = []
            for p in parameters:
                called.append(names.get(id(p), str(count)))
                count += 1
                for name, value in next(rows).items():
                    if platform.is_tensor(value):
                        flat.add(joined(path, f"{called[-1]}.{name}"), value)
                    else:
                        numbers.setdefault(called[-1], {})[name] = visit(value, joined(path, f"{called[-1]}.{name}"))
            groups.append({"parameters": called, "options": visit(options, joined(path, "options"))})
        return {KIND: "optimizer", "groups": groups, "numbers": numbers}

    flat.values = visit(state, "")
    return flat
