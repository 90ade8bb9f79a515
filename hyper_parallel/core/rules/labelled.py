"""Layers whose rule is their signature: convolutions, pools, interpolation, norms of groups of channels.

Backends know dozens of such functions, each with arguments of its own, and all of them are one thing: a function that
is independent along some dimensions, named by letters, and needs the others whole. So the signature is a static
argument.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from hyper_parallel.core.rules.labels import Labels
from hyper_parallel.core.rules.op_sharding import OpSharding
from hyper_parallel.core.rules.registry import rule

#: The letter of a dimension of groups of channels.
_GROUPED = "g"


@dataclass(frozen=True)
class Signature:
    """A signature such as ``"ni..,oi..,o->no..|01+2"``, read.

    Attributes:
        operands, results: labels of each; a dot stands for a dimension that must be whole.
        terms: the places of operands in each product of a sum, in which the function is linear.
    """

    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    terms: tuple[tuple[int, ...], ...]

    @property
    def letters(self) -> tuple[str, ...]:
        """All labels."""
        return tuple(sorted({label for labels in (*self.operands, *self.results) for label in labels} - {None}))


@functools.cache
def read_signature(text: str) -> Signature:
    """Read a signature: operands and results, separated by commas, and after a bar the terms.

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
    """A function by its signature, such as `ni..,oi..,o->no..` of a convolution. `n` and `o` can be sharded. So can
    `i`, which the result lacks: it gives partial sums, where terms follow a bar. A dot is a whole dimension. The letter
    `g`, which the first operand has, is a dimension of groups of channels, which are not cut. Every rank needs an
    element of `g` and of each summed dimension."""
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
    """The number of groups that this rank has."""
    text, shapes, groups, *rest = static_args
    dim = read_signature(text).operands[0].index(_GROUPED)
    layout = operand_layouts[0]
    return (text, shapes, groups * layout.local_shape[dim] // layout.shape[dim], *rest)
