"""Following the first call of a parallelised model, unless ``HYPER_PARALLEL_CHECK=0`` forbids it.

Only the first call pays, and the first one that records gradients: then the hooks around calls are taken away. A
finding that a styled module or the output was computed with is an error, where layouts say so. All ranks find the same,
since layouts and the program alone decide. A value that nothing else is computed with, such as a number for a log, is a
warning: one rank may have computed it alone. So is a finding about a tensor without a mark, which may be a part by the
program's own doing.
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

#: The environment variable: "0" follows no calls.
VARIABLE = "HYPER_PARALLEL_CHECK"
#: module -> `_Calls`.
_CALLS = WeakTable()
_OFF: ContextVar[bool] = ContextVar("hyper_parallel_without_first_calls", default=False)


@contextmanager
def without_first_calls() -> Iterator[None]:
    """Inside, models are parallelised whose first calls are not followed."""
    token = _OFF.set(True)
    try:
        yield
    finally:
        _OFF.reset(token)


def follow_first_call(module: Any, mesh: DeviceMesh) -> None:
    """Follow the first call of ``module``, to which a plan was applied. One rank has nothing to follow, and a dry run
    follows itself."""
    if _OFF.get() or os.environ.get(VARIABLE) == "0" or mesh.size() == 1 or mesh.get_coordinate() is None:
        return
    if not mesh.platform.sends_nothing and _CALLS.get(module) is None:
        _CALLS.set(module, _Calls(module, mesh.platform))


class _Calls:
    """The calls of a module, until one has been followed that recorded gradients."""

    def __init__(self, module: Any, platform: Platform) -> None:
        self._platform = platform
        self._following: Following | None = None
        self._stack = ExitStack()
        #: A parameter that is trained, after a call without gradients.
        self._trained: Callable[[], Any] | None = None
        self._done = self._records = False
        self._take_away = platform.around_calls(module, self._before, self._after)

    def _before(self, module: Any) -> None:
        self._stack.close()  # where hooks do not see calls that fail, the call before may have left it open
        self._following = None
        if self._done or (self._trained is not None and not self._records_now(self._trained())):
            return
        trained = self._trained_parameter(module)
        self._records = trained is None or self._records_now(trained)
        if FOLLOWING:  # a model around this one, or another thread
            self._records = self._records and FOLLOWING[-1].is_here
            return
        self._trained = None if trained is None else weakref.ref(trained)
        try:
            following = self._stack.enter_context(follow(module, self._platform))
        except TypeError:  # a backend that cannot, and code that is compiled
            return
        calls = weakref.ref(self)  # an open context must not keep its module alive
        following.on_reached = lambda: calls()._refuse(following)  # type: ignore[union-attr]
        self._following = following

    def _after(self, module: Any, output: Any) -> None:
        following, self._following = self._following, None
        self._stack.close()
        if output is None:  # of a call that has failed, too
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
        """Raise ValueError for findings that the model goes on with: on all ranks at the same place, before the module
        that takes such a tensor communicates."""
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
        "the first call of the model was followed, and its plain code computes something else than one device does "
        f"({VARIABLE}=0 follows no calls):\n" + "\n".join(following.lines())
    )
