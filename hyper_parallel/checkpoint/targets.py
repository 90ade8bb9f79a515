"""Tensors that a load fills, their sources in the checkpoint, and mismatches between the two."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hyper_parallel.checkpoint.errors import CheckpointError
from hyper_parallel.checkpoint.index import Index, StoredTensor
from hyper_parallel.checkpoint.near_names import near_name
from hyper_parallel.checkpoint.nest import Kinds, joined, layout_of
from hyper_parallel.checkpoint.optimizer_filling import fill_optimizer
from hyper_parallel.checkpoint.values import KIND, decode
from hyper_parallel.platform import Platform

__all__ = ["Filling", "Target"]

#: Maximum number of listed problems of each kind in a message.
_LISTED = 20


class Target(NamedTuple):
    """A tensor to be filled.

    Attributes:
        tensor: plain tensor or DTensor.
        stored: name of its source in the checkpoint.
        singleton: dimension of size 1 that either ``tensor`` or its source has, while the other lacks it; None if
            shapes agree.
    """

    tensor: Any
    stored: str
    singleton: int | None = None


class _MisfitError(Exception):
    """Error for an entry of the checkpoint that does not match the corresponding value of the state."""


class Filling:
    """Tensors and values that one load fills.

    Args:
        index: index of the checkpoint.
        platform: platform of the tensors.
        strict: whether missing and unexpected entries are errors.
        convert_dtypes: whether to convert tensors of another dtype.
        rank: index of this rank.
        world_size: number of ranks that load.

    Attributes:
        targets: tensors to fill, in the order in which they were found.
        place: path of the checkpoint, for messages.
        takes_meta: whether tensors without values are accepted, which get memory later.
        parameter_names: id of a tensor of the modules -> its name.
        check_files: function that raises CheckpointError unless a tensor is in the files. It is called before memory is
            allocated for the tensor.
    """

    place: Path | str = ""
    takes_meta = False
    check_files: Callable[[StoredTensor], None] | None = None

    def __init__(
        self, index: Index, platform: Platform, strict: bool, convert_dtypes: bool, rank: int, world_size: int
    ) -> None:
        self.index, self.platform, self._strict = index, platform, strict
        self._convert, self._rank, self._world_size = convert_dtypes, rank, world_size
        self.targets: list[Target] = []
        self._kinds = Kinds(platform)
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._wrong: list[str] = []
        self._keys: set[str] = set()  # names that the checkpoint has next to missing ones
        self._wanted: dict[int, tuple[Any, list[str]]] = {}  # id of a tensor -> it, and all its names
        self._actions: list[Callable[[], None]] = []
        self._asked: set[str] = set()  # names of the checkpoint that some part of the state matches
        self._singletons: dict[int, int] = {}  # id of a parameter -> its dimension in `StateRole.singleton_dims`
        self._owned: list[str] = []  # prefixes below which other names are unexpected

    # ---------------------------------------------------------------------- the nest
    def match(self, state: Any) -> Any:
        """Match the values of the state with the entries of the checkpoint. Return the result of `load`, which is
        complete after `finish`.

        Raises:
            ValueError: if anything does not match. The message lists all problems.
        """
        self.parameter_names = self._kinds.parameter_names(state)
        result = self._visit(state, self.index.values, "")
        for x, names in self._wanted.values():
            self._choose(x, names)
        self._look_for_unexpected()
        self._raise_problems()
        return result

    def digest(self) -> str:
        """Return a short digest of the names of the tensors to fill."""
        return hashlib.sha256("\n".join(target.stored for target in self.targets).encode()).hexdigest()

    def at_end(self, action: Callable[[], None]) -> None:
        """Register ``action``, which `finish` will call."""
        self._actions.append(action)

    def finish(self) -> None:
        """Set the state of objects and optimizers, when the tensors have their values."""
        for action in self._actions:
            action()

    def _visit(self, x: Any, saved: Any, path: str) -> Any:
        kind = self._kinds.of(x, path)
        if kind == "module":
            self._owned.append(path)
            self._singletons.update(_singletons(x, self.platform))
            for name, tensor in self.platform.saved_tensors(x):
                self._want(tensor, joined(path, name))
            return x
        if kind == "tensor":
            self._want(x, path)
            return x
        if kind == "optimizer":
            if self._is(saved, "optimizer", path):
                self._owned.append(path)
                fill_optimizer(self, x, saved, path)
            return x
        if kind == "object":
            self._object(x, saved, path)
            return x
        if kind == "dict":
            inside = _items(saved)
            if inside is not None:
                return {key: self._below(value, inside, key, joined(path, str(key))) for key, value in x.items()}
        if kind in ("list", "tuple"):
            items = saved if isinstance(saved, list) else saved.get("items") if isinstance(saved, dict) else None
            if isinstance(items, list) and len(items) == len(x):
                parts = [self._visit(v, s, joined(path, str(i))) for i, (v, s) in enumerate(zip(x, items, strict=True))]
                return parts if kind == "list" else tuple(parts)
        if kind in ("dict", "list", "tuple") and (inner := self._to_be_filled(x, path)):
            self._wrong.append(
                f"{inner} of the state cannot be filled: the checkpoint has a value of another kind at "
                f"{path or 'the top'}"
            )
            return x
        return self._value(saved, path)

    def _to_be_filled(self, x: Any, path: str) -> str | None:
        """Return the path of the first part of a container that can be filled, or None."""
        kind = self._kinds.of(x, path)
        if kind not in ("dict", "list", "tuple"):
            return None if kind == "value" else path
        items = x.items() if kind == "dict" else enumerate(x)
        return next(filter(None, (self._to_be_filled(v, joined(path, str(k))) for k, v in items)), None)

    def _below(self, value: Any, inside: dict[Any, Any], key: Any, path: str) -> Any:
        if key not in inside:
            kind = self._kinds.of(value, path)
            if kind in ("module", "tensor") or (kind == "dict" and self._to_be_filled(value, path)):
                return self._visit(value, {}, path)  # below a module, and in a file of weights, names are all there is
            self._missing.append(path)
            self._keys.update(joined(path.removesuffix(str(key)).removesuffix("."), str(other)) for other in inside)
            return value
        return self._visit(value, inside[key], path)

    def _value(self, saved: Any, path: str) -> Any:
        """Return the saved value, with new tensors in the place of saved tensors."""

        def special(x: dict[str, Any]) -> Any:
            if x[KIND] == "tensor":
                return self.new_tensor(x["name"], None)
            if x[KIND] == "object":
                return decode(x["state"], special)
            if x[KIND] == "ranks":
                return self._own(x)
            raise _MisfitError(f"the checkpoint has a {x[KIND]} here, and the state has a plain value")

        try:
            return decode(saved, special)
        except _MisfitError as error:
            self._wrong.append(f"{path}: {error}")
            return None

    def _is(self, saved: Any, kind: str, path: str) -> bool:
        if isinstance(saved, dict) and saved.get(KIND) == kind:
            return True
        self._wrong.append(f"{path}: the state has a {kind}, and the checkpoint has a value of another kind")
        return False

    def _object(self, x: Any, saved: Any, path: str) -> None:
        if getattr(x, "per_rank", False):
            if self._is(saved, "ranks", path):
                states = [decode(saved["values"][i]) for i in saved["of"]]
                if hasattr(x, "load_state_of_ranks"):
                    self.at_end(lambda: x.load_state_of_ranks(states, self._rank, self._world_size))
                elif len(states) == self._world_size:
                    self.at_end(lambda: x.load_state_dict(states[self._rank]))
                else:
                    self._wrong.append(
                        f"{path}: {len(states)} ranks saved a state each, and {self._world_size} ranks load: define "
                        f"{type(x).__name__}.load_state_of_ranks(states, rank, world_size)"
                    )
        elif self._is(saved, "object", path):
            state = self._visit_object(x.state_dict(), saved["state"], path)
            self.at_end(lambda: x.load_state_dict(state))

    def _visit_object(self, now: Any, saved: Any, path: str) -> Any:
        """Return the state of an object as it was saved. Tensors that it has now are reused and filled."""
        if isinstance(saved, dict) and saved.get(KIND) == "tensor" and self.platform.is_tensor(now):
            self._want(now, path)
            return now
        if isinstance(saved, dict) and KIND not in saved:
            inside = now if isinstance(now, dict) else {}
            return {k: self._visit_object(inside.get(k), v, joined(path, k)) for k, v in saved.items()}
        return self._value(saved, path)

    def _own(self, saved: dict[str, Any]) -> Any:
        of = saved["of"]
        return decode(saved["values"][of[self._rank]]) if self._rank < len(of) else None

    # ---------------------------------------------------------------------- tensors
    def _want(self, x: Any, name: str) -> None:
        """Record that ``x`` is to be filled with the tensor called ``name``.

        A tied tensor ``x`` may be recorded under several names.
        """
        self._kinds.check_tensor(x, name)
        self._wanted.setdefault(id(x), (x, []))[1].append(name)

    def _choose(self, x: Any, names: list[str]) -> None:
        """Find the tensor of the checkpoint that fills ``x``, which has the ``names`` in the state."""
        stored = [*dict.fromkeys(found for n in names if (found := self.index.find(n)) is not None)]
        self._asked.update(names, stored)
        if not stored:
            self._missing.extend(names)
        elif len(stored) > 1 and self._strict:
            self._wrong.append(
                f"{' and '.join(map(repr, names))} are one tied tensor in the state, and {len(stored)} tensors in the "
                "checkpoint: untie them, or pass strict=False, which loads the first"
            )
        elif self.platform.is_meta(x) and not self.takes_meta:
            self._wrong.append(f"{names[0]} is on the meta device and has no memory: call to_empty() before loading")
        else:
            self.fill(x, stored[0], names[0])

    def fill(self, x: Any, stored: str, name: str, parameter: Any = None) -> None:
        """Fill ``x`` with a tensor of the checkpoint, if shape and dtype match. For optimizer state, ``parameter`` is
        its parameter."""
        self._asked.add(stored)
        there, shape = self.index.tensors[stored], tuple(x.shape)
        singleton = self.singleton(x if parameter is None else parameter, shape, there)
        layout = layout_of(x)
        if layout is not None and any(p.is_partial() for p in layout.placements):
            self._wrong.append(
                f"{name} is placed {list(layout.placements)}: a Partial() tensor cannot be loaded into. Redistribute "
                "it to Replicate() or Shard(dim) first"
            )
        elif there.shape != shape and singleton is None:
            self._wrong.append(f"{name} has shape {shape} in the state and {there.shape} in the checkpoint")
        elif there.dtype not in self.platform.dtypes:
            self._wrong.append(
                f"{name} has dtype {there.dtype} in the checkpoint, which {self.platform.name} does not support"
            )
        elif self.platform.dtypes[there.dtype] != x.dtype and not self._convert:
            self._wrong.append(
                f"{name} has dtype {x.dtype} in the state and {there.dtype} in the checkpoint: load with "
                "convert_dtypes=True"
            )
        else:
            self.targets.append(Target(x, stored, singleton))

    def singleton(self, parameter: Any, shape: tuple[int, ...], there: StoredTensor) -> int | None:
        """Return `Target.singleton` for a tensor of ``shape``, which is ``parameter`` or its optimizer state."""
        dim = self._singletons.get(id(parameter))
        longer, shorter = (shape, there.shape) if len(shape) > len(there.shape) else (there.shape, shape)
        if dim is None or len(longer) != len(shorter) + 1 or longer[dim] != 1:
            return None
        return dim if shorter == (*longer[:dim], *longer[dim + 1 :]) else None

    def new_tensor(self, stored: str, layout: Any, parameter: Any = None) -> Any:
        """Return a new tensor to fill, plain or with ``layout``. For optimizer state, ``parameter`` is its
        parameter."""
        found = self.index.find(stored)
        if found is None:
            raise CheckpointError(
                f"the index is damaged: it refers to tensor {stored!r}, but does not list this tensor"
            )
        stored, there, platform = found, self.index.tensors[found], self.platform
        if there.dtype not in platform.dtypes:
            raise _MisfitError(f"tensor {stored!r} has dtype {there.dtype}, which {platform.name} does not support")
        if self.check_files is not None:
            self.check_files(there)
        singleton = None if parameter is None else self.singleton(parameter, tuple(parameter.shape), there)
        shape = there.shape if singleton is None else tuple(parameter.shape)
        dtype, shape = platform.dtypes[there.dtype], shape if layout is None else layout.local_shape
        x = platform.factory("empty", shape, None, dtype)
        if layout is not None:
            x = platform.wrap(x, layout)
        self._asked.add(stored)
        self.targets.append(Target(x, stored, singleton))
        return x

    def names_below(self, prefix: str) -> Iterator[str]:
        """Yield names of the checkpoint's tensors below a path."""
        for name in (*self.index.tensors, *self.index.aliases):
            if not prefix or name.startswith(f"{prefix}."):
                yield name

    # ---------------------------------------------------------------------- problems
    def wrong(self, problem: str) -> None:
        """Record a value that does not match; ``problem`` describes it for the message."""
        self._wrong.append(problem)

    def lacks(self, name: str) -> None:
        """Record a name that the checkpoint lacks."""
        self._missing.append(name)

    def asked(self, name: str) -> None:
        """Record that the state matches the checkpoint's entry of that name."""
        self._asked.add(name)

    def _look_for_unexpected(self) -> None:
        for prefix in self._owned:
            for name in self.names_below(prefix):
                found = self.index.find(name)
                if name not in self._asked and found not in self._asked:
                    self._unexpected.append(name)

    def _raise_problems(self) -> None:
        wrong, missing, unexpected = self._wrong, [*dict.fromkeys(self._missing)], [*dict.fromkeys(self._unexpected)]
        problems = [*wrong] if not self._strict else [*wrong, *missing, *unexpected]
        if not problems:
            return
        listed = _some(wrong)
        if self._strict:
            # Look up similar names only for listed problems, because it is slow for many names.
            others = [*(self._unexpected or self.index.tensors), *self._keys]
            listed += _some(missing, lambda name: f"missing: {name}{near_name(name, others)}")
            listed += _some(unexpected, lambda name: f"unexpected: {name}")
        raise ValueError(
            f"the checkpoint{self.place and f' {self.place}'} does not fit the state"
            + ("" if not self._strict else " (strict=False leaves out missing and unexpected entries)")
            + "".join(f"\n  {line}" for line in listed)
        )


def _singletons(root: Any, platform: Platform) -> Iterator[tuple[int, int]]:
    """Yield (id of a parameter, its dimension of size 1), from `StateRole.singleton_dims`."""
    known = platform.singleton_dims
    for _, module in platform.named_modules(root):
        names = next((known[cls] for cls in type(module).__mro__ if cls in known), {})
        for name, p in platform.named_parameters(module):
            if name in names:
                yield id(p), names[name]


def _some(problems: Sequence[str], line: Callable[[str], str] = str) -> list[str]:
    """Return a line for each of the first problems, and a line with the number of further ones."""
    more = len(problems) - _LISTED
    return [*map(line, problems[:_LISTED]), *([f"... and {more} more"] if more > 0 else [])]


def _items(saved: dict[str, Any]) -> dict[Any, Any] | None:
    """Return the items of a saved dict by key. A module has no items, because its tensors have names. Return None for
    any other value."""
    kind = saved.get(KIND, "") if isinstance(saved, dict) else None
    if kind == "dict":
        return {decode(key): value for key, value in saved["items"]}
    return {"": saved, "module": {}}.get(kind) if isinstance(kind, str) else None
