"""Plain gradients of distributed parameters, which MindSpore's own functions give: each rank's part.

Nothing tells such a tensor from another, and its norm is not that of the gradient. So the gradients of the last
backward are marked. Functions that need whole gradients find the whole gradient's layout by the mark. Tensors computed
from marked ones have no mark. A tensor whose shape could be that of such a result is refused there. All ranks make the
same decision, because the shapes of all ranks' parts count.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, ClassVar

from mindspore import Tensor
from mindspore.ops.composite.base import _Grad

__all__ = ["LocalGradients", "is_part", "layout_of_gradient"]

_MARK = "_hp_gradient_layout"


class LocalGradients:
    """Gradients of the last backward."""

    #: Layouts of the gradients of which a rank has a part.
    parts: ClassVar[tuple[Any, ...]] = ()
    #: Whether the program has been told that its gradients are parts.
    told: ClassVar[bool] = False

    @classmethod
    def mark(cls, result: Any, operation: Any, weights: Any) -> Any:
        """``result`` of a backward, with its gradients of ``weights`` marked; ``operation`` is MindSpore's."""
        if not getattr(operation, "get_by_list", False):
            return result
        several = isinstance(weights, (tuple, list))
        sources = tuple(weights) if several else (weights,)
        layouts = cls.expect(sources)
        found: Any = result
        if several and len(found) == 2 and isinstance(found[1], (tuple, list)):
            found = found[1]  # after the gradients of inputs
        elif not several:
            found = (found[-1] if isinstance(found, (tuple, list)) else found,)
        for gradient, layout in zip(found, layouts, strict=True):
            if isinstance(gradient, Tensor):
                mine = None if layout is None else layout.cotangent
                # One tensor may be the gradient of two parameters; which of them it belongs to is unknown then.
                if _MARK in gradient.__dict__ and gradient.__dict__[_MARK] is not mine:
                    del gradient.__dict__[_MARK]
                else:
                    cls.mark_one(gradient, mine)
        return result

    @classmethod
    def expect(cls, sources: Iterable[Any]) -> list[Any]:
        """Layouts of the gradients of ``sources``. From now on, plain tensors of the program may be their parts."""
        layouts = [getattr(source, "_layout", None) for source in sources]
        cls.parts = tuple(dict.fromkeys(x.cotangent for x in layouts if x is not None and is_part(x.cotangent)))
        return layouts

    @staticmethod
    def mark_one(gradient: Any, layout: Any) -> None:
        """Mark a plain tensor as the local part of a gradient with that layout, None for a plain gradient."""
        gradient.__dict__[_MARK] = layout

    @classmethod
    def tell(cls, operation: Any) -> None:
        """Warn, once, of the gradients that `mindspore.grad` or `value_and_grad` gives to the program."""
        if not cls.told and cls.parts and isinstance(operation, _Grad) and operation.get_by_list:
            cls.told = True
            name = "value_and_grad" if operation.get_value else "grad"
            warnings.warn(
                f"mindspore.{name} gives this rank's parts of the gradients of sharded parameters, as plain tensors. A "
                "norm or a sum that the program computes of them is another one on each rank, and replicated "
                f"parameters drift apart. {name} of hyper_parallel.mindspore gives DTensors, whose norm or sum is that "
                "of the whole gradient; ops.clip_by_global_norm and optimizers take both",
                stacklevel=4,
            )

    @classmethod
    def forget(cls) -> None:
        """The gradients do not reach the program as they are."""
        cls.parts = ()

    @classmethod
    def could_have(cls, gradient: Any) -> Any:
        """The layout of a gradient that plain, unmarked ``gradient`` may have been computed from, or None."""
        shape = tuple(gradient.shape)
        return next((layout for layout in cls.parts if layout.may_be_local(shape)), None)


def is_part(layout: Any) -> bool:
    """Return whether a rank has a part of a gradient only."""
    return any(p.is_shard() and layout.mesh.shape[d] > 1 for d, p in enumerate(layout.placements))


def layout_of_gradient(gradient: Any) -> tuple[bool, Any]:
    """Return whether a backward gave the tensor, and the layout of the distributed gradient that it is a part of."""
    marks = gradient.__dict__
    return _MARK in marks, marks.get(_MARK)
