"""Report of a failed backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.torch.basics.tensor import State

__all__ = ["tell_of_failure"]


def tell_of_failure(error: Exception, roots: Sequence[Any]) -> None:
    """Report the failure of this backward pass to the ranks with which it communicates."""
    meshes: set[Any] = set()
    seen: set[Any] = {None}
    with no_dispatch():
        todo = [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        mesh = getattr(getattr(node, "step", None), "mesh", None)
        layout = getattr(getattr(node, "variable", None), "_layout", None)
        meshes.update(x for x in (mesh, getattr(layout, "mesh", None)) if x is not None)
        todo += [below for below, _ in node.next_functions]
    if meshes:
        State.core.failed_in_backward(error, meshes)
