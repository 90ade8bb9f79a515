"""In-place operations on leaves that require grad, which autograd refuses: what to do instead, for DTensors."""

from __future__ import annotations

from typing import Any

__all__ = ["explain_leaf"]

#: Torch's words for them, of the leaf itself and of what `DTensor.from_local` makes of one, which is a view of it.
_OF_A_LEAF = "leaf Variable that requires grad"


def explain_leaf(error: RuntimeError, func: Any, args: tuple) -> None:
    """Raise torch's refusal with the remedy, where ``error`` is one; return otherwise.

    Torch raises it before it writes, from facts that all ranks share.

    Raises:
        RuntimeError: as torch does.
    """
    words = str(error)
    if _OF_A_LEAF in words and args:
        placements = list(args[0]._layout.placements) if getattr(args[0], "_layout", None) is not None else "..."
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} on a DTensor placed {placements}: {words.rstrip('.')}. To change the "
            "values alone, write inside torch.no_grad(). To let gradients pass through the change, make the DTensor of "
            "a copy: DTensor.from_local(x.clone(), ...)"
        ) from None
