"""Texts of problems that the judge finds: the fact and its remedy."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.placement_types import Replicate, Shard
from hyper_parallel.core.plain_code.findings import Problem
from hyper_parallel.core.plain_code.marks import Mark, describe

_TAKES_APART = frozenset({"split", "chunk", "getitem", "reshape", "view", "reshape_copy", "repeat"})
_WHOLE = (
    "Gather in the layer that returns the tensor, with output_layouts=Replicate(), or with PrepareModuleInput or "
    "PrepareModuleOutput"
)
_PACKED = (
    "If the layer's weight packs several matrices, use ColwiseParallel(packed=...) or heads=(...). Otherwise gather "
    "in the layer, with output_layouts=Replicate()"
)
_NORMED = (
    "Use HeadNormParallel() for a norm inside attention heads, and SequenceParallel() for a norm along the sequence. "
    "Otherwise gather in the layer that returns the shard, with output_layouts=Replicate()"
)
_SUM = (
    "Sum over the ranks in a RowwiseParallel layer, or sum before this operation: DTensor.from_local(x, mesh, "
    "[Partial()]).full_tensor()"
)
_READ = (
    "Read it through DTensor.from_local(x, mesh, [Replicate()]).to_local(grad_placements=[Partial()]), which sums the "
    "gradient over the ranks. For an output of NoParallel, pass partial_features=... or "
    "local_output_grad_placements=Partial() to the style"
)
_OWNED = (
    "Give its module a style, such as SequenceParallel(), HeadNormParallel() or ParameterParallel({...}): the style "
    "sums the gradient over the ranks"
)


def moved_problem(title: str, name: str, texts: Sequence[str], have: Layout | None, want: Layout | None) -> Problem:
    """Return the problem of an operation whose operands would have to be redistributed.

    Args:
        title: native name of the operation.
        name: canonical name of the operation.
        texts: descriptions of its operands.
        have, want: present and needed layout of the operand; None if only the local computation differs.
    """
    given = f"{title} gets {' and '.join(texts)}"
    if have is None or want is None:
        remedy = _NORMED if "norm" in name else _PACKED if name in _TAKES_APART else _WHOLE
        return Problem("whole", f"{given}, and its result on a shard is not the shard of its result", remedy)
    for old, new in zip(have.placements, want.placements, strict=True):
        if old is new:
            continue
        if old.is_partial():
            return Problem(
                "sum", f"{given}, and is not linear in this partial tensor: the sum over ranks must come first", _SUM
            )
        if new.is_partial():
            text = f"{given}, and would add a replicated tensor to the sum once for each rank"
            return Problem("count", text, _SUM)
        if new is Replicate() and isinstance(old, Shard):
            remedy = _NORMED if "norm" in name else _PACKED if name in _TAKES_APART else _WHOLE
            return Problem(
                "whole", f"{given}, and needs the full dimension {old.dim}, of which each rank has a shard", remedy
            )
    return Problem("mixed", f"{given}, which are sharded in different ways", _WHOLE)


def unfit_problem(title: str, name: str, texts: Sequence[str]) -> Problem:
    """Return the problem of operands whose global shapes do not fit together."""
    given = f"{title} gets {' and '.join(texts)}"
    if name == "split":
        return Problem("whole", f"{given}, and splits a dimension of which each rank has a shard", _PACKED)
    if "norm" in name:
        return Problem("whole", f"{given}, and normalises a dimension of which each rank has a shard", _NORMED)
    if name == "linear":
        return Problem(
            "mixed",
            f"{given}, an unsharded weight",
            "Give this layer RowwiseParallel(), or " + _WHOLE[0].lower() + _WHOLE[1:],
        )
    if name == "write":
        return Problem("mixed", f"{given}, and writes into a tensor with another placement", _WHOLE)
    return Problem("mixed", f"{given}, whose full tensors have shapes that do not fit this operation", _WHOLE)


def reshape_problem(title: str, mark: Mark, before: tuple[int, ...], after: tuple[int, ...]) -> Problem:
    """Return the problem of a reshape whose result is not a shard of any reshaped global tensor."""
    text = (
        f"{title} gets {describe(mark, before)}, and its result of shape {tuple(after)} is not a shard of a full tensor"
    )
    return Problem("whole", text, _PACKED)


def gradient_problem(title: str, shape: tuple[int, ...], parameter: bool, mark: Mark | None, assumed: bool) -> Problem:
    """Return the problem of an operand whose gradient is partial, without a reduction over the ranks."""
    what = "a parameter" if parameter else "a tensor"
    same = "assumed to be a shard" if assumed else "the same on all ranks"
    text = (
        f"{title} reads {what} of shape {tuple(shape)}, {same}, next to this rank's shard: each rank computes a "
        "partial gradient, and no style sums it over the ranks"
    )
    return Problem("gradient", text, _OWNED if parameter else _READ, certain=not assumed)
