"""The second forward of a plan: styled modules as torch's compiler traces them.

Made of a style's data (`CompiledForward`): local parameters as plain tensors, and the functions of `functions`. Calls
that do not fit the data run outside of the compiled code, as in eager mode. So do modules without data.
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

from hyper_parallel.platform.contract import CompiledForward
from hyper_parallel.platform.imports import when_imported
from hyper_parallel.platform.torch.basics.tensor import State
from hyper_parallel.platform.torch.compiled import functions
from hyper_parallel.platform.torch.compiled.moves import INPUT, Moves, shards_of
from hyper_parallel.platform.torch.compiled.placed import Outside, part_class, plain

__all__ = ["make_run", "run_forward"]

#: Why a module is left to eager mode: a compiled forward then returns the reason in place of its output.
_NO_WAY = "this style, or this kind of module, is not traced"
_PARAMETERS = "its parameters are not those that the style has distributed"
_OUTPUT = "its output would not be cut evenly, or into parts of several matrices"


def run_forward(module: Any, args: tuple, kwargs: dict) -> Any:
    """A call of a styled module, or of a unit of data parallelism, inside of a compiled frame."""
    if "_compiled_run" not in module.__dict__:
        if torch.compiler.is_exporting():
            return module._replaced_forward(module, *args, **kwargs)  # which refuses it
        return Outside.unit(module, args, kwargs)
    run = module._compiled_run
    y = _NO_WAY if run is None else run(module, args, kwargs)
    return Outside.run(module, args, kwargs, y) if isinstance(y, str) else y


def make_run(module: nn.Module, how: CompiledForward | None) -> Callable[..., Any] | None:
    """``run(module, args, kwargs)`` in place of the forward of ``module``: gives a reason, a string, where it does not
    apply. Equivalent modules share one, so that they share a graph: compiled frames compare its identity (`guards`)."""
    if how is None:
        return None
    # Weak, as layouts are known by their mesh: one that held layouts would never go.
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
    """Return the facts in a module's own attributes, which its class does not say."""
    return (module.padding_idx, is_simple(module)) if cls is nn.Embedding else ()


def _make_run(module: nn.Module, cls: type, how: CompiledForward) -> Callable[..., Any] | None:
    if how.kind in ("column", "row"):
        if cls is nn.Linear:
            return _linear(how)
        return _embedding(how, module) if cls is nn.Embedding and is_simple(module) else None
    if how.kind == "parts":
        return _parts(how, cls)
    if how.kind == "distributed":
        return _distributed(how, cls)
    return _alike(how, module, cls)


def original_class(module: nn.Module) -> type:
    """The class that a module had before styles gave it one of their own."""
    cls = type(module)
    while "_quick" in cls.__dict__:
        cls = cls.__bases__[-1]
    return cls


def _moves(how: Any) -> Moves:
    return Moves(how.mesh, how.group, how.size, how.rank, how.local)


def _give(moves: Moves, y: Tensor | None, cut: int | None, even: bool = True) -> Any:
    """Return the module's output, or the reason why there is none."""
    y = None if y is None else moves.give(y, cut, even)
    return _OUTPUT if y is None else y


def _is_planned(p: Any, layout: Any) -> bool:
    """Return whether a parameter is the DTensor that the plan has made, or None where that had none."""
    if layout is None or p is None:
        return p is layout
    return isinstance(p, State.tensor_class.__bases__[0]) and p._layout is layout


def _linear(how: CompiledForward) -> Callable[..., Any]:
    moves, given, wanted, sizes = _moves(how), how.given, how.wanted, how.sizes
    of_weight, of_bias = how.layouts["weight"], how.layouts.get("bias")
    even, packed, taken, columns = min(sizes) == max(sizes), how.packed, sum(sizes), how.kind == "column"
    shards = shards_of(how.compare)

    def column(given: Any, x: Tensor, cut: int | None, weight: Any, bias: Any, to: int | None) -> Any:
        if cut == x.ndim - 1 and x.shape[cut] * moves.size != weight.shape[1]:
            return INPUT
        x = moves.read(given, x, cut)
        with no_dispatch():
            y = F.linear(x, weight, bias)
        features = y.ndim - 1
        if to != features:
            if packed:
                return _OUTPUT
            y = moves.move(y, features, to, sizes)
        return _give(moves, y, to, (even and not packed) or to != features)

    def row(x: Tensor, cut: int | None, weight: Any, bias: Any, to: int | None) -> Any:
        features = x.ndim - 1
        if cut != features:
            if packed or x.shape[features] != taken or (cut is not None and not even):
                return INPUT
            x = moves.part(x, features, sizes) if cut is None else moves.move(x, cut, features)
        with no_dispatch():
            if to is None:
                y: Any = moves.add_up(F.linear(x, weight, None), None)
                # Automatic mixed precision computes in another dtype than that of the parameters.
                y = y if bias is None else y + bias.to(y.dtype)
            else:
                bias = bias if bias is None else functions.one_summand(plain(bias), moves.rank)
                y = moves.add_up(F.linear(x, weight, bias), to)
        return _give(moves, y, to)

    def run(module: Any, args: tuple, kwargs: dict) -> Any:
        if kwargs or len(args) != 1:
            return INPUT
        found = moves.take(args[0], given, module, shards, features=True)
        if isinstance(found, str):
            return found
        x, cut = found
        own = module._parameters
        weight, bias = own.get("weight"), own.get("bias")
        if not _is_planned(weight, of_weight) or not _is_planned(bias, of_bias):
            return _PARAMETERS
        if wanted is None:
            to = None
        elif -x.ndim <= wanted < x.ndim:
            to = wanted % x.ndim
        else:
            return INPUT
        return column(args[0], x, cut, weight, bias, to) if columns else row(x, cut, weight, bias, to)

    return run


def is_simple(embedding: Any) -> bool:
    """Return whether an embedding only looks rows up: it writes none, and its gradients are dense."""
    return embedding.max_norm is None and not embedding.scale_grad_by_freq and not embedding.sparse


def _embedding(how: CompiledForward, module: Any) -> Callable[..., Any]:
    moves, given, wanted, sizes, padding = _moves(how), how.given, how.wanted, how.sizes, module.padding_idx
    of_weight, even, columns = how.layouts["weight"], min(how.sizes) == max(how.sizes), how.kind == "column"
    shards = shards_of(how.compare)
    total, first, count = sum(sizes), sum(sizes[: how.rank]), sizes[how.rank]
    own_padding = padding - first if padding is not None and first <= padding < first + count else None

    def column(ids: Tensor, weight: Any, to: int | None) -> Any:
        with no_dispatch():
            if count or not ids.is_cuda:
                y = F.embedding(ids, weight, padding)
            else:  # as in op_table/nn.py
                y = weight.sum(0).expand(*ids.shape, 0)
        features = y.ndim - 1
        y = moves.move(y, features, to, sizes)
        return _give(moves, y, to, even or to != features)

    def row(ids: Tensor, weight: Any, to: int | None) -> Any:
        # An id that no rank has stays outside of the rows that this one has, so that looking it up fails as ever.
        own = (ids >= first) & (ids < first + count)
        elsewhere = (ids >= 0) & (ids < total) & ~own
        with no_dispatch():
            y = F.embedding((ids - first).masked_fill(elsewhere, 0), weight, own_padding)
        y = moves.add_up(y.masked_fill(elsewhere.unsqueeze(-1), 0.0), to)
        return _give(moves, y, to)

    def run(module: Any, args: tuple, kwargs: dict) -> Any:
        found = INPUT if kwargs or len(args) != 1 else moves.take(args[0], given, module, shards)
        weight = module._parameters.get("weight")
        if isinstance(found, str):
            return found
        if not _is_planned(weight, of_weight):
            return _PARAMETERS
        ids, cut = found
        if wanted is not None and not -ids.ndim - 1 <= wanted <= ids.ndim:
            return INPUT
        to = None if wanted is None else wanted % (ids.ndim + 1)
        ids = moves.whole(ids, cut)
        return (column if columns else row)(ids, weight, to)

    return run


def _layer_norm(module: Any, x: Tensor, weight: Any, bias: Any) -> Tensor:
    return F.layer_norm(x, module.normalized_shape, weight, bias, module.eps)


def _rms_norm(module: Any, x: Tensor, weight: Any, bias: Any) -> Tensor:
    return F.rms_norm(x, module.normalized_shape, weight, module.eps)


_NORMS = {nn.LayerNorm: _layer_norm, nn.RMSNorm: _rms_norm}


def _parts(how: CompiledForward, cls: Any) -> Callable[..., Any]:
    moves, given, planned, normalized = _moves(how), how.given, tuple(how.layouts.items()), how.normalized
    norm, group, forward = _NORMS.get(cls), how.group().group_name, cls.forward
    part, shards = part_class(group), shards_of(how.compare)

    def view(p: Any) -> Any:
        return p if p is None or moves.size == 1 else functions.read_for_parts(plain(p), group)

    def run(module: Any, args: tuple, kwargs: dict) -> Any:
        found = INPUT if kwargs or len(args) != 1 else moves.take(args[0], given, module, shards)
        own = module._parameters
        if isinstance(found, str):
            return found
        for name, layout in planned:
            if not _is_planned(own.get(name), layout):
                return _PARAMETERS
        x, cut = found
        if cut is None or cut >= x.ndim - normalized:
            return INPUT
        if norm is not None:
            y = norm(module, x, view(own.get("weight")), view(own.get("bias")))
        else:
            y = plain(forward(module, x.as_subclass(part)))
        return moves.give(y, cut)

    return run


def _distributed(how: CompiledForward, cls: Any) -> Callable[..., Any] | None:
    """Return a module's own forward, run on stand-ins for DTensors; `views` lists the operations that are traced."""
    if cls.__module__.startswith("torch."):
        return None  # random numbers and writes, which would not be traced
    moves, given, planned, forward = _moves(how), how.given, tuple(how.layouts.items()), cls.forward
    shards = shards_of(how.compare)

    def run(module: Any, args: tuple, kwargs: dict) -> Any:
        found = INPUT if kwargs or len(args) != 1 else moves.take(args[0], given, module, shards)
        if isinstance(found, str):
            return found
        x, cut = found
        own = module._parameters
        for name, layout in planned:
            if not _is_planned(own.get(name), layout):
                return _PARAMETERS
        if given is None or cut != given % x.ndim:
            return INPUT
        y = forward(module, x.as_subclass(moves.placed[cut]))
        if not isinstance(y, moves.dtensor):
            return _OUTPUT
        return y.to_local() if moves.local else y

    return run


def _alike(how: CompiledForward, module: Any, cls: type) -> Callable[..., Any] | None:
    """A layer of the framework on a whole input, between its conversions."""
    moves, given, wanted, planned = _moves(how), how.given, how.wanted, tuple(how.layouts.items())
    shards = shards_of(how.compare)
    if cls is nn.Embedding:
        padding = module.padding_idx

        def call(module: Any, x: Tensor, weight: Any, bias: Any) -> Tensor:
            return F.embedding(x, weight, padding)
    elif cls is nn.Linear:

        def call(module: Any, x: Tensor, weight: Any, bias: Any) -> Tensor:
            return F.linear(x, weight, bias)
    elif cls in _NORMS:
        call = _NORMS[cls]
    else:
        return None
    if cls is nn.Embedding and not is_simple(module):
        return None

    def run(module: Any, args: tuple, kwargs: dict) -> Any:
        found = INPUT if kwargs or len(args) != 1 else moves.take(args[0], given, module, shards)
        if isinstance(found, str):
            return found
        own = module._parameters
        for name, layout in planned:
            if not _is_planned(own.get(name), layout):
                return _PARAMETERS
        x = moves.whole(*found)
        weight, bias = own.get("weight"), own.get("bias")
        y = call(module, x, weight if weight is None else plain(weight), bias if bias is None else plain(bias))
        if wanted is not None and not -y.ndim <= wanted < y.ndim:
            return INPUT
        to = None if wanted is None else wanted % y.ndim
        y = moves.move(y, None, to)
        return _give(moves, _summed(moves, y, how.partial_features), to)

    return run


def _summed(moves: Moves, y: Any, features: int) -> Any:
    """``y`` with the gradient of its last ``features`` added up, -1 of all."""
    if not features or moves.size == 1:
        return y
    if features < 0:
        return functions.read_for_parts(y, moves.group)
    return torch.cat((y[..., :-features], functions.read_for_parts(y[..., -features:], moves.group)), -1)


when_imported("torch._dynamo", partial(importlib.import_module, f"{__package__}.outside"))
