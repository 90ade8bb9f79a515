"""Matrix products: the inner dimension is contracted, so that sharding it gives a partial sum."""

from __future__ import annotations

import re
from typing import Any

from hyper_parallel.core.rules.labels import Labels, broadcast, named
from hyper_parallel.core.rules.op_sharding import OpSharding
from hyper_parallel.core.rules.registry import rule


@rule("linear", "x(*,in) weight(*,in) bias=None", repeatable=True, memory="fresh")
def linear(shapes: tuple, static_args: Any) -> OpSharding | None:
    """``x @ weight.T + bias``; a 1-d weight is a single row, whose dimension is dropped."""
    x, weight, bias = (*shapes, None)[:3]
    if not x or not weight or len(weight) > 2 or x[-1] != weight[-1]:
        return None
    out: Labels = ("o",) if len(weight) == 2 else ()
    if bias is not None and tuple(bias) != tuple(weight[:-1]):
        return None
    batch = named(x[:-1])
    return OpSharding(
        operands=((*batch, "i"), (*out, "i"), None if bias is None else out)[: len(shapes)],
        results=((*batch, *out),),
        result_shapes=((*x[:-1], *weight[:-1]),),
        terms=((0, 1),) if bias is None else ((0, 1), (2,)),
        reduce="sum",
    )


@rule("matmul", "x other | transpose_a=False transpose_b=False", repeatable=True, memory="fresh")
def matmul(shapes: tuple, static_args: Any) -> OpSharding | None:
    """``a @ b`` as in NumPy: vectors are promoted, batch dimensions broadcast.

    The flags transpose the last two dimensions of an operand that has two.
    """
    a, b = shapes
    if not a or not b:
        return None
    transpose_a, transpose_b = (*static_args, False, False)[:2]
    a_core = ("k",) if len(a) == 1 else ("k", "m") if transpose_a else ("m", "k")
    b_core = ("k",) if len(b) == 1 else ("n", "k") if transpose_b else ("k", "n")
    sizes = dict(zip(a_core, a[-len(a_core) :], strict=True))
    for label, size in zip(b_core, b[-len(b_core) :], strict=True):
        if sizes.setdefault(label, size) != size:
            return None
    batch = broadcast((a[: -len(a_core)], b[: -len(b_core)]))
    if batch is None:
        return None
    batch_shape, batch_labels, (a_batch, b_batch) = batch
    core = tuple(label for label in ("m", "n") if label in sizes)
    return OpSharding(
        operands=((*a_batch, *a_core), (*b_batch, *b_core)),
        results=((*batch_labels, *core),),
        result_shapes=((*batch_shape, *(sizes[label] for label in core)),),
        terms=((0, 1),),
        reduce="sum",
    )


@rule("addmm", "x mat1(m,k) mat2(k,n) | beta=1 alpha=1", memory="fresh")
def addmm(shapes: tuple, static_args: Any) -> OpSharding | None:
    """``c + a @ b`` for matrices a and b; c broadcasts to the result."""
    c, a, b = shapes
    if c is None or len(a) != 2 or len(b) != 2 or a[1] != b[0] or len(c) > 2:
        return None
    shape = (a[0], b[1])
    aligned = tuple(zip(c, shape[2 - len(c) :], ("m", "n")[2 - len(c) :], strict=True))
    if any(size not in (1, full) for size, full, _ in aligned):
        return None
    return OpSharding(
        operands=(tuple(label if size == full else None for size, full, label in aligned), ("m", "k"), ("k", "n")),
        results=(("m", "n"),),
        result_shapes=(shape,),
        terms=((0,), (1, 2)),
        reduce="sum",
    )


@rule("einsum", "*xs | equation")
def einsum(shapes: tuple, static_args: Any) -> OpSharding | None:
    """Sums of products, by an equation such as ``"bij,bjk->bik"``, which names the dimensions.

    Diagonals (an index twice in one operand) and broadcast dimensions run on gathered operands.
    """
    equation = static_args[0].replace(" ", "")
    if not re.fullmatch(r"[A-Za-z]*(,[A-Za-z]*)*(->[A-Za-z]*)?", equation):
        return None
    inputs, arrow, output = equation.partition("->")
    operands = tuple(tuple(part) for part in inputs.split(","))
    if not arrow:
        output = "".join(sorted(c for c in set(inputs) - {","} if inputs.count(c) == 1))
    if len(operands) != len(shapes) or any(len(set(labels)) != len(labels) for labels in (*operands, output)):
        return None
    sizes: dict[str, int] = {}
    for labels, shape in zip(operands, shapes, strict=True):
        if shape is None or len(shape) != len(labels):
            return None
        for label, size in zip(labels, shape, strict=True):
            if sizes.setdefault(label, size) != size:
                return None
    if not set(output) <= set(sizes):
        return None
    return OpSharding(
        operands=operands,
        results=(tuple(output),),
        result_shapes=(tuple(sizes[label] for label in output),),
        terms=(tuple(range(len(operands))),),
        reduce="sum",
    )
