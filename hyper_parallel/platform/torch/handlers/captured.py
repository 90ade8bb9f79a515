"""Tensors that functions of the program read besides their arguments: DTensors among them become operands.

Torch runs a `score_mod` on plain local tensors. This function may read tensors from its closure, defaults,
`functools.partial` or the object of a method. All these sources are searched. A copy of the function reads plain
tensors in place of the DTensors.
"""

from __future__ import annotations

import copy
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.platform.torch.basics.tensor import is_dtensor

__all__ = ["Captured"]

_PLAIN = (
    "flex_attention: score_mod or mask_mod reads a plain tensor of shape {} that requires gradients, and each rank "
    "would compute a partial gradient: distribute the tensor with distribute_tensor(x, mesh, None)"
)
_GLOBAL = (
    "flex_attention: score_mod or mask_mod reads the global variable {!r}, a DTensor: pass the DTensor by a closure "
    "or functools.partial, or pass the plain tensor x.full_tensor()"
)


class Captured:
    """Tensors and values that the functions of a call of `flex_attention` read.

    Args:
        score_mod: the function of scores, or None.
        mask: a `BlockMask`, or None.

    Attributes:
        found: the DTensors.

    Raises:
        TypeError: for a plain tensor that requires gradients, and for a DTensor that is a global variable.
    """

    def __init__(self, score_mod: Any, mask: Any) -> None:
        self._score_mod, self._mask = score_mod, mask
        self.found: list[Any] = []
        _Reader(self._note).read(score_mod, frozenset())
        if mask is not None:
            _Reader(self._note).read(mask.mask_mod, frozenset())
            for x in vars(mask).values():
                if is_dtensor(x):
                    raise TypeError(
                        "flex_attention: the block mask consists of DTensors: make the mask from plain tensors"
                    )

    def _note(self, x: Any) -> Any:
        if all(x is not y for y in self.found):
            self.found.append(x)
        return x

    def given(self, plain: list[Tensor]) -> tuple[Any, Any]:
        """Return the `score_mod` and the mask with these plain tensors in place of the DTensors."""
        if not self.found:
            return self._score_mod, self._mask
        by_id = {id(x): y for x, y in zip(self.found, plain, strict=True)}
        reader = _Reader(lambda x: by_id[id(x)])
        score_mod = reader.read(self._score_mod, frozenset())
        mask, function = self._mask, None if self._mask is None else reader.read(self._mask.mask_mod, frozenset())
        if mask is not None and function is not mask.mask_mod:
            mask = copy.copy(mask)
            mask.mask_mod = function
        return score_mod, mask


class _Reader:
    """Visitor of the objects that a function reads. The visitor copies the function if ``swap`` replaces a DTensor."""

    def __init__(self, swap: Any) -> None:
        self._swap, self._open = swap, set[int]()

    def read(self, x: Any, names: frozenset[str]) -> Any:
        """Return ``x``, or its replacement. ``names`` are the attributes that the surrounding code reads."""
        if isinstance(x, Tensor):
            return self._tensor(x)
        if id(x) in self._open or x is None or isinstance(x, (type, ModuleType, str, int, float)):
            return x  # a function may refer to itself
        self._open.add(id(x))
        try:
            return self._read(x, names)
        finally:
            self._open.discard(id(x))

    def _tensor(self, x: Any) -> Any:
        if is_dtensor(x):
            return self._swap(x)
        if x.requires_grad and torch.is_grad_enabled():
            raise TypeError(_PLAIN.format(tuple(x.shape)))
        return x

    def _read(self, x: Any, names: frozenset[str]) -> Any:
        if isinstance(x, FunctionType):
            return self._function(x)
        if isinstance(x, MethodType):
            own = names | _names_of(getattr(x.__func__, "__code__", None))
            held = self.read(x.__self__, own)
            return x if held is x.__self__ else MethodType(x.__func__, held)
        if type(x) is partial:
            function, args = self.read(x.func, names), self._several(x.args, names)
            named = self._several(x.keywords, names)
            same = function is x.func and args is x.args and named is x.keywords
            return x if same else partial(function, *args, **named)
        if type(x) in (tuple, list, dict):
            return self._several(x, names)
        return self._object(x, names)

    def _several(self, x: Any, names: frozenset[str]) -> Any:
        if isinstance(x, dict):
            read = {key: self.read(value, names) for key, value in x.items()}
            return x if all(read[key] is value for key, value in x.items()) else read
        items = [self.read(value, names) for value in x]
        return x if all(a is b for a, b in zip(items, x, strict=True)) else type(x)(items)

    def _function(self, x: FunctionType) -> Any:
        names = _names_of(x.__code__)
        for name in names & x.__globals__.keys():
            if is_dtensor(x.__globals__[name]):
                raise TypeError(_GLOBAL.format(name))
        cells = x.__closure__ or ()
        held = [cell.cell_contents if cell != CellType() else None for cell in cells]
        read = [self.read(value, names) for value in held]
        defaults, named = self._several(x.__defaults__ or (), names), self._several(x.__kwdefaults__ or {}, names)
        same = all(a is b for a, b in zip(read, held, strict=True))
        if same and defaults is (x.__defaults__ or ()) and named == (x.__kwdefaults__ or {}):
            return x
        closure = tuple(old if a is b else CellType(a) for old, a, b in zip(cells, read, held, strict=True))
        made = FunctionType(x.__code__, x.__globals__, x.__name__, defaults or None, closure or None)
        made.__kwdefaults__, made.__module__, made.__qualname__ = named or None, x.__module__, x.__qualname__
        return made

    def _object(self, x: Any, names: frozenset[str]) -> Any:
        """Search a module or another object for DTensors.

        Only attributes are searched that the surrounding code reads, or that the object's own ``forward`` or
        ``__call__`` reads.
        """
        held = getattr(x, "__dict__", None)
        if not isinstance(held, dict):
            return x
        call = getattr(type(x), "forward" if isinstance(x, torch.nn.Module) else "__call__", None)
        names = names | _names_of(getattr(call, "__code__", None))
        changed = {}
        for name, value in held.items():
            if name in names:
                changed[name] = self.read(value, names)
            elif isinstance(x, torch.nn.Module) and name in ("_parameters", "_buffers", "_modules"):
                inner = {key: self.read(one, names) if key in names else one for key, one in value.items()}
                changed[name] = value if all(inner[key] is one for key, one in value.items()) else inner
        if all(held[name] is value for name, value in changed.items()):
            return x
        made = copy.copy(x)
        made.__dict__.update(changed)
        return made


def _names_of(code: Any) -> frozenset[str]:
    """Return the names of globals and attributes that code and its inner functions read."""
    if not isinstance(code, CodeType):
        return frozenset()
    inner = (_names_of(constant) for constant in code.co_consts)
    return frozenset(code.co_names).union(*inner)
