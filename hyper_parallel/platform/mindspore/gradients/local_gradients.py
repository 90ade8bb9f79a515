"""Plain gradients of distributed parameters, which MindSpore's own functions return: each rank's shard.

Such a tensor looks like any other, but its norm is not the norm of the full gradient. So the gradients of the last
backward are marked. Functions that need full gradients read the layout of the full gradient from the mark. A tensor
computed from marked tensors has no mark. Clipping and similar functions reject an unmarked tensor that has the shape of
some rank's shard. All ranks make the same decision, because the shapes of all ranks' shards count.
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

    #: Layouts of the sharded gradients.
    parts: ClassVar[tuple[Any, ...]] = ()
    #: Whether the warning about sharded gradients was given.
    told: ClassVar[bool] = False

    @classmethod
    def mark(cls, result: Any, operation: Any, weights: Any) -> Any:
        """Mark the gradients of ``weights`` in the ``result`` of a backward, and return ``result``.

        ``operation`` is MindSpore's gradient operation.
        """
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
                # One tensor may be the gradient of two parameters; then it is unknown which of them it belongs to.
                if _MARK in gradient.__dict__ and gradient.__dict__[_MARK] is not mine:
                    del gradient.__dict__[_MARK]
                else:
                    cls.mark_one(gradient, mine)
        return result

    @classmethod
    def expect(cls, sources: Iterable[Any]) -> list[Any]:
        """Return layouts of the gradients of ``sources``. From now on, plain tensors of the program may be shards of
        these gradients."""
        layouts = [getattr(source, "_layout", None) for source in sources]
        if any(x is not None and x.mesh.platform.sends_nothing for x in layouts):
            return layouts  # a dry run, which other ranks may not have
        cls.parts = tuple(dict.fromkeys(x.cotangent for x in layouts if x is not None and is_part(x.cotangent)))
        return layouts

    @staticmethod
    def mark_one(gradient: Any, layout: Any) -> None:
        """Mark a plain tensor as the local shard of a gradient with ``layout``; None marks a plain gradient."""
        gradient.__dict__[_MARK] = layout

    @classmethod
    def tell(cls, operation: Any) -> None:
        """Warn once that `mindspore.grad` or `value_and_grad` returns this rank's shards of gradients to the
        program."""
        if not cls.told and cls.parts and isinstance(operation, _Grad) and operation.get_by_list:
            cls.told = True
            name = "value_and_grad" if operation.get_value else "grad"
            warnings.warn(
                f"mindspore.{name} returns this rank's shards of the gradients of sharded parameters, as plain "
                "tensors. A norm or sum of such shards differs between ranks, and replicated parameters drift apart. "
                f"Use {name} of hyper_parallel.mindspore, which returns DTensors: their norm or sum is that of the "
                "full gradient. ops.clip_by_global_norm and optimizers support both",
                stacklevel=4,
            )

    @classmethod
    def forget(cls) -> None:
        """Note that the program does not receive the local gradients."""
        cls.parts = ()

    @classmethod
    def could_have(cls, gradient: Any) -> Any:
        """Return the layout of a gradient that the plain, unmarked ``gradient`` may have been computed from, or
        None."""
        shape = tuple(gradient.shape)
        return next((layout for layout in cls.parts if layout.may_be_local(shape)), None)


def is_part(layout: Any) -> bool:
    """Return whether the layout shards the gradient."""
    return any(p.is_shard() and layout.mesh.shape[d] > 1 for d, p in enumerate(layout.placements))


def layout_of_gradient(gradient: Any) -> tuple[bool, Any]:
    """Return whether a backward returned the tensor, and the layout of the distributed gradient. The tensor is a shard
    of that gradient."""
    marks = gradient.__dict__
    return _MARK in marks, marks.get(_MARK)
