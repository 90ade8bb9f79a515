"""Check of the first call of a parallelised model, unless ``HYPER_PARALLEL_CHECK=0``.

The model's calls are followed until the first call that records gradients; then the hooks are removed. A certain
finding that affects a styled module or the output raises ValueError. All ranks have the same findings, because these
depend on layouts and the program only. Other findings are warnings. One rank alone may compute a value that the model
does not use, such as a number for a log. A tensor without a mark may be a shard that the program made itself.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.modes import is_strict
from hyper_parallel.core.plain_code.contexts import follow
from hyper_parallel.core.plain_code.following import FOLLOWING, Following
from hyper_parallel.core.weak_table import WeakTable
from hyper_parallel.platform.contract import Platform

__all__ = ["VARIABLE", "follow_first_call", "without_first_calls"]

#: The environment variable; "0" turns the check off.
VARIABLE = "HYPER_PARALLEL_CHECK"
#: module -> its `_Calls`.
_CALLS = WeakTable()
_OFF: ContextVar[bool] = ContextVar("hyper_parallel_without_first_calls", default=False)


@contextmanager
def without_first_calls() -> Iterator[None]:
    """Parallelise models inside this context without a check of their first calls."""
    token = _OFF.set(True)
    try:
        yield
    finally:
        _OFF.reset(token)


def follow_first_call(module: Any, mesh: DeviceMesh) -> None:
    """Follow the first call of ``module``, to which a plan was applied.

    A mesh of one rank needs no check. A dry run follows the model itself.
    """
    if _OFF.get() or os.environ.get(VARIABLE) == "0" or mesh.size() == 1 or mesh.get_coordinate() is None:
        return
    if not mesh.platform.sends_nothing and _CALLS.get(module) is None:
        _CALLS.set(module, _Calls(module, mesh.platform))


class _Calls:
    """Hooks around the calls of a module, which are removed after the first call that recorded gradients."""

    def __init__(self, module: Any, platform: Platform) -> None:
        self._platform = platform
        self._following: Following | None = None
        self._stack = ExitStack()
        #: Weak reference to a trained parameter, once a call was followed.
        self._trained: Callable[[], Any] | None = None
        self._done = self._records = False
        self._take_away = platform.around_calls(module, self._before, self._after)

    def _before(self, module: Any, inputs: Any) -> None:
        self._stack.close()  # a failed call leaves the context open if the backend has no hook for failures
        self._following = None
        if self._done or (self._trained is not None and not self._records_now(self._trained())):
            return
        trained = self._trained_parameter(module)
        self._records = trained is None or self._records_now(trained)
        if FOLLOWING:  # a model that contains this one, or another thread, is followed
            self._records = self._records and FOLLOWING[-1].is_here
            return
        self._trained = None if trained is None else weakref.ref(trained)
        try:
            following = self._stack.enter_context(follow(module, self._platform))
        except TypeError:  # the backend cannot follow programs, or the code is compiled
            return
        calls = weakref.ref(self)  # an open context must not keep its module alive
        following.on_reached = lambda: calls()._refuse(following)  # type: ignore[union-attr]
        following.begins(inputs)
        self._following = following

    def _after(self, module: Any, output: Any) -> None:
        following, self._following = self._following, None
        self._stack.close()
        if output is None:  # also after a failed call
            return
        if self._records or self._done:
            self._done = True
            self._take_away()
        if following is None or following.on_reached is None:
            return
        following.reach(output)
        if following.findings and is_strict():
            raise ValueError(_text(following))
        if following.findings:
            warnings.warn(_text(following), stacklevel=2)

    def _refuse(self, following: Following) -> None:
        """Raise ValueError for findings that affect a styled module or the output.

        All ranks raise at the same place, before the module that takes the affected tensor communicates.
        """
        if not is_strict() and not any(finding.certain for finding in following.reached):
            return
        self._done = True
        following.on_reached = None
        following.paused += 1
        FOLLOWING[:] = [other for other in FOLLOWING if other is not following]
        raise ValueError(_text(following))

    def _trained_parameter(self, module: Any) -> Any:
        platform = self._platform
        parameters = (p for _, m in platform.named_modules(module) for _, p in platform.named_parameters(m))
        return next((p for p in parameters if p.requires_grad), None)

    def _records_now(self, parameter: Any) -> bool:
        return parameter is not None and self._platform.requires_grad(parameter)


def _text(following: Following) -> str:
    return (
        "the first call of the model was checked: its plain code gives other results "
        f"than on one device ({VARIABLE}=0 turns this check off):\n" + "\n".join(following.lines())
    )
