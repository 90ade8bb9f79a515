"""Layers that are described by a signature: convolutions, pools, interpolation, norms of channel groups.

Backends have dozens of such functions with different arguments. All of them are independent along some dimensions,
named by letters, and need the other dimensions unsharded. So the signature is a static argument.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from hyper_parallel.core.rules.labels import Labels
from hyper_parallel.core.rules.op_sharding import OpSharding
from hyper_parallel.core.rules.registry import rule

#: The letter of a dimension that consists of channel groups.
_GROUPED = "g"


@dataclass(frozen=True)
class Signature:
    """A parsed signature such as ``"ni..,oi..,o->no..|01+2"``.

    Attributes:
        operands, results: labels of each operand and result; None (a dot) for an unsharded dimension.
        terms: for each product of a sum, the indices of its operands. The function is linear in each of them.
    """

    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    terms: tuple[tuple[int, ...], ...]

    @property
    def letters(self) -> tuple[str, ...]:
        """All labels, sorted."""
        return tuple(sorted({label for labels in (*self.operands, *self.results) for label in labels} - {None}))


@functools.cache
def read_signature(text: str) -> Signature:
    """Parse a signature: operands and results, separated by commas, and the terms after a bar.

    Example:
        >>> read_signature("ni.,oi.->no.|01").results
        (('n', 'o', None),)
    """
    dims, _, terms = text.partition("|")
    operands, results = (
        tuple(tuple(None if letter == "." else letter for letter in one) for one in side.split(","))
        for side in dims.split("->")
    )
    return Signature(operands, results, tuple(tuple(map(int, term)) for term in terms.split("+") if term))


@rule(
    "labelled",
    "*xs=None | signature results groups=0",
    repeatable=True,
)
def labelled(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Function described by a signature, such as `ni..,oi..,o->no..` of a convolution.

    `n` and `o` can be sharded. So can `i`, which the result lacks: it gives partial sums, if terms follow a bar. A dot
    is an unsharded dimension. The letter `g` of the first operand is a dimension of channel groups, which are not
    split. Every rank needs an element of `g` and of each summed dimension.
    """
    text, result_shapes, groups = static_args[:3]
    signature = read_signature(text)
    operands = tuple(
        None if shape is None else labels for shape, labels in zip(shapes, signature.operands, strict=True)
    )
    if any(x is not None and len(x) != len(shape) for x, shape in zip(operands, shapes, strict=True)):
        return None
    grouped = groups and _GROUPED in signature.letters
    terms = tuple(term for term in signature.terms if all(shapes[i] is not None for i in term))
    kept = {label for label in signature.letters if all(label in labels for labels in signature.results)}
    if grouped:
        kept.discard(_GROUPED)
    return OpSharding(
        operands=operands,
        results=signature.results,
        result_shapes=result_shapes,
        terms=terms,
        reduce="sum" if terms else None,
        localize=_local_groups if grouped else None,
        nonempty=tuple(label for label in signature.letters if label not in kept),
        filled=tuple(label for label in signature.letters if label in kept),
        units=((_GROUPED, groups),) if grouped else (),
    )


def _local_groups(static_args: tuple, operand_layouts: tuple, result_layouts: tuple) -> tuple:
    """Return the static arguments with the number of channel groups on this rank."""
    text, shapes, groups, *rest = static_args
    dim = read_signature(text).operands[0].index(_GROUPED)
    layout = operand_layouts[0]
    return (text, shapes, groups * layout.local_shape[dim] // layout.shape[dim], *rest)
