"""Following the first call of a parallelised model, where ``HYPER_PARALLEL_CHECK=1`` asks for it.

Only the first call pays, and the first one that records gradients: then the hook before it is taken away. A finding
that a styled module or the output was computed with is an error after forward. All ranks find the same, since layouts
and the program alone decide. A value that nothing else is computed with, such as a number for a log, is a warning: one
rank may have computed it alone. So is a finding about a tensor without a mark, which may be a part by the program's own
doing.
"""

from __future__ import annotations

import os
import warnings
import weakref
from contextlib import ExitStack
from typing import Any

from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.modes import is_strict
from hyper_parallel.core.plain_code.contexts import follow
from hyper_parallel.core.plain_code.following import FOLLOWING, Following
from hyper_parallel.core.weak_table import WeakTable
from hyper_parallel.platform.contract import Platform

__all__ = ["VARIABLE", "follow_first_call"]

#: The environment variable: "1" follows first calls.
VARIABLE = "HYPER_PARALLEL_CHECK"
#: module -> the handle of its hook before a call; the call that is followed; whether one was that recorded gradients.
_HANDLES, _OPEN, _DONE = WeakTable(), WeakTable(), WeakTable()


def follow_first_call(module: Any, mesh: DeviceMesh) -> None:
    """Follow the first call of ``module``, to which a plan was applied, if the environment asks for it. One rank has
    nothing to follow, and a dry run follows itself."""
    platform = mesh.platform
    if os.environ.get(VARIABLE, "0") in ("", "0") or mesh.size() == 1 or mesh.get_coordinate() is None:
        return
    if platform.sends_nothing or _HANDLES.get(module) is not None:
        return

    def before(module: Any, args: tuple) -> None:
        if not platform.is_compiling():  # asked first: a compiler traces no more of this
            _begin(module, platform)

    def after(module: Any, args: tuple, output: Any) -> None:
        if not platform.is_compiling():
            _end(module, output)

    _HANDLES.set(module, platform.register_forward_pre_hook(module, before, prepend=True))
    platform.register_forward_hook(module, after, always=True)


def _begin(module: Any, platform: Platform) -> None:
    _close(module)  # where hooks do not see calls that fail, the call before may have left it open
    if FOLLOWING or _DONE.get(module) is not None:
        return
    records = any(
        platform.requires_grad(p) for _, m in platform.named_modules(module) for _, p in platform.named_parameters(m)
    )
    stack = ExitStack()
    following = stack.enter_context(follow(module, platform))
    owner = weakref.ref(module)  # an open context must not keep its module alive
    following.on_reached = lambda: _refuse(owner(), following)
    _OPEN.set(module, (stack, records))


def _end(module: Any, output: Any) -> None:
    if _OPEN.get(module) is None:
        return
    following = FOLLOWING[-1] if FOLLOWING else None
    records = _close(module)
    if output is None:  # of a call that has failed, too
        return
    if records:
        _DONE.set(module, True)
        hook = _HANDLES.get(module)  # the one before the call: a framework may not take away this one, which runs
        if hook is not None:  # none of a copy
            hook.remove()
    if following is None:
        return
    following.reach(output)
    if following.findings and is_strict():
        raise ValueError(_text(following))
    if following.findings:
        warnings.warn(_text(following), stacklevel=2)


def _close(module: Any) -> bool | None:
    """Follow the call of ``module`` no longer. Returns whether it recorded gradients, None where it is not followed."""
    opened = _OPEN.get(module)
    if opened is None:
        return None
    stack, records = opened
    _OPEN.set(module, None)
    stack.close()
    return bool(records)


def _refuse(module: Any, following: Following) -> None:
    """Raise ValueError for findings that the model goes on with: on all ranks at the same place, before the module that
    takes such a tensor communicates."""
    if not is_strict() and not any(finding.certain for finding in following.reached):
        return
    _DONE.set(module, True)
    following.on_reached = None
    following.paused += 1
    FOLLOWING[:] = [other for other in FOLLOWING if other is not following]
    raise ValueError(_text(following))


def _text(following: Following) -> str:
    return (
        f"the first call of the model was followed ({VARIABLE}=1), and its plain code computes something else than one "
        "device does:\n" + "\n".join(following.lines())
    )
