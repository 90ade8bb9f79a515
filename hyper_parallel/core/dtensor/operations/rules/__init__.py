r"""The canonical operations and their sharding rules: one rule per operation, none of them knows a framework.

A rule is ``rule(shapes, statics) -> OpSharding``: ``shapes`` holds the global shape of each operand (None for an
operand that is no tensor), ``statics`` the remaining arguments. ``@rule("name")`` registers it. A rule that cannot
handle its arguments returns None; the operation then runs on gathered operands.

The table is the interface between rules and backends: a backend maps its native operations to these rows. Statics
beyond the ones listed are passed through to the native call untouched (a dtype, an epsilon). Dimensions may be
negative; an empty tuple of dimensions to reduce means all of them, as None does.

=================  ==============================  ==================================================================
operation          operands                        statics
=================  ==============================  ==================================================================
element-wise (``elementwise.py``; operands broadcast, Python scalars are operands too; statics are opaque)
pointwise          any number                      not linear: relu, pow, where, masked_fill, comparisons, ...
add                any number                      sum of its operands (add, subtract)
mul                any number                      product of its operands
linear_unary       x                               linear in x: neg, clone, contiguous, detach, conversion to a
                                                   floating dtype (to an integer one or bool: pointwise)
like               x                               shape of x, values do not depend on x: zeros_like, full_like
div                a, b                            a tuple whose first entry is the rounding mode or None
pointwise\_, add\_, mul\_, linear\_, div\_         the same in place on the first operand (linear\_: copy\_, zero\_)
-----------------  ------------------------------  ------------------------------------------------------------------
linear             x, weight (out, in), bias|None
matmul             a, b                            transpose_a, transpose_b
addmm              c, a, b                         c + a @ b for matrices a and b
einsum             any number                      equation, as in numpy.einsum
-----------------  ------------------------------  ------------------------------------------------------------------
sum, mean          x                               dims (tuple or None), keepdim
amax, amin         x                               dims (tuple or None), keepdim, and ``"whole"`` where NaNs share the
                                                   gradient
reduce_whole       x                               dims (tuple or None), keepdim; the dims reduced must be whole:
                                                   argmax, var, all
reduce_pair        x                               as reduce_whole, two results: max with indices, var_mean
vector_norm        x                               p, dims (tuple or None), keepdim
logsumexp          x                               dims (tuple or None), keepdim
-----------------  ------------------------------  ------------------------------------------------------------------
reshape            x                               shape (may contain -1)
permute            x                               dims
expand             x                               shape (-1 keeps a size)
squeeze            x                               dims (tuple or None); the local call gets a tuple, maybe empty
unsqueeze          x                               dim
narrow             x                               dim, start, length
getitem            x, *index tensors               index, encoded by `platform.indexing`
setitem\_          x, value, *index tensors        index, encoded by `platform.indexing`
split              x                               size or tuple of sizes, dim
chunk              x                               chunks, dim
unbind             x                               dim
repeat             x                               repeats
repeat_interleave  x                               repeats (an int), dim
pad                x                               (before, after) for each dimension of x, mode or nothing for
                                                   "constant"
cat, stack         any number                      dim
-----------------  ------------------------------  ------------------------------------------------------------------
along_dims         x                               dims that must be whole, number of results of x's shape:
                                                   cumsum, sort, flip, roll, tril
softmax            x                               dim, dtype to convert x to first or None
log_softmax        x                               as softmax
topk               x                               k, dim (two results)
gather             x, index                        dim
index_select       x, index (1-D)                  dim
one_hot            x                               number of classes
-----------------  ------------------------------  ------------------------------------------------------------------
glu                x                               dim
rotary             x, cosines, sines               the pairing, which no rule reads
layer_norm         x, weight|None, bias|None       number of normalised dims, number of statistics returned besides
                                                   (which keep these dims with size 1)
rms_norm           x, weight|None                  as layer_norm
add_rms_norm       x, x, weight                    none is read: the norm of the sum, one statistic, the sum
embedding          ids, weight (vocab, features)   padding_idx or None (no max_norm, no scale_grad_by_freq)
attention          q, k, v, mask|None              is_causal, dropout probability (q (..., heads, length, features);
                                                   fewer k/v heads: GQA)
fused_attention    q, k, v, bias|None, mask|None,  layout of q, k and v, heads, probability to keep, whether something
                   score|None, q|None, k|None      holds an entry for each batch element, size of a statistic, whether
                                                   those of tokens have the tokens first (see `fused_attention.py`)
cross_entropy      logits, target, weight|None     reduction, ignore_index, label_smoothing, dtype of the result or
                                                   None for that of the logits (classes in dim 1, or 0)
nll_loss           log_probs, target, weight|None  reduction, ignore_index, dtype of the result or None
dropout            x                               p, training, and maybe a seed and a stream of numbers of its own
-----------------  ------------------------------  ------------------------------------------------------------------
replicate          any number                      every operand is gathered first (item, equal, nonzero)
=================  ==============================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from hyper_parallel.core.dtensor.operations.op_sharding import OpSharding

__all__ = ["RULES", "Rule", "rule"]

Rule: TypeAlias = Callable[[tuple, tuple], "OpSharding | None"]

#: canonical operation -> rule. Filled by the modules of this package, imported at the end.
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of the canonical operations ``names``."""

    def register(function: Rule) -> Rule:
        for name in names:
            if name in RULES:
                raise ValueError(f"operation {name!r} already has a rule: {RULES[name].__qualname__}")
            RULES[name] = function
        return function

    return register


# Each module registers its rules; they need `rule`, so the imports come last.
from hyper_parallel.core.dtensor.operations.rules import (  # noqa: E402, F401
    along,
    attention,
    dropout,
    elementwise,
    embedding,
    fused,
    fused_attention,
    indexing,
    join,
    loss,
    matmul,
    norm,
    reduction,
    replicate,
    softmax,
    view,
)
