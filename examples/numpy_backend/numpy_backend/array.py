"""The tensor of this framework: a NumPy array with a tape for gradients and the members that core asks of a tensor.

Operations are functions, in `operations` and `layers`. The methods are those that Python's operators need. There are
also those that the contract of HyperParallel names (`hyper_parallel.platform.contract.members`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

__all__ = ["Array", "Node", "Parameter", "gradients", "in_backward", "made", "no_recording", "recording"]

_ORDER = itertools.count()


class _Recording(threading.local):
    on = True
    backwards = 0


_RECORDING = _Recording()


def recording() -> bool:
    """Return whether operations are noted on the tape."""
    return _RECORDING.on


def in_backward() -> bool:
    """Return whether gradients are being computed."""
    return _RECORDING.backwards > 0


@contextmanager
def no_recording() -> Iterator[None]:
    """Inside, nothing is noted."""
    before, _RECORDING.on = _RECORDING.on, False
    try:
        yield
    finally:
        _RECORDING.on = before


class Node:
    """The origin of an array: its operands, and the way from its cotangent to theirs.

    Attributes:
        operands: the arrays that it was computed from.
        back: ``back(cotangent)`` gives a cotangent or None for each of them, by operations that are recorded again.
        order: a later node has a larger one.
    """

    __slots__ = ("back", "operands", "order")

    def __init__(self, operands: Sequence[Array], back: Callable[[Array], Sequence[Array | None]]) -> None:
        self.operands, self.back, self.order = tuple(operands), back, next(_ORDER)


class Array:
    """A NumPy array that remembers how it was made.

    Attributes:
        value: the NumPy array. Views share its memory.
        requires_grad: whether gradients lead to it, or through it.
        node: how it was made; None for a leaf.
        writes: how often its memory was written to, as a list of one number that views share.
    """

    # A slot of its own, so that the class of an array can be changed to one that core's mixin is in front of.
    __slots__ = ("__dict__", "__weakref__", "value")
    value: np.ndarray
    requires_grad: bool = False
    node: Node | None = None
    _grad: Array | None = None

    def __init__(self, value: Any, requires_grad: bool = False) -> None:
        self.value, self.requires_grad = np.asarray(value), requires_grad
        self.writes = [0]

    # ------------------------------------------------------------------------------ properties
    @property
    def shape(self) -> tuple[int, ...]:
        """The shape; of a distributed array, the global one."""
        return self.value.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """NumPy's dtype."""
        return self.value.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.value.itemsize

    @property
    def grad(self) -> Any:
        """The gradient that `gradients` left here."""
        return self._grad

    @property
    def _version(self) -> int:
        return self.writes[0]

    def requires_grad_(self, on: bool = True) -> Array:
        """Switch gradients on or off."""
        self.requires_grad = on
        return self

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r})"

    __hash__ = object.__hash__

    # ------------------------------------------------------------------------------ Python's operators, and methods
    def __bool__(self) -> bool:
        return bool(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(len(self))])


class Parameter(Array):
    """An array that a module learns; of a distributed array, a distributed one."""

    def __new__(cls, value: Any = None, requires_grad: bool = True) -> Parameter:
        return object.__new__(getattr(value, "_parameter_class", cls))

    def __init__(self, value: Any, requires_grad: bool = True) -> None:
        if not isinstance(value, Array):
            super().__init__(value, requires_grad)
        else:
            super().__init__(value.value, requires_grad)
            self.__dict__.update({name: x for name, x in value.__dict__.items() if name == "_layout"})


def made(value: Any, operands: Sequence[Any], back: Callable[[Array], Sequence[Array | None]]) -> Array:
    """The result of an operation: ``value``, and on the tape how it was computed, if a gradient can come through."""
    y = Array(value)
    arrays = [x for x in operands if isinstance(x, Array)]
    if _RECORDING.on and any(x.requires_grad for x in arrays) and np.issubdtype(y.dtype, np.inexact):
        y.requires_grad, y.node = True, Node(arrays, back)
    return y


def gradients(output: Array, inputs: Sequence[Array], cotangent: Array, create_graph: bool = False) -> list[Any]:
    """The gradients of ``(output * cotangent).sum()`` by leaves or other arrays; None where there is none.

    Args:
        output: the output to differentiate.
        inputs: the arrays to differentiate by.
        cotangent: of the output, of its shape.
        create_graph: whether the gradients can be differentiated in turn.
    """
    found: dict[int, Any] = {id(output): cotangent}
    nodes = {id(output): output}
    waiting = [output] if output.node is not None else []
    seen = {id(output)}
    ordered: list[Array] = []
    while waiting:
        y = waiting.pop()
        ordered.append(y)
        for x in y.node.operands:  # type: ignore[union-attr]
            if id(x) not in seen and x.requires_grad:
                seen.add(id(x))
                nodes[id(x)] = x
                if x.node is not None:
                    waiting.append(x)
    before, _RECORDING.on = _RECORDING.on, create_graph
    _RECORDING.backwards += 1
    try:
        for y in sorted(ordered, key=lambda y: -y.node.order):  # type: ignore[union-attr]
            received = found.get(id(y))
            if received is None:
                continue
            node: Any = y.node
            for x, part in zip(node.operands, node.back(received), strict=True):
                if part is None or not x.requires_grad:
                    continue
                known = found.get(id(x))
                found[id(x)] = part if known is None else known + part
    finally:
        _RECORDING.on = before
        _RECORDING.backwards -= 1
    return [found.get(id(x)) for x in inputs]
