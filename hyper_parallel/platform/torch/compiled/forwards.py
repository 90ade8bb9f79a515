"""The second forward of a plan: styled modules as torch's compiler traces them.

The forward of a module is built from the data of its style (`Program`): local parameters as plain tensors, and the
autograd functions of `functions`. Some modules have no such data, and some calls do not fit it. These run outside of
the compiled code, as in eager mode.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.contract.programs import KEPT, SUMMANDS, Program, are_planned
from hyper_parallel.platform.imports import when_imported
from hyper_parallel.platform.torch.compiled import functions
from hyper_parallel.platform.torch.compiled.moves import INPUT, Moves, shards_of
from hyper_parallel.platform.torch.compiled.placed import Outside, part_class, plain

__all__ = ["make_run", "run_forward"]

#: Reasons for leaving a module to eager mode: a compiled forward then returns the reason in place of its output.
_NO_WAY = "this style, or this kind of module, is not traced"
_PARAMETERS = "its parameters were replaced after its style distributed them"
_OUTPUT = "its output would be sharded unevenly, or its weight packs several matrices"


def run_forward(module: Any, args: tuple, kwargs: dict) -> Any:
    """Call a styled module, or a unit of data parallelism, inside a compiled frame."""
    if "_compiled_run" not in module.__dict__:
        if torch.compiler.is_exporting():
            return module._replaced_forward(module, *args, **kwargs)  # raises the error about exporting
        return Outside.unit(module, args, kwargs)
    run = module._compiled_run
    y = _NO_WAY if run is None else run(module, args, kwargs)
    return Outside.run(module, args, kwargs, y) if isinstance(y, str) else y


def make_run(module: nn.Module, how: Program | None) -> Callable[..., Any] | None:
    """Return ``run(module, args, kwargs)``, which replaces the forward of ``module`` in compiled code, or None.

    Where ``run`` does not apply, it returns the reason as a string. Compiled frames guard on the identity of ``run``
    (`guards`). Equivalent modules share one ``run``, and therefore a graph."""
    if how is None:
        return None
    # Weak references: layouts are cached by mesh, and an entry that held layouts would never be freed.
    kept: Any = vars(how.mesh).setdefault("_compiled_runs", WeakValueDictionary())
    cls = original_class(module)
    key = cls, _read_of(module, cls), how.key
    run: Any = kept.get(key)
    if run is None:
        run = _make_run(module, cls, how)
        if run is not None:
            run.of_style = True
            kept[key] = run
    return run


def _read_of(module: Any, cls: type) -> tuple:
    """Return the attributes of a module that affect its ``run`` from `make_run`."""
    return (module.padding_idx, is_simple(module)) if cls is nn.Embedding else ()


def _make_run(module: nn.Module, cls: type, how: Program) -> Callable[..., Any] | None:
    """Return ``run`` of `make_run`: the input step, the operation and the output step of a program."""
    moves = Moves(how)
    operate = _operation(module, cls, how, moves)
    if operate is None:
        return None
    shards, planned, ids = shards_of(how.compare), tuple(how.layouts.items()), cls is nn.Embedding
    takes, gives, wanted, features, keeps = how.takes, how.gives, how.wanted, how.features, how.takes == KEPT
    of_input = how.sizes if isinstance(takes, int) else ()
    of_output = how.sizes if isinstance(gives, int) else ()
    even, packed, last_features = how.even, how.packed, how.partial_features

    def before(given: Any, x: Tensor, cut: int | None, to: int | None) -> Tensor | None:
        """Return the input in the form that the operation needs, sharded along ``to``; None if it cannot be
        converted."""
        last = x.ndim - 1
        moved = features is not None and cut != to and last in (cut, to)
        if moved and (x.shape[last] * (moves.size if cut == last else 1) != features or (packed and to == last)):
            return None
        if to is not None and to > last - how.whole_dims:
            return None
        if how.input_for_parts:
            return moves.read(given, x, cut)
        found: Tensor | None = moves.bring(x, cut, to, of_input)
        return found

    def run(module: Any, args: tuple, kwargs: dict) -> Any:
        found = (
            INPUT if kwargs or len(args) != 1 else moves.take(args[0], how.given, module, shards, features is not None)
        )
        own = module._parameters
        if isinstance(found, str):
            return found
        if not are_planned(own, planned, moves.dtensor):
            return _PARAMETERS
        x, cut = found
        if (keeps and cut is None) or not (keeps or takes is None or -x.ndim <= takes < x.ndim):
            return INPUT
        lies = cut if keeps else None if takes is None else takes % x.ndim
        x = before(args[0], x, cut, lies)
        if x is None:
            return INPUT
        ndim = x.ndim + 1 if ids else x.ndim
        given = lies if gives == KEPT else ndim - 1 if gives == -1 else gives
        to = given if wanted == KEPT else wanted
        if to is not None and not -ndim <= to < ndim:
            return INPUT
        to = None if to is None else to % ndim
        y = operate(module, x, own, lies, to)
        if isinstance(y, moves.dtensor) and y.placed_on is moves.mesh and y.gathers is None:
            given, y = y.placed_cut, plain(y)
        elif how.distributed:
            return _OUTPUT
        if given != to and packed and gives == -1:
            return _OUTPUT
        y = moves.bring(y, given, to, of_output)
        if y is None:
            return _OUTPUT
        bias = own.get("bias") if gives == SUMMANDS and to is None else None
        if bias is not None:
            with no_dispatch():  # automatic mixed precision computes in another dtype than the parameters have
                y = y + bias.to(y.dtype)
        y = moves.give(_summed(moves, y, last_features), to, (even and not packed) or given != to or gives != -1)
        return _OUTPUT if y is None else y

    return run


def _summed(moves: Moves, y: Any, features: int) -> Any:
    """Return ``y``, of which backward all-reduces the gradient of the last ``features`` features; -1 means all."""
    if not features or moves.size == 1:
        return y
    if features < 0:
        return functions.read_for_parts(y, moves.group)
    return torch.cat((y[..., :-features], functions.read_for_parts(y[..., -features:], moves.group)), -1)


def original_class(module: nn.Module) -> type:
    """Return the class that a module had before styles replaced its class."""
    cls = type(module)
    while "_quick" in cls.__dict__:
        cls = cls.__bases__[-1]
    return cls


def is_simple(embedding: Any) -> bool:
    """Return whether an embedding only looks up rows: it writes no rows, and its gradients are dense."""
    return embedding.max_norm is None and not embedding.scale_grad_by_freq and not embedding.sparse


# ---------------------------------------------------------------------------------------- operations on local tensors
def _operation(module: nn.Module, cls: Any, how: Program, moves: Moves) -> Callable[..., Any] | None:
    """Return ``operate(module, x, parameters, cut, to)`` on the local input, or None for an untraced operation. The
    input is sharded along ``cut``, and the output is to be sharded along ``to``."""
    if how.distributed:
        # Some of torch's modules draw random numbers or write state, and cannot be traced. `views` has the rest.
        return None if cls.__module__.startswith("torch.") else _own_forward(cls, moves)
    if cls is nn.Embedding:
        return _embedding(how, module) if is_simple(module) else None
    function = _FUNCTIONS.get(cls)
    if how.gives == KEPT and function is None:
        own_part = part_class(moves.group)
        return lambda module, x, own, cut, to: plain(cls.forward(module, x.as_subclass(own_part)))
    if function is None:
        return None
    reads = how.parameters_for_parts and moves.size > 1

    def view(p: Any) -> Any:
        return functions.read_for_parts(plain(p), moves.group) if reads and p is not None else p

    def operate(module: Any, x: Tensor, own: Any, cut: int | None, to: int | None) -> Tensor:
        weight, bias = view(own.get("weight")), view(own.get("bias"))
        if how.gives == SUMMANDS and bias is not None:
            bias = None if to is None else moves.bring(plain(bias), None, SUMMANDS)
        with no_dispatch():
            return function(module, x, weight, bias)

    return operate


def _own_forward(cls: Any, moves: Moves) -> Callable[..., Any]:
    """Return an operation that runs the user-defined forward of a class on stand-ins for DTensors."""
    return lambda module, x, own, cut, to: cls.forward(module, x.as_subclass(moves.placed[cut]))


def _embedding(how: Program, module: Any) -> Callable[..., Any]:
    sizes, padding = how.sizes, module.padding_idx
    total, first, count = sum(sizes), sum(sizes[: how.rank]), sizes[how.rank] if sizes else 0
    own_padding = padding - first if padding is not None and first <= padding < first + count else None

    def look_up(module: Any, ids: Tensor, own: Any, cut: int | None, to: int | None) -> Tensor:
        weight = own["weight"]
        with no_dispatch():
            if count or not sizes or not ids.is_cuda:
                return F.embedding(ids, weight, padding)
            y: Tensor = weight.sum(0).expand(*ids.shape, 0)  # as in op_table/nn.py
            return y

    def look_up_own(module: Any, ids: Tensor, own: Any, cut: int | None, to: int | None) -> Tensor:
        # An id that is out of range stays outside this rank's rows, so that looking it up fails as without sharding.
        here = (ids >= first) & (ids < first + count)
        elsewhere = (ids >= 0) & (ids < total) & ~here
        with no_dispatch():
            y = F.embedding((ids - first).masked_fill(elsewhere, 0), own["weight"], own_padding)
        return y.masked_fill(elsewhere.unsqueeze(-1), 0.0)

    return look_up_own if how.gives == SUMMANDS else look_up


#: The functions that modules of these classes compute, with arguments module, input, weight and bias.
_FUNCTIONS: dict[type, Callable[..., Tensor]] = {
    nn.Linear: lambda module, x, weight, bias: F.linear(x, weight, bias),
    nn.LayerNorm: lambda module, x, weight, bias: F.layer_norm(x, module.normalized_shape, weight, bias, module.eps),
    nn.RMSNorm: lambda module, x, weight, bias: F.rms_norm(x, module.normalized_shape, weight, module.eps),
}


when_imported("torch._dynamo", partial(importlib.import_module, f"{__package__}.outside"))
