"""Compiled graphs: they would read a shard as if it were the whole tensor, so DTensors are kept out of them.

MindSpore compiles in three ways: from the source (``jit``, graph mode), from the bytecode, and from what a run records.
Each is entered at one place, where everything is looked through that the function can reach: arguments, closures, names
of modules, attributes. What is found later, while the source is parsed or the function runs to be recorded, is an error
there.
"""

from __future__ import annotations

import dis
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import mindspore as ms
from mindspore import Parameter, nn
from mindspore.graph import jit_trace

from hyper_parallel.platform.mindspore.handlers.optimizers import run_compiled_step
from hyper_parallel.platform.mindspore.tensor import InterceptedTensor, NoDispatch, distributed_in, is_dispatching

__all__ = [
    "allowed_again",
    "checked_begin",
    "checked_compile",
    "checked_enter",
    "checked_jit",
    "checked_parser",
    "checked_preparation",
    "reachable",
]

#: Functions of these packages are looked through for what they were given, not for what their modules hold.
_LIBRARIES = ("mindspore", "numpy", "hyper_parallel")


def graph_error(what: str, found: Any) -> RuntimeError:
    """The error for ``found``, a DTensor, in the graph that ``what`` names."""
    name = f"the distributed parameter {found.name!r}" if isinstance(found, Parameter) else "a DTensor"
    return RuntimeError(
        f"{what} uses {name}: distributed tensors work in PyNative mode, without jit. Use "
        "mindspore.set_context(mode=mindspore.PYNATIVE_MODE) and take the decorator off"
    )


def _refuse(what: str, *roots: Any) -> None:
    """Raise when a DTensor can be reached from ``roots``."""
    found = next(reachable(roots), None)
    if found is not None:
        raise graph_error(what, found)


# ------------------------------------------------------------------------------------------------ what can be reached
def reachable(root: Any) -> Iterator[Any]:
    """The DTensors that a function, a cell or any other object leads to.

    Of a function: its defaults, what it closes over, the names of its module that it uses, and their attributes that it
    names, in functions that it calls too. Of a cell: its parameters, what it holds, and its ``construct``.
    """
    return _walk(root, frozenset(), set())


def _walk(x: Any, names: frozenset[str], seen: set[int]) -> Iterator[Any]:
    """``names`` are those of attributes that the code names through which ``x`` was found."""
    if isinstance(x, InterceptedTensor):
        yield x
        return
    if x is None or isinstance(x, (bool, int, float, str, bytes, type)) or id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, FunctionType):
        parts, names = _parts_of_function(x)
    else:
        parts = _parts(x, names)
    for part in parts:
        yield from _walk(part, names, seen)


def _parts(x: Any, names: frozenset[str]) -> Iterable[Any]:
    """None of them is made here: what is known by its id must stay."""
    if isinstance(x, (tuple, list, set, frozenset)):
        return x
    if isinstance(x, dict):
        return x.values()
    if isinstance(x, MethodType):
        return x.__func__, x.__self__
    if isinstance(x, functools.partial):
        return x.func, x.args, x.keywords
    if isinstance(x, nn.Cell):
        return *x.get_parameters(), *vars(x).values(), type(x).construct
    own = getattr(x, "__dict__", {})  # a module's names, an object's attributes
    return [own[name] for name in names if name in own]


def _parts_of_function(function: FunctionType) -> tuple[Iterable[Any], frozenset[str]]:
    """And the names of attributes that it uses."""
    loaded, attributes = _names_in(function.__code__)
    closure = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    parts = [function.__defaults__, function.__kwdefaults__, getattr(function, "__wrapped__", None), *closure]
    if not (function.__module__ or "").startswith(_LIBRARIES):
        module = function.__globals__
        parts += [module[name] for name in loaded if name in module]
    return parts, attributes


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names of the module, and those of attributes, that a function uses, nested functions included. Strings count
    as names of attributes: ``getattr`` may be given them."""
    loaded, attributes = set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            loaded.add(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, str):
            attributes.add(constant)
        elif isinstance(constant, CodeType):
            inner = _names_in(constant)
            loaded |= inner[0]
            attributes |= inner[1]
    return frozenset(loaded), frozenset(attributes)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


# ------------------------------------------------------------------------------------------------ from the source
def checked_jit(original: Callable, executor: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands for the call of a function that is compiled with jit."""
    if not is_dispatching():
        return original(executor, *args, **kwargs)  # an optimizer's step, compiled for the local tensors
    if isinstance(executor.obj, (nn.Optimizer, ms.experimental.optim.Optimizer)):
        return run_compiled_step(original, executor, args, kwargs)
    function = executor.fn
    if function.__module__ == "mindspore.amp" and next(distributed_in((args, kwargs)), None) is not None:
        return function(*args, **kwargs)  # loss scaling: compiled for speed only
    _refuse(f"the function {function.__name__!r} compiled with jit", args, kwargs, executor.obj, function)
    return original(executor, *args, **kwargs)


def checked_compile(original: Callable, executor: Any, cell: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands for compiling a cell, in graph mode."""
    _refuse(f"{type(cell).__name__} in graph mode", args, kwargs, cell)
    return original(executor, cell, *args, **kwargs)


def checked_parser(original: Callable, *args: Any) -> Any:
    """Stands for the functions of its own that MindSpore asks for what the parser comes across."""
    answer = original(*args)
    # Not looked through: of a module or a dict of names only a part is used.
    found = next(distributed_in([x for x in (*args[:1], answer) if not isinstance(x, dict)]), None)
    if found is not None and is_dispatching():
        raise graph_error("a function or cell that is compiled", found)
    return answer


# ------------------------------------------------------------------------------------------------ from a run
_original_enter = NoDispatch.__enter__


def _refuse_operations(what: str, clean_up: Callable[[], None] = lambda: None) -> None:
    """While a graph is made of what runs in this thread, whatever works on local tensors is an error."""
    thread = threading.get_ident()

    def enter(guard: NoDispatch) -> None:
        if threading.get_ident() != thread:
            return _original_enter(guard)
        _allow_operations()
        clean_up()
        raise graph_error(what, None)

    NoDispatch.__enter__ = enter  # type: ignore[method-assign]


def _allow_operations() -> None:
    NoDispatch.__enter__ = _original_enter  # type: ignore[method-assign]


def allowed_again(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Stands for the end of a run of which a graph is made."""
    _allow_operations()
    return original(*args, **kwargs)


def checked_begin(original: Callable, name: str, *args: Any, **kwargs: Any) -> Any:
    """Stands for the beginning of a run that is recorded."""
    if not is_dispatching():
        return original(name, *args, **kwargs)
    caller = sys._getframe(2).f_locals
    function, given = caller.get("fn"), caller.get("args", args)
    what = f"the function {getattr(function, '__name__', name)!r} compiled with jit"
    # A graph of an earlier call may be there already: then nothing runs that could be caught later.
    _refuse(what, args, given, function)
    made = original(name, *args, **kwargs)
    if made:
        _refuse_operations(what, _forget_recording)
    return made


def _forget_recording() -> None:
    """End a recording that an error leaves behind: MindSpore itself does not, and could compile nothing afterwards."""
    context = jit_trace._trace_jit_context
    jit_trace._trace_compile_cache.discard(context.phase)
    recorder = jit_trace.tr.get_instance()
    recorder.end_graph(*jit_trace._get_caller_lines(), jit_trace._DEFAULT_JIT_CONFIG, *context.args)
    jit_trace.set_jit_context(None)
    context.compiled, context.phase, context.args = False, "", None
    jit_trace._using_trace = False


# ------------------------------------------------------------------------------------------------ from the bytecode
def checked_preparation(original: Callable, args: tuple, kwargs: dict) -> Any:
    """Stands for the look at the arguments before the bytecode is compiled."""
    if is_dispatching():
        function = getattr(sys._getframe(2).f_locals.get("self"), "fn", None)
        _refuse(f"the function {getattr(function, '__name__', '?')!r} compiled with jit", args, kwargs, function)
    return original(args, kwargs)


def checked_enter(original: Callable, capturing: Any) -> Any:
    """Stands for the beginning of a run whose bytecode is compiled."""
    if is_dispatching():
        _refuse_operations(f"the function {capturing.fn.__name__!r} compiled with jit")
    return original(capturing)
