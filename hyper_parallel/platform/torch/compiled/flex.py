"""Replacement code for `torch.nn.attention.flex_attention.flex_attention` that also takes DTensors.

Torch's function does not consult tensor classes, programs import it by name, and torch's compiler runs inside it. So
its code object is replaced (`platform.torch.patches`). Plain tensors go to a function with the original code, DTensors
to `handlers.flex_attention`. A compiled frame computes DTensors on local tensors if all ranks have equally many heads
or samples.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor

from hyper_parallel.platform.torch.basics.tensor import State
from hyper_parallel.platform.torch.compiled.flex_parts import own_part_of_mask, seeing_whole
from hyper_parallel.platform.torch.compiled.moves import placed_classes
from hyper_parallel.platform.torch.compiled.placed import Outside
from hyper_parallel.platform.torch.compiled.tracing import is_tracing

__all__ = ["MIXES", "MODULE", "Flex", "attend", "is_known_code", "serving_dtensors"]

MODULE = "torch.nn.attention.flex_attention"


#: Callback ``mixes(name, lengths)`` of `Platform.attention_calls`, set while that is active.
MIXES: ContextVar[Any] = ContextVar("hyper_parallel_flex_mixes", default=None)


class Flex:
    """The original function, which the patch stores, and the handler of DTensors."""

    #: Function with torch's original code; call it with all arguments.
    original: Any = None
    #: ``eager(*args)``: computes a call with DTensors.
    eager: Any = None


def flex_attention(
    query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False,
    kernel_options=None, *, return_aux=None,
):  # fmt: skip
    # This code runs with the globals of torch's module, so it imports all names that it needs.
    from hyper_parallel.platform.torch.compiled.flex import attend

    return attend(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux
    )  # fmt: skip


_CODE = flex_attention.__code__


def _parameters(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def is_known_code(code: Any) -> str | None:
    """Return why ``code`` is not the code that the patch knows, or None if it is; a check for `Patch`."""
    kinds = ("co_argcount", "co_kwonlyargcount", "co_posonlyargcount", "co_flags", "co_freevars")
    if not isinstance(code, CodeType):
        return "is no code"
    known = _parameters(code) == _parameters(_CODE) and all(getattr(code, x) == getattr(_CODE, x) for x in kinds[:3])
    return None if known and not code.co_freevars else f"is of a function of {_parameters(code)}"


def serving_dtensors(code: CodeType) -> CodeType:
    """Return the replacement for the code of torch's function, and save the original code in `Flex`."""
    held: Any = vars(sys.modules[MODULE])["flex_attention"]
    Flex.original = FunctionType(code, held.__globals__, held.__name__, held.__defaults__)
    return _CODE


def attend(
    query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, scale: Any, enable_gqa: bool,
    return_lse: bool, kernel_options: Any, return_aux: Any,
) -> Any:  # fmt: skip
    """Run `flex_attention` on DTensors, and torch's own function on other tensors."""
    dtensor = State.tensor_class.__bases__[0]
    if not (isinstance(query, dtensor) or isinstance(key, dtensor) or isinstance(value, dtensor)):
        if not is_tracing() and (mixes := MIXES.get()) is not None:
            mixes("flex_attention", (*query.shape[-2:-1], *key.shape[-2:-1]))
        return Flex.original(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
            return_aux=return_aux,
        )  # fmt: skip
    args = (
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux
    )  # fmt: skip
    if not is_tracing():
        return Flex.eager(*args)
    found = _own_part(query, key, value, block_mask)
    if found is None:
        Outside.say("flex_attention of DTensors placed so")
        return Outside.leave(Flex.eager, args, {})
    cls, pieces, whole = found
    results = Flex.original(
        query.to_local(), key.to_local(), value.to_local(),
        None if score_mod is None else seeing_whole(score_mod, pieces, whole, None),
        None if block_mask is None else own_part_of_mask(block_mask, pieces, whole),
        scale, enable_gqa, return_lse, kernel_options, return_aux=return_aux,
    )  # fmt: skip
    if isinstance(results, Tensor):
        return results.as_subclass(cls)
    out, more = results
    if isinstance(more, Tensor):
        return out.as_subclass(cls), more.as_subclass(cls)
    lse, largest = more.lse, more.max_scores
    more = type(more)(
        lse=None if lse is None else lse.as_subclass(cls),
        max_scores=None if largest is None else largest.as_subclass(cls),
    )
    return out.as_subclass(cls), more


def _own_part(query: Any, key: Any, value: Any, mask: Any) -> Any:
    """Return the result's class, this rank's pieces of batch and heads, and the full sizes of both.

    Returns None for operands that eager mode must redistribute or reject."""
    dtensor = State.tensor_class.__bases__[0]
    for x in (query, key, value):
        if not isinstance(x, dtensor) or x.placed_on is None or x.gathers is not None or x.ndim != 4:
            return None
    mesh, cut, shape = query.placed_on, query.placed_cut, query.shape
    cut = None if cut is None else cut % 4
    if cut not in (None, 0, 1) or key.shape[0] != shape[0] or value.shape[0] != shape[0]:
        return None
    for x in (key, value):
        if x.placed_on is not mesh or (None if x.placed_cut is None else x.placed_cut % 4) != cut:
            return None
    if mask is not None:
        own = mask.kv_num_blocks.shape
        if len(own) != 3 or own[0] not in (1, shape[0]) or own[1] not in (1, shape[1]):
            return None
    cls, rank = _class_and_rank(id(mesh), mesh.shape[0], cut)
    if cls is None:
        return None
    batch, heads = query.to_local().shape[:2]
    if not batch or not heads:
        return None
    pieces = (((rank * batch if cut == 0 else 0, batch),), ((rank * heads if cut == 1 else 0, heads),))
    return cls, pieces, (shape[0], shape[1])


def _class_and_rank(number: int, size: int, cut: int | None) -> tuple[Any, int]:
    """Return the `Placed` class and the rank for the mesh with this id. The class is None if the mesh is unknown."""
    mesh = State.core.mesh_with_id(number)
    return (None, 0) if mesh is None else (placed_classes(mesh, size).get(cut), mesh.get_local_rank())


# Same mark as `torch.compiler.assume_constant_result`, which would import the compiler: called while it traces.
_class_and_rank._dynamo_marked_constant = True  # type: ignore[attr-defined]
