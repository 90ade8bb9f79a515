"""Calls that a compiled frame leaves to eager mode. Imported after torch's compiler, whose import is slow."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from hyper_parallel.platform.torch.compiled.comparisons import mark
from hyper_parallel.platform.torch.compiled.placed import Outside, settle
from hyper_parallel.platform.torch.compiled.views import trace

__all__: list[str] = []

#: Subjects of the warnings that were already shown.
_SAID: set[str] = set()
_UNITS = "units of data parallelism run outside of compiled code, as in eager mode"


def _say(what: str, why: str) -> None:
    if what not in _SAID:
        _SAID.add(what)
        warnings.warn(
            f"{what} runs outside of compiled code, as in eager mode: {why}. See docs/compile.md for the code that "
            "is traced",
            stacklevel=3,
        )


def _path(module: Any) -> str:
    return getattr(module, "_hyper_parallel_path", "") or type(module).__name__


@torch.compiler.disable(
    reason="HyperParallel: an operation on a DTensor. Compiled code supports DTensors only between modules with "
    "styles: set use_local_output=True for the module before the operation, or compile a smaller part; see "
    "docs/compile.md"
)
def _leave(call: Any, args: tuple, kwargs: dict) -> Any:
    if args and isinstance(args[0], nn.Module):
        _say(f"a hook of {_path(args[0])!r}", "its layouts, or its inputs, are not traced")
    return call(*settle(args), **settle(kwargs))


@torch.compiler.disable(
    reason="HyperParallel: a module whose style torch.compile cannot trace with these inputs; see docs/compile.md for "
    "the supported styles"
)
def _run(module: Any, args: tuple, kwargs: dict, why: str) -> Any:
    _say(repr(_path(module)), why)
    return module._replaced_forward(module, *settle(args), **settle(kwargs))


@torch.compiler.disable(
    recursive=False,
    reason="HyperParallel: a unit of data parallelism, which cannot be compiled: compile the modules inside the unit; "
    "see docs/compile.md",
)
def _unit(module: Any, args: tuple, kwargs: dict) -> Any:
    if _UNITS not in _SAID:
        _SAID.add(_UNITS)
        warnings.warn(
            f"{_UNITS}, and the code inside the units is compiled separately: see docs/compile.md", stacklevel=2
        )
    return module._replaced_forward(module, *settle(args), **settle(kwargs))


def _operation(what: str) -> None:
    _say(what, "TORCH_LOGS=graph_breaks shows where")


# Called while a frame is traced, not by compiled code.
_operation._dynamo_marked_constant = True  # type: ignore[attr-defined]
Outside.leave, Outside.run, Outside.unit, Outside.trace = _leave, _run, _unit, trace
Outside.say = _operation
torch.compiler.allow_in_graph(mark)
