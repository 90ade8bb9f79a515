"""Shrunk random programs that once gave wrong results or hung. `test_fuzz` runs them again."""

from __future__ import annotations

from hyper_parallel import PackedShard, Partial, Replicate, Shard
from hyper_parallel.testing.fuzz.program import Leaf, Program, Step

__all__ = ["FOUND"]


def _leaf(shape: tuple[int, ...], placements: tuple, requires_grad: bool = True, dtype: str = "float32") -> Leaf:
    return Leaf(shape, dtype, placements, requires_grad, 5)


#: The former error -> the program.
FOUND: dict[str, Program] = {
    "gradients of gradients of a mean, where a shard is empty": Program(
        1,
        (2,),
        (_leaf((1,), (Shard(0),)),),
        (Step("mean", (0,), (None, False)), Step("mul", (1, 1), ())),
        (2,),
        second_order=True,
    ),
    "gradients of gradients of joined vectors, where a shard is empty": Program(
        2,
        (4,),
        (_leaf((2,), (Shard(0),)),),
        (Step("square", (0,), ()), Step("cat", (1, 1), (0,)), Step("square", (2,), ())),
        (3,),
        second_order=True,
    ),
    "a write to contiguous() of an extreme": Program(
        3,
        (2,),
        (_leaf((5, 4), (Partial("max"),), requires_grad=False, dtype="float16"),),
        (Step("contiguous", (0,), ()), Step("set", (1,), (((1, None, 2),), 2))),
        (0,),
    ),
    "a write to a tensor that softmax has saved, of which some ranks have nothing": Program(
        5,
        (4,),
        (_leaf((3,), (Shard(0),)),),
        (Step("square", (0,), ()), Step("softmax", (1,), (-1,)), Step("double", (1,), ())),
        (2,),
    ),
    "fewer chunks than were asked for, of packed parts": Program(
        6,
        (2,),
        (_leaf((3, 2), (PackedShard(1, (1, 1)),)),),
        (Step("chunk", (0,), (3, 1)), Step("square", (1,), ())),
        (2, 3),
    ),
    "a write to all of a view, indexed by None": Program(
        7,
        (2,),
        (_leaf((4, 2), (Shard(1),), requires_grad=False),),
        (Step("transpose", (0,), (1, 0)), Step("set", (1,), ((None,), 2))),
        (0, 1),
    ),
    "a write by None and a slice, where a rank has one column": Program(
        8,
        (2,),
        (_leaf((5, 3), (Shard(1),), requires_grad=False),),
        (Step("set", (0,), ((None, (1, 2, None)), 2)),),
        (0,),
    ),
    "a write to all of a view without dimensions": Program(
        9,
        (4,),
        (_leaf((), (Replicate(),), requires_grad=False),),
        (Step("reshape", (0,), ((),)), Step("set", (1,), ((...,), 2))),
        (0,),
    ),
    "the gradient of a product of one row": Program(
        10,
        (2, 2),
        (
            _leaf((5, 3), (Replicate(), Shard(0)), requires_grad=False),
            _leaf((1, 2, 5), (Shard(1), Replicate())),
        ),
        (Step("matmul", (1, 0), ()),),
        (2,),
    ),
    "a write to the index of a view": Program(
        11,
        (3,),
        (
            _leaf((2,), (Replicate(),), requires_grad=False, dtype="int64"),
            _leaf((2, 3), (Shard(1),), requires_grad=False),
        ),
        (Step("reshape", (1,), ((2, 3, 1),)), Step("set_at", (2, 0), (2,))),
        (1, 2),
    ),
    "a write to a view of a permuted tensor that two dimensions of the mesh shard": Program(
        12,
        (2, 2),
        (_leaf((3, 4, 4), (Shard(1), Shard(2)), requires_grad=False),),
        (Step("permute", (0,), ((2, 0, 1),)), Step("reshape", (1,), ((4, 12),)), Step("double", (2,), ())),
        (0, 2),
    ),
    "a write that reads a view of its own target, of which a rank has one element": Program(
        13,
        (2,),
        (_leaf((3,), (Shard(0),), requires_grad=False, dtype="int64"),),
        (
            Step("unsqueeze", (0,), (1,)),
            Step("reshape", (1,), ((1, 3, 1),)),
            Step("transpose", (2,), (0, 2)),
            Step("accumulate", (2, 3), ()),
        ),
        (0,),
    ),
    "gradients of gradients of log_softmax over sharded classes, where a rank has no samples": Program(
        14,
        (2, 2),
        (_leaf((1, 1, 1), (Replicate(), Replicate())),),
        (Step("redistribute", (0,), ((Shard(0), Shard(1)),)), Step("log_softmax", (1,), (0,))),
        (2,),
        second_order=True,
    ),
    "gradients of gradients of softmax over uneven classes, where a rank has no samples": Program(
        15,
        (2, 2),
        (_leaf((1, 3, 4), (Replicate(), Replicate())),),
        (
            Step("redistribute", (0,), ((Shard(1), Shard(0)),)),
            Step("stack", (1, 1), (0,)),
            Step("stack", (2, 2), (1,)),
            Step("softmax", (3,), (3,)),
        ),
        (4,),
        second_order=True,
    ),
    "a copy of a column, of which a rank has one element and data had to move": Program(
        16,
        (2, 2),
        (_leaf((3, 2), (Shard(1), Shard(0)), requires_grad=False),),
        (
            Step("split", (0,), (1, 1)),
            Step("contiguous", (2,), ()),
            Step("double", (0,), ()),
            Step("contiguous", (3,), ()),
        ),
        (0,),
    ),
    "a write to a part of a permuted tensor that had to move, made contiguous": Program(
        17,
        (2,),
        (_leaf((2, 4), (Shard(0),), requires_grad=False),),
        (
            Step("transpose", (0,), (1, 0)),
            Step("split", (1,), (1, 1)),
            Step("contiguous", (2,), ()),
            Step("set", (4,), ((...,), 9)),
        ),
        (0,),
    ),
    "a write to a copy of a reshaped permuted tensor, where data had to move": Program(
        18,
        (4,),
        (_leaf((2, 2, 6), (Shard(2),), requires_grad=False),),
        (
            Step("permute", (0,), ((1, 2, 0),)),
            Step("reshape", (1,), ((12, 2),)),
            Step("contiguous", (2,), ()),
            Step("double", (3,), ()),
        ),
        (0,),
    ),
    "a write to a copy of a slice of every second column, where rows had to move": Program(
        19,
        (2,),
        (_leaf((4, 4), (Shard(0),), requires_grad=False),),
        (
            Step("index", (0,), (((None, None, None), (0, None, 2)),)),
            Step("index", (1,), (((1, 3, None),),)),
            Step("contiguous", (2,), ()),
            Step("double", (3,), ()),
        ),
        (0,),
    ),
    "a write to a copy of the squares of partial sums that were permuted": Program(
        20,
        (2,),
        (_leaf((2, 3), (Partial("avg"),), requires_grad=False),),
        (
            Step("transpose", (0,), (0, 1)),
            Step("square", (1,), ()),
            Step("contiguous", (2,), ()),
            Step("double", (3,), ()),
        ),
        (2,),
    ),
    "a write to a permuted tensor, cut where ranks have one row, and permuted to be contiguous": Program(
        21,
        (4,),
        (_leaf((8, 4), (Shard(0),), requires_grad=False),),
        (
            Step("transpose", (0,), (0, 1)),
            Step("reshape", (1,), ((4, 4, 2),)),
            Step("permute", (2,), ((1, 2, 0),)),
            Step("contiguous", (3,), ()),
            Step("double", (4,), ()),
        ),
        (0,),
    ),
    "a write to a sum of permuted tensors, permuted back, where ranks have one row": Program(
        22,
        (4,),
        (_leaf((2, 4), (Shard(0),), requires_grad=False),),
        (
            Step("transpose", (0,), (0, 1)),
            Step("add", (1, 1), ()),
            Step("transpose", (2,), (0, 1)),
            Step("contiguous", (3,), ()),
            Step("double", (4,), ()),
        ),
        (3,),
    ),
    "a column of a permuted tensor, of which ranks have one row and data has to move": Program(
        23,
        (2, 2),
        (_leaf((2, 3), (Shard(0), Shard(1)), requires_grad=False),),
        (Step("transpose", (0,), (1, 0)), Step("index", (1,), (((0, 3, None), -1),))),
        (2,),
    ),
    "memory read in another order": Program(
        4,
        (4,),
        (_leaf((3, 8), (Shard(0),), requires_grad=False),),
        (Step("transpose", (0,), (1, 0)), Step("scaled", (1,), (2.0,)), Step("as_strided", (2,), ((14,), (1,)))),
        (3,),
    ),
    "a product with a matrix of one row in a batch of one": Program(
        24,
        (2,),
        (_leaf((1, 1, 4), (Shard(2),)), _leaf((4, 4), (Replicate(),), requires_grad=False)),
        (Step("matmul", (0, 1), ()), Step("unsqueeze", (2,), (1,))),
        (3,),
    ),
}
