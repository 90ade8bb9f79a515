"""Graphs captured from the run of a function, or from its bytecode, and the errors for DTensors in them.

A graph would read a shard as if it were the full tensor. Before the capture, all objects that the function can reach
are searched: arguments, closures, names of modules, attributes. A DTensor that appears later, while the run is
recorded, is an error at that point. Graphs made from the source are in `compiled.parsing`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from mindspore.graph import jit_trace

from hyper_parallel.platform.mindspore.compiled.reaching import graph_error, refuse
from hyper_parallel.platform.mindspore.tensors.tensor import NoDispatch, is_dispatching

__all__ = ["allowed_again", "checked_begin", "checked_enter", "checked_preparation"]

_FROM_BYTECODE = (
    ", or use capture_mode='ast'. The mode 'bytecode' runs code that it cannot compile in PyNative mode, without a "
    "message"
)
_FROM_RUN = (
    ", or use capture_mode='ast'. The mode 'trace' ignores the bprop of cells, so gradients of collectives would be "
    "wrong: see docs/mindspore.md"
)


# ------------------------------------------------------------------------------------------------ from a run
_original_enter = NoDispatch.__enter__


def _refuse_operations(what: str, about: str, clean_up: Callable[[], None] = lambda: None) -> None:
    """Let operations on local tensors raise an error while a graph is captured from a run in this thread."""
    thread = threading.get_ident()

    def enter(guard: NoDispatch) -> None:
        if threading.get_ident() != thread:
            return _original_enter(guard)
        _allow_operations()
        clean_up()
        raise graph_error(what, None, about)

    NoDispatch.__enter__ = enter  # type: ignore[method-assign]


def _allow_operations() -> None:
    NoDispatch.__enter__ = _original_enter  # type: ignore[method-assign]


def allowed_again(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Replace the end of a captured run: allow operations on local tensors again."""
    _allow_operations()
    return original(*args, **kwargs)


def checked_begin(original: Callable, name: str, *args: Any, **kwargs: Any) -> Any:
    """Replace the start of a captured run: reject DTensors, and operations on them."""
    if not is_dispatching():
        return original(name, *args, **kwargs)
    caller = sys._getframe(2).f_locals
    function, given = caller.get("fn"), caller.get("args", args)
    what = f"the function {getattr(function, '__name__', name)!r} compiled with jit"
    # A graph of an earlier call may exist already: then nothing runs that could be checked later.
    refuse(what, _FROM_RUN, args, given, function)
    made = original(name, *args, **kwargs)
    if made:
        _refuse_operations(what, _FROM_RUN, _forget_recording)
    return made


def _forget_recording() -> None:
    """End a recording that an error has left open. MindSpore itself leaves it open, and could compile nothing
    afterwards."""
    context = jit_trace._trace_jit_context
    jit_trace._trace_compile_cache.discard(context.phase)
    recorder = jit_trace.tr.get_instance()
    recorder.end_graph(*jit_trace._get_caller_lines(), jit_trace._DEFAULT_JIT_CONFIG, *context.args)
    jit_trace.set_jit_context(None)
    context.compiled, context.phase, context.args = False, "", None
    jit_trace._using_trace = False


# ------------------------------------------------------------------------------------------------ from the bytecode
def checked_preparation(original: Callable, args: tuple, kwargs: dict) -> Any:
    """Replace the check of the arguments before the bytecode is compiled: reject DTensors."""
    if is_dispatching():
        function = getattr(sys._getframe(2).f_locals.get("self"), "fn", None)
        what = f"the function {getattr(function, '__name__', '?')!r} compiled with jit"
        refuse(what, _FROM_BYTECODE, args, kwargs, function)
    return original(args, kwargs)


def checked_enter(original: Callable, capturing: Any) -> Any:
    """Replace the start of a run whose bytecode is compiled: reject operations on local tensors."""
    if is_dispatching():
        _refuse_operations(f"the function {capturing.fn.__name__!r} compiled with jit", _FROM_BYTECODE)
    return original(capturing)
