r"""The canonical operations, with their sharding rules and other properties.

A rule is ``rule(shapes, static_args) -> OpSharding``. ``shapes`` holds the global shape of each operand, or None for an
operand that is not a tensor. ``static_args`` are the remaining arguments. ``@rule("name")`` registers it. A rule that
cannot handle its arguments returns None; the operation then runs on gathered operands. No rule depends on a framework.

The operations are the interface between rules and backends: a backend maps its native operations to them. The table in
docs/rules.md is made from the rules (``python -m tests.support.rule_table``). Further static arguments, such as a dtype
or an epsilon, are passed on to the native call. Dimensions may be negative. An empty tuple of dimensions to reduce
means all of them, as None does.
"""

# Each module registers its rules.
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
