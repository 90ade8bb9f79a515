"""Guards of compiled frames: one guard for each style, instead of one for each value that the style's function reads.

Before each call torch's compiler compares the values that a frame read while it was traced. The forward of a styled
module reads many values. Almost all of them cannot change: the functions of this package, and the closure of a style's
function. A style's function is made once, and never changed but only replaced. So a frame compares the identity of the
function. Values that can change stay guarded: parameters and their layouts, attributes of modules, hooks, an object's
own ``forward``, and whether a mesh has had uneven shards.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from hyper_parallel.platform.torch.compiled.comparisons import NUMBER

__all__ = ["is_manager", "with_few_guards"]

#: Modules of this backend, the list of steps, traced losses, and classes of `placed`, as frames name them.
_OWN = (
    "G['__import_hyper_parallel_dot_platform_dot_torch_dot_",
    "G['__import_hyper_parallel_dot_platform_dot_contract_dot_programs'",
    "G['__import_hyper_parallel_dot_core_dot_rules_dot_class_losses'",
    "G['__subclass_Placed_",
)
#: Where a module holds functions of styles: which say so by `of_style`.
_HELD = re.compile(r"(\._compiled_run|\['_compiled_run'\]|_hooks\[list\(dict\.keys\(.*\)\)\[\d+\]\])$")
_OF_CLASS = re.compile(r"dict\(type\((.+?)\)\.(?:__mro__\[\d+\]\.)?__dict__\)(?:\['(\w+)'\])?")
#: Names that are looked up before a forward. Classes made for styles have their own ``__call__``. Torch's compiler
#: traces that step by step, unlike the one of `torch.nn.Module`.
_CALLS = ("__call__", "_call_impl", "_compiled_call_impl")
#: Attributes that may change below a function of a style.
_CHANGES = "._has_uneven_shards"
#: A module's name in messages, and its number. Frames read both, but equivalent modules differ in these alone.
_NAMES = ("_hyper_parallel_path", NUMBER)
_NAMED = tuple(end for name in _NAMES for end in (f".{name}", f"['{name}']"))


def is_manager(original: Any) -> str | None:
    """Return the reason why the original of a `Patch` does not fit, or None."""
    found = tuple(inspect.signature(original).parameters)[:3]
    return None if found == ("self", "f_code", "output_graph") else f"takes {found} first"


def with_few_guards(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``CheckFunctionManager.__init__``, which compiles the guards of a frame to a function."""

    @wraps(original)
    def make(self: Any, f_code: Any, output_graph: Any, *args: Any, **kwargs: Any) -> None:
        guards = getattr(output_graph, "guards", None)
        if guards:
            kept = _merged(list(guards), {"L": output_graph.local_scope, "G": output_graph.global_scope})
            guards.clear()
            for guard in kept:
                guards.add(guard, collect_debug_stack=False)
        original(self, f_code, output_graph, *args, **kwargs)

    return make


def _merged(guards: list[Any], scope: dict[str, Any]) -> list[Any]:
    """Return a frame's guards. A single guard on a style's function replaces all guards on the values inside that
    function."""
    values: dict[str, Any] = {}

    def value(name: str) -> Any:
        if name not in values:
            try:
                values[name] = eval(name, scope)
            except Exception:  # names of objects that are not the program's
                values[name] = None
        return values[name]

    def style_of(source: Any) -> Any:
        """Return the source of the style's function to which ``source`` belongs; None if it belongs to no style."""
        outermost = None
        for one in _chain(source):
            if _HELD.search(one.name) and getattr(value(one.name), "of_style", False):
                outermost = one
        return outermost

    def is_quick(name: str) -> bool:
        return "_quick" in vars(type(value(name)))

    builder = importlib.import_module("torch._dynamo.guards").GuardBuilder
    laid_out = {guard.name for guard in guards if guard.name.endswith("._layout")}
    kept: list[Any] = []
    styles: dict[str, Any] = {}
    for guard in guards:
        name, how = guard.name, getattr(guard.create_fn, "keywords", {})
        sources = [guard.originating_source, *([how["source_b"]] if "source_b" in how else [])]
        if any(source.name.startswith(_OWN) for source in sources):
            continue
        if name.endswith(_NAMED) or how.get("attr") in _NAMES or how.get("key") in _NAMES:
            continue
        found = [style for style in map(style_of, sources) if style is not None]
        if found:
            if name.endswith(_CHANGES):
                kept.append(guard)
            for style in found:
                # Prefer a module's own attribute to the entry of its dict, if both were read.
                path = style.name.replace(".__dict__['_compiled_run']", "._compiled_run")
                if path not in styles or path == style.name:
                    styles[path] = style
            continue
        of_class = _OF_CLASS.match(name)
        if of_class:
            if (of_class[2] or how.get("key")) in (*_CALLS, "forward") and is_quick(of_class[1]):
                continue
        elif how.get("attr") in _CALLS and is_quick(name):
            continue
        elif guard.create_fn_name() == "TYPE_MATCH" and f"{name}._layout" in laid_out:
            continue  # the guard of a tensor compares its class too
        elif guard.create_fn_name() == "EMPTY_NN_MODULE_HOOKS_DICT" and is_quick(guard.originating_source.base.name):
            # That guard compares nothing, so torch's compiler would miss hooks that modules get later.
            guard = guard.originating_source.make_guard(builder.SEQUENCE_LENGTH)
        kept.append(guard)
    return kept + [_traced(style, value(style.name)).make_guard(builder.ID_MATCH) for style in styles.values()]


def _traced(style: Any, function: Any) -> Any:
    """Return the source of the traced part of a style's function.

    Equivalent hooks share that part, and may differ in the parts that run in eager mode.
    """
    if getattr(function, "traced", None) is None:
        return style
    return importlib.import_module("torch._dynamo.source").AttrSource(style, "traced")


def _chain(source: Any) -> Iterator[Any]:
    while source is not None:
        yield source
        source = getattr(source, "base", None)
