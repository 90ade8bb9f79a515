"""Inputs of a module that are read only by several of its column-parallel layers.

Such an input is read once, before the module, so that backward has one collective for it. A graph cannot mark a tensor
as eager mode does. So the source is analysed, and in case of doubt each layer has a collective of its own.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType

from mindspore import nn

__all__ = ["shared_inputs"]

#: Attributes of a tensor that do not depend on its values, and so have no gradient.
_FACTS = ("shape", "dtype", "ndim")


def shared_inputs(cls: type, layers: frozenset[str]) -> dict[int, frozenset[str]]:
    """Return which ``layers`` share an input of ``construct``: position of the input -> names of the layers.

    ``layers`` are names of attributes. An input is shared if at least two layers read it, and no other code does. These
    layers must read no other tensor.
    """
    try:
        construct = _Method(cls, "construct")
        found = {i: _Readers(cls, layers).of(construct, name) for i, name in enumerate(construct.inputs)}
    except (OSError, TypeError, SyntaxError):
        return {}  # the class has no source
    return {i: names for i, names in found.items() if names is not None and len(names) > 1}


class _Method:
    """The parsed source of a method, with the names of the method's arguments."""

    def __init__(self, cls: type, name: str) -> None:
        self.name = name
        self.tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(cls, name)))).body[0]
        assert isinstance(self.tree, ast.FunctionDef)
        given = self.tree.args
        self.me, *self.inputs = [a.arg for a in (*given.posonlyargs, *given.args)]
        #: Parent expression by id of each expression.
        self.around = {id(part): node for node in ast.walk(self.tree) for part in ast.iter_child_nodes(node)}

    def uses(self, name: str) -> Iterator[tuple[ast.Name, ast.AST]]:
        """Yield each use of a name, with its parent expression."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and node.id == name:
                yield node, self.around[id(node)]

    def defines_functions(self) -> bool:
        """Return whether the code defines functions, in which names may have another meaning."""
        inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        return any(isinstance(node, inner) and node is not self.tree for node in ast.walk(self.tree))


class _Readers:
    """Search for the layers that read one input."""

    def __init__(self, cls: type, layers: frozenset[str]) -> None:
        self.cls, self.layers = cls, layers
        self.visited: dict[str, _Method] = {}
        self.calls = 0

    def of(self, construct: _Method, name: str) -> frozenset[str] | None:
        """Return the layers that read the input. None if other code reads it, or the layers read other tensors."""
        found = self._in(construct, name)
        if found is None or not self._are_called_with_nothing_else(frozenset(found)):
            return None
        return frozenset(found)

    def _in(self, method: _Method, name: str) -> set[str] | None:
        if method.name in self.visited or method.defines_functions():
            return None
        self.visited[method.name] = method
        found: set[str] = set()
        for use, around in method.uses(name):
            if isinstance(around, ast.Attribute) and around.attr in _FACTS and isinstance(around.ctx, ast.Load):
                continue
            called = self._called(method, around, use)
            if called is None:
                return None
            if called in self.layers:
                found.add(called)
                self.calls += 1
                continue
            if not isinstance(getattr(self.cls, called, None), FunctionType):
                return None
            inner = _Method(self.cls, called)
            below = self._in(inner, inner.inputs[0]) if len(inner.inputs) == 1 else None
            if below is None:
                return None
            found |= below
        return found

    @staticmethod
    def _called(method: _Method, around: ast.AST, use: ast.Name) -> str | None:
        """Return ``name`` if the expression is ``self.name(use)``, else None."""
        if not (isinstance(around, ast.Call) and around.args == [use] and not around.keywords):
            return None
        function = around.func
        own = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
        return function.attr if own and function.value.id == method.me else None  # type: ignore[attr-defined]

    def _are_called_with_nothing_else(self, layers: frozenset[str]) -> bool:
        mentioned = 0
        for method in self._methods():
            for _, around in method.uses(method.me):
                if not isinstance(around, ast.Attribute):
                    return False  # the module itself is passed to other code
                mentioned += around.attr in layers and isinstance(around.ctx, ast.Load)
            strings = (node.value for node in ast.walk(method.tree) if isinstance(node, ast.Constant))
            if any(isinstance(text, str) and text in layers for text in strings):
                return False
        return mentioned == self.calls

    def _methods(self) -> Iterator[_Method]:
        """Yield all methods of the class that are not inherited from MindSpore's cell."""
        for name in dir(self.cls):
            function = getattr(self.cls, name, None)
            if (
                isinstance(function, FunctionType)
                and name != "__init__"
                and getattr(nn.Cell, name, None) is not function
            ):
                yield self.visited.get(name) or _Method(self.cls, name)
