"""Observation of a program's operations on plain tensors, for `core.plain_code`.

A tensor with marks gets a class whose operations arrive here, as operations of DTensors arrive at core. The tensor gets
its plain class back when its marks are removed, or the observation ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from mindspore import Tensor

from hyper_parallel.platform.contract.observation import Follower
from hyper_parallel.platform.mindspore.processes.communication import is_collective
from hyper_parallel.platform.mindspore.tensors.tensor import InterceptedTensor, NoDispatch, is_dispatching
from hyper_parallel.platform.watching import tensors_in

__all__ = ["MarkedTensor", "follow", "write_mark"]


class _Followers:
    """Active followers, innermost last, and the tensors with marks."""

    active: ClassVar[list[Follower]] = []
    marked: ClassVar[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()


class MarkedTensor(InterceptedTensor):
    """A plain tensor with marks, while its program is observed."""

    @property
    def shape(self) -> tuple[int, ...]:
        given = Tensor.shape.__get__(self)
        if not is_dispatching() or not _Followers.active or _Followers.active[-1].paused:
            return given
        return _Followers.active[-1].sizes(self, given)

    def __deepcopy__(self, memo: dict) -> Any:
        with NoDispatch():
            return Tensor.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with NoDispatch():
            return Tensor.__reduce_ex__(self, protocol)

    def __fallback__(self, func: Any, args: Sequence[Any], kwargs: dict | None = None) -> Any:
        if is_collective(func.name) and _layouts(args, kwargs) == {None}:
            return self._follow(None, func, tuple(args), kwargs or {})
        return super().__fallback__(func, args, kwargs)

    def _without_row(self, function: Any, args: tuple, kwargs: dict) -> Any:
        return type(self)._dispatch(None, function, args, kwargs)

    def _whole(self, what: str) -> Tensor:
        return Tensor._make_subclass(Tensor, self)

    @staticmethod
    def _follow(row: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        if _layouts(args, kwargs) != {None}:
            return InterceptedTensor._dispatch(row, func, args, kwargs)
        with NoDispatch():
            if not _Followers.active or _Followers.active[-1].paused:
                return func(*args, **kwargs)
            given = list(tensors_in((args, kwargs), Tensor))

            def call() -> Any:
                y = func(*args, **kwargs)
                for x in tensors_in(y, Tensor):
                    if type(x) is MarkedTensor and not any(x is other for other in given):
                        x.__class__ = Tensor
                return y

            return _Followers.active[-1].operation(row, func, args, kwargs, call)


def _layouts(args: Sequence[Any], kwargs: dict | None) -> set[Any]:
    """Return the layouts of the tensors in arguments; None for a plain tensor."""
    return {None, *(getattr(x, "_layout", None) for x in tensors_in((tuple(args), kwargs), Tensor))}


MarkedTensor._dispatch = staticmethod(MarkedTensor._follow)  # type: ignore[assignment]


def write_mark(x: Any, mark: Any) -> None:
    """Set the mark of a plain tensor."""
    x._marks_of_plain = mark
    if mark is None and type(x) is MarkedTensor:
        x.__class__ = Tensor
    elif mark is not None and type(x) is Tensor and _Followers.active:
        x.__class__ = MarkedTensor
        _Followers.marked[id(x)] = x


@contextmanager
def follow(follower: Follower) -> Iterator[None]:
    """Return a context that passes operations on marked plain tensors to ``follower``; see `Platform.follow`."""
    _Followers.active.append(follower)
    try:
        yield
    finally:
        _Followers.active.remove(follower)
        for x in list(_Followers.marked.values()):
            if type(x) is MarkedTensor:
                x.__class__ = Tensor
        _Followers.marked.clear()
