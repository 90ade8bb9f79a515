"""The table of canonical operations, and the decorator that adds a rule to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from hyper_parallel.core.layouts.strides import Strides
from hyper_parallel.core.rules.op_sharding import OpSharding
from hyper_parallel.core.rules.signature import Signature

Rule: TypeAlias = Callable[[tuple, tuple], "OpSharding | None"]


@dataclass(frozen=True)
class CanonicalOp:
    """An operation with its sharding rule, independent of its name in any framework.

    Attributes:
        name: name of the operation. A trailing underscore means that the result overwrites the first operand.
        rule: sharding rule of the operation.
        signature: operands and static arguments, in order, with their dimensions and defaults.
        elementwise: whether operands broadcast and the recipe does not depend on static arguments. It is then cached by
            layouts only. Python scalars are operands too.
        repeatable: whether operands and static arguments follow from the arguments of the native call, and not from a
            mode of this library. `call_cache` then caches calls. It is always true for element-wise operations.
        gathers: whether the operation is meant to run on gathered operands, without a warning.
        loss: whether targets and class weights may be plain tensors inside `loss_parallel`.
        memory: placement of the result in memory on a single device.

            * ``"shared"``: in the memory of the first operand;
            * ``"viewable"``: in the memory of the first operand if its strides allow it, otherwise in new memory;
            * ``"contiguous"``: the first operand itself if it is contiguous, otherwise a copy;
            * ``"ordered"``: in new memory, with the dimensions in the memory order of the operands;
            * ``"fresh"``: in new memory, contiguous;
            * ``""``: in new memory, in an unknown order.
        view_index: for a view, ``view_index(static_args, shape, result_shapes)`` returns the index of each result in
            the first operand, which has ``shape``. Indices are encoded by `encode_index`. If the view had to move data,
            a write to it is copied to this index. ``(...,)`` means that the result has all elements, in any shape. None
            means that these static arguments give no view. Views without this function cannot be written to after data
            moved.
        view_strides: for a view whose strides do not follow from `view_index`, ``view_strides(static_args, shape,
            strides, result_shape)`` returns the strides of the result. ``shape`` and ``strides`` are those of the first
            operand. None means that the result must be a copy.
    """

    name: str
    rule: Rule
    signature: Signature = field(default_factory=lambda: Signature.of("x"))
    elementwise: bool = False
    repeatable: bool = False
    gathers: bool = False
    loss: bool = False
    memory: str = ""
    view_index: Callable[[tuple, tuple, list], tuple | None] | None = None
    view_strides: Callable[[tuple, tuple, Strides, tuple], Strides | None] | None = None

    @property
    def may_give_view(self) -> bool:
        """Return whether the result may share the memory of the first operand."""
        return self.memory in ("shared", "viewable", "contiguous")


#: Name -> canonical operation. The modules of this package fill it.
OPERATIONS: dict[str, CanonicalOp] = {}


def rule(name: str, takes: str = "x", **facts: Any) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of the canonical operation ``name``.

    ``takes`` is the text of its `Signature`. The other arguments are attributes of `CanonicalOp`.

    Raises:
        ValueError: when the operation has a rule already.
    """

    def register(function: Rule) -> Rule:
        if name in OPERATIONS:
            raise ValueError(f"operation {name!r} already has a rule: {OPERATIONS[name].rule.__qualname__}")
        OPERATIONS[name] = CanonicalOp(name, function, Signature.of(takes), **facts)
        return function

    return register
