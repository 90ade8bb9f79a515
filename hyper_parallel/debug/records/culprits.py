"""The module that caused a difference, found from the calls that produced and consumed a tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hyper_parallel.debug.records.files import Call, Record

__all__ = ["Culprits", "Links"]

Key = tuple[str, int, str, int, str, str]


class Links:
    """Look-up of a record's tensors by any call that produced or consumed a tensor, not only by the first call."""

    def __init__(self, record: Record, tensors: Mapping[Key, Any]) -> None:
        self._calls = {(c.step, c.path, c.number): c for c in record.calls}
        self._tensors = tensors
        self._keys: dict[tuple[bool, int], Key] = {}
        for key, tensor in tensors.items():
            if tensor.entry.tensor >= 0:
                self._keys.setdefault((key[0] == "gradient", tensor.entry.tensor), key)

    def same(self, key: Key, other: Links, there: Key) -> Key | None:
        """Return the key in ``other`` of the tensor that corresponds to ``key``.

        Two tensors correspond if they have the same position among the inputs or outputs of their calls. ``there`` is
        the key of any tensor of the other call.
        """
        of = key[5] if key[0] == "gradient" else key[0]
        here, call = self._calls.get((key[1], key[2], key[3])), other._calls.get((there[1], there[2], there[3]))
        if here is None or call is None or of not in ("input", "output"):
            return None
        own, theirs = (here.inputs, call.inputs) if of == "input" else (here.outputs, call.outputs)
        number = self._tensors[key].entry.tensor
        if number not in own or len(own) != len(theirs):
            return None
        return other._keys.get((key[0] == "gradient", theirs[own.index(number)]))


class Culprits:
    """Calls of a record, and the tensors between these calls.

    Args:
        record: the record of the calls.
        tensors: tensors of the record, by key.
    """

    def __init__(self, record: Record, tensors: Mapping[Key, Any]) -> None:
        self._calls = record.calls
        self._index = {(c.step, c.path, c.number): i for i, c in enumerate(self._calls)}
        self._takers: dict[int, list[int]] = {}
        for i, call in enumerate(self._calls):
            for number in call.inputs:
                self._takers.setdefault(number, []).append(i)
        #: tensor -> key of its gradient, and position of the gradient in the order of backward.
        self._gradients = {t.entry.tensor: (key, t.order) for key, t in tensors.items() if key[0] == "gradient"}
        self._of_module: dict[tuple[int, str], list[int]] = {}
        for i, call in enumerate(self._calls):
            self._of_module.setdefault((call.step, call.path), []).append(i)

    def of(self, key: Key, tensor: int) -> str:
        """Return the module or parameter that caused the first departure.

        Args:
            key: key of the departing tensor, under the name of a call that produced or consumed it.
            tensor: number of that tensor.
        """
        kind, step, path, number, _, of = key
        if kind in ("parameter", "buffer", "parameter gradient", "update"):
            return path
        index = self._index.get((step, path, number))
        if index is None:
            return path
        call = self._calls[index]
        if kind == "input":
            top = call
            while top.parent >= 0:
                top = self._calls[top.parent]
            return "the inputs of the run" if tensor in top.inputs else self._code(self._calls[call.parent])
        if kind == "output":
            return path or call.kind
        tensors = call.outputs if of == "output" else call.inputs
        takers = {i for number in tensors for i in self._takers.get(number, ())}
        inner = [i for i in takers if not any(self._is_inside(j, i) for j in takers)]
        inner = [i for i in inner if not (of == "output" and i == index)]
        if not inner:
            # The code that consumes the tensor is outside the outermost call that returns the same tensor.
            around = call.parent
            while of == "output" and around >= 0 and set(tensors) & set(self._calls[around].outputs):
                around = self._calls[around].parent
            return "the loss" if around < 0 else self._code(self._calls[around])
        return ", ".join(dict.fromkeys(self._calls[i].path or self._calls[i].kind for i in sorted(inner)))

    def _code(self, call: Call) -> str:
        return call.path or call.kind

    def _is_inside(self, inner: int, outer: int) -> bool:
        while inner >= 0:
            inner = self._calls[inner].parent
            if inner == outer:
                return True
        return False

    def owner_of(self, step: int, parameter: str) -> str | None:
        """Return the path of the innermost called module that contains a parameter."""
        parts = parameter.split(".")[:-1]
        for count in range(len(parts), -1, -1):
            path = ".".join(parts[:count])
            if (step, path) in self._of_module:
                return path
        return None

    def gradient_of(self, step: int, parameter: str) -> Key | None:
        """Return the key of the last output gradient of the module that contains a parameter."""
        found = self._last_gradient(step, parameter)
        return None if found is None else found[0]

    def backward_of(self, step: int, parameter: str) -> float:
        """Return the position in backward of the module that contains a parameter; infinity if unknown."""
        found = self._last_gradient(step, parameter)
        return math.inf if found is None else found[1]

    def _last_gradient(self, step: int, parameter: str) -> tuple[Key, int] | None:
        path = self.owner_of(step, parameter)
        calls = self._of_module.get((step, path or ""), ()) if path is not None else ()
        found = [
            self._gradients[number] for i in calls for number in self._calls[i].outputs if number in self._gradients
        ]
        return max(found, key=lambda pair: pair[1], default=None)
