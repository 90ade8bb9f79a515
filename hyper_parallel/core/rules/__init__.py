r"""The canonical operations, and for each its sharding rule and whatever else is to be known of it, said once.

A rule is ``rule(shapes, static_args) -> OpSharding``: ``shapes`` holds the global shape of each operand (None for an
operand that is no tensor), ``static_args`` the remaining arguments. ``@rule("name")`` registers it. A rule that cannot
handle its arguments returns None; the operation then runs on gathered operands. No rule knows a framework.

The operations are the interface between rules and backends: a backend maps its native operations to them. The table in
docs/rules.md is made from the rules (``python -m tests.support.rule_table``). Static arguments beyond the ones listed
there are passed through to the native call untouched (a dtype, an epsilon). Dimensions may be negative; an empty tuple
of dimensions to reduce means all of them, as None does.
"""

# Each registers its rules.
from hyper_parallel.core.rules import (  # noqa: F401
    along,
    attention,
    batched,
    diagonal,
    dropout,
    elementwise,
    embedding,
    flex_attention,
    forms,
    fused,
    fused_attention,
    indexing,
    join,
    labelled,
    loss,
    matmul,
    norm,
    reduction,
    replicate,
    scatter,
    search,
    selection,
    softmax,
    view,
)
from hyper_parallel.core.rules.registry import OPERATIONS, CanonicalOp, Rule, rule  # noqa: F401
