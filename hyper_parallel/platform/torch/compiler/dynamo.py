"""Treatment of DTensors by torch's compiler: as local tensors.

A DTensor becomes a graph input of the local shape. The guards of the input compare the layout, and the properties that
torch stores below Python. In the traced frame, a class of `placed` represents it. The compiled graph itself gets plain
tensors, forward and backward.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.torch.basics.tensor import State, is_dtensor
from hyper_parallel.platform.torch.compiled.comparisons import take_marks
from hyper_parallel.platform.torch.compiled.placed import held_class
from hyper_parallel.platform.torch.compiled.running import running

__all__ = ["is_pattern", "not_compiled", "plain_inputs", "skipping", "wrapping_dtensors"]

#: Folders and files of this library that work on DTensors themselves, and stay uncompiled. In the backend, only code
#: for the compiler, and code that calls it, is compiled. Of the rules, only losses on local tensors are compiled.
_NOT_COMPILED = (
    *("core/modes.py", "core/observers.py", "core/trees.py", "core/mesh/", "core/layouts/", "core/communication/"),
    *("core/operations/", "core/plain_code/", "core/dtensor/", "core/data_parallel/", "core/tensor_parallel/loss.py"),
)
_COMPILED = {"class_losses.py", "compiled", "compiler", "basics/counter.py", "basics/wrappers.py", "modules/calls.py"}
_COMPILED_RULES = {"class_losses.py"}

#: Attribute that `torch._dynamo.mark_static` sets.
_STATIC = "_dynamo_static_indices"


def not_compiled(skipped: Any) -> tuple[str, ...]:
    """Return path prefixes to add to the list of files that the compiler skips."""
    backend, root = Path(__file__).parents[1], Path(__file__).parents[3]
    rules = root / "core" / "rules"
    return (
        *(f"{root}/{name}" for name in _NOT_COMPILED),
        *_all_but(_COMPILED_RULES, rules, rules),
        *_all_but(_COMPILED, backend, backend),
    )


def _all_but(compiled: set[str], folder: Path, top: Path) -> Iterator[str]:
    """Yield the paths below ``folder`` that contain no file that the compiler may trace. Names of such files are
    relative to ``top``."""
    for path in sorted(folder.iterdir()):
        name = path.relative_to(top).as_posix()
        if path.name[:2] == "__" or name in compiled:
            continue
        if not path.is_dir():
            yield str(path)
        elif any(other.startswith(f"{name}/") for other in compiled):
            yield from _all_but(compiled, path, top)
        else:
            yield f"{path}/"


def skipping(original: Any) -> re.Pattern:
    """Extend the pattern that torch makes from its list of skipped files."""
    return re.compile("|".join([original.pattern, *(f"^{re.escape(path)}" for path in not_compiled(None))]))


def is_pattern(original: Any) -> str | None:
    """Return the reason why the original of a `Patch` does not fit, or None."""
    return None if isinstance(original, re.Pattern) else "is not a pattern"


def wrapping_dtensors(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap ``VariableBuilder.wrap_tensor``, which the compiler calls for each tensor of the program."""

    @wraps(original)
    def wrap_tensor(self: Any, value: Any) -> Any:
        if getattr(type(value), "is_placed_class", False):
            layout = value._layout
            value.__class__, value._layout = State.tensor_class, layout
        if not is_dtensor(value):
            return original(self, value)
        layout, parts = value._layout, _parts_of_dynamo()
        marks, before = vars(value), vars(value).get(_STATIC)
        with no_dispatch():
            # Like `torch._dynamo.mark_static`: dynamic sizes would be read from the DTensor, which reports global ones.
            marks[_STATIC] = set(range(value.dim()))
            try:
                found = original(self, value)
            finally:
                if before is None:
                    del marks[_STATIC]
                else:
                    marks[_STATIC] = before
        of_layout = parts.source.AttrSource(self.source, "_layout")
        parts.guards.install_guard(of_layout.make_guard(parts.guards.GuardBuilder.ID_MATCH))
        held = held_class(layout, *State.core.cut_of_layout(layout))
        return parts.variable.from_tensor_var(self.tx, found, held, self.source)

    return wrap_tensor


@cache
def _parts_of_dynamo() -> Any:
    """Return classes and functions of Dynamo. These do not exist yet while torch's compiler is being imported. So each
    is looked up at the first DTensor."""
    guards, source = map(importlib.import_module, ("torch._dynamo.guards", "torch._dynamo.source"))
    overrides: Any = importlib.import_module("torch._dynamo.variables.torch_function")
    return SimpleNamespace(guards=guards, source=source, variable=overrides.TensorWithTFOverrideVariable)


def plain_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``OutputGraph.call_user_compiler``, which passes a graph and its inputs to a backend."""

    @wraps(original)
    def call_user_compiler(self: Any, gm: Any, example_inputs: Any) -> Any:
        held = [i for i, x in enumerate(example_inputs) if is_dtensor(x)]
        compare = take_marks(gm)
        if held:
            # The tensors that the compiler traced with: it would not know the origin of the sizes of a new view.
            traced = [node.meta["example_value"] for node in gm.graph.nodes if node.op == "placeholder"]
            example_inputs = [traced[i] if i in held else x for i, x in enumerate(example_inputs)]
        compiled = original(self, gm, example_inputs)
        if not held and compare is None:
            return compiled
        self.torch_function_subclass_inlined = False  # otherwise the caller would turn dispatch off again, around `run`
        # The caller keeps `run` from being compiled, and so the code that `run` calls: once is enough.
        return running(importlib.import_module("torch._dynamo.eval_frame").innermost_fn(compiled), held, compare)

    return call_user_compiler
