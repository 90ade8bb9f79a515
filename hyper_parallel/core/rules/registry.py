"""The table of canonical operations, and how a rule gets into it."""

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
    """One operation, whatever the frameworks call it.

    Attributes:
        name: its name. One that ends in an underscore writes its result over the first operand.
        rule: its sharding rule.
        signature: its operands and static arguments, in order, with their dimensions and defaults.
        elementwise: whether operands broadcast and the static arguments make no difference to the plan, which is then
            kept under the layouts alone. Python scalars are operands too.
        repeatable: whether operands and static arguments follow from the arguments of the native call, and from no mode
            of this library: then `call_cache` remembers calls. Always so for element-wise operations.
        gathers: whether it is meant to run on gathered operands, so that no warning is given.
        loss: whether its targets and class weights may be plain tensors inside `loss_parallel`.
        memory: where the result lies in memory on a single device.

            * ``"shared"``: in the memory of the first operand;
            * ``"viewable"``: there where the strides allow it, otherwise in new memory;
            * ``"contiguous"``: it is the first operand itself if that is contiguous, otherwise a copy;
            * ``"ordered"``: in new memory, its dimensions in the order of those of the operands;
            * ``"fresh"``: in new memory, contiguous;
            * ``""``: in new memory, in an order that is not known.
        view_index: of a view: ``view_index(static_args, shape, result_shapes)`` gives the index (as `encode_index`
            makes it) of each result in the first operand, of the given shape. Where the view had to move data, a write
            to it is written there. ``(...,)`` if the result has all elements, maybe in another shape. None where these
            static arguments give no view. Views without this function cannot be written to after moving.
        view_strides: of a view whose strides do not follow from `view_index`: ``view_strides(static_args, shape,
            strides, result_shape)`` gives those of the result, from shape and strides of the first operand; None where
            the result has to be a copy.
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


#: Name -> canonical operation. Filled by the modules of this package.
OPERATIONS: dict[str, CanonicalOp] = {}


def rule(name: str, takes: str = "x", **facts: Any) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of the canonical operation ``name``, which takes the arguments of the
    text: see `signature`. `CanonicalOp` has the other facts.

    Raises:
        ValueError: when the operation has a rule already.
    """

    def register(function: Rule) -> Rule:
        if name in OPERATIONS:
            raise ValueError(f"operation {name!r} already has a rule: {OPERATIONS[name].rule.__qualname__}")
        OPERATIONS[name] = CanonicalOp(name, function, Signature.of(takes), **facts)
        return function

    return register
