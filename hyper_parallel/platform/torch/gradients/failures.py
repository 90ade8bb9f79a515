"""Report of a failed backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.torch.basics.tensor import State
from hyper_parallel.platform.torch.gradients.graphs import nodes_below

__all__ = ["tell_of_failure"]


def tell_of_failure(error: Exception, roots: Sequence[Any]) -> None:
    """Report the failure of this backward pass to the ranks with which it communicates."""
    meshes: set[Any] = set()
    with no_dispatch():
        nodes = nodes_below(root.grad_fn if isinstance(root, Tensor) else root.node for root in roots)
    for node in nodes:
        mesh = getattr(getattr(node, "step", None), "mesh", None)
        layout = getattr(getattr(node, "variable", None), "_layout", None)
        meshes.update(x for x in (mesh, getattr(layout, "mesh", None)) if x is not None)
    if meshes:
        State.core.failed_in_backward(error, meshes)
