"""Switches that change how operations treat what they have no rule for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["implicit_replication", "is_implicit_replication", "is_strict", "strict"]

_STRICT: ContextVar[bool] = ContextVar("hyper_parallel_strict", default=False)
_IMPLICIT: ContextVar[bool] = ContextVar("hyper_parallel_implicit_replication", default=False)


@contextmanager
def strict() -> Iterator[None]:
    """Inside, an operation without a sharding rule is an error instead of running on gathered operands.

    Example:
        >>> from hyper_parallel import strict
        >>> with strict():
        ...     pass
    """
    token = _STRICT.set(True)
    try:
        yield
    finally:
        _STRICT.reset(token)


def is_strict() -> bool:
    """Whether the caller is inside `strict`."""
    return _STRICT.get()


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, a plain tensor that meets a distributed one counts as replicated: the same value on every rank.

    Example:
        >>> from hyper_parallel import implicit_replication
        >>> with implicit_replication():
        ...     pass

    Source: ``torch.distributed.tensor.experimental.implicit_replication``.
    """
    token = _IMPLICIT.set(True)
    try:
        yield
    finally:
        _IMPLICIT.reset(token)


def is_implicit_replication() -> bool:
    """Whether the caller is inside `implicit_replication`."""
    return _IMPLICIT.get()
