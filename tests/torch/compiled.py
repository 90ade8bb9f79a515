"""Compiling parallelised models and counting the collectives of their graphs, for the tests of torch.compile."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch._dynamo
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from hyper_parallel import CommDebugMode, DTensor, parallelize_module
from hyper_parallel.core.communication.recorder import LISTENERS
from tests.torch.support import close

_NAMES = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


def waits(operation: Any, args: tuple) -> bool:
    """Return whether the host knows results of an operation, or their shapes, only once the device has computed them. A
    CUDA graph cannot have such an operation.
    """
    found = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(getattr(operation, "tags", ()))
    if operation is torch.ops.aten.index.Tensor:  # has this tag for masks
        return any(i is not None and i.meta["val"].dtype in (torch.bool, torch.uint8) for i in args[1])
    return bool(found)


class Graphs:
    """A backend that runs the traced graphs as they are, and counts the collectives in them. No graph has operations
    that CUDA graphs could not have.

    Args:
        copies: whether the program itself copies between host and device.
    """

    def __init__(self, copies: bool = False) -> None:
        self.copies = copies
        self.counts: Counter[str] = Counter()
        self.graphs = 0
        # Inductor's partition into forward and backward: that of aot_eager leaves unused code in backward.
        partition = min_cut_rematerialization_partition
        self.backend = aot_autograd(fw_compiler=self._count, bw_compiler=self._count, partition_fn=partition)

    def _count(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable:
        self.graphs += 1
        for node in graph.graph.nodes:
            name = str(node.target)
            assert not waits(node.target, node.args), f"{name} waits for the device"
            if "_to_copy" in name and "device" in node.kwargs and not self.copies:
                assert node.args[0].meta["val"].device == node.kwargs["device"], f"{name} waits for the device"
            if name.startswith("_c10d_functional.") and "wait_tensor" not in name:
                kind = name.split(".")[1]
                self.counts[_NAMES.get(kind, kind)] += 1
        return make_boxed_func(graph.forward)


def fresh(mesh: Any = None) -> None:
    """Forget all that was compiled in this process, and that a layer gave uneven plain shards on ``mesh``."""
    torch._dynamo.reset()
    if mesh is not None:
        mesh._has_uneven_shards = False


def same_counts(graphs: Graphs, comm: CommDebugMode) -> None:
    """Check that traced graphs have the collectives that eager mode has issued."""
    eager = {str(kind).split(".")[-1]: n for kind, n in comm.get_comm_counts().items() if n}
    assert dict(graphs.counts) == eager, (graphs.counts, eager)


def step(model: nn.Module, x: Any, call: Callable[..., Any], around: Any = nullcontext) -> tuple[Any, Any]:
    """The output and the gradient of ``x``; the loss weighs every element of the output differently."""
    model.zero_grad()
    x = x.detach().clone()
    if x.is_floating_point():
        x.requires_grad_()
    with around():
        y = call(x)
    loss = y if y.ndim == 0 else (y.float() * torch.linspace(0.5, 1.5, y.numel(), device=y.device).view(y.shape)).mean()
    if isinstance(loss, DTensor):
        loss = loss.full_tensor()
    loss.backward()
    return y, x.grad


def compare(
    mesh: Any,
    single: nn.Module,
    plan: Any,
    xs: list[Any],
    *,
    compile: Callable[[nn.Module, Any], Callable[..., Any]] | None = None,
    around: Any = nullcontext,
    tolerance: float = 1e-5,
    counts: bool = True,
) -> dict[str, int]:
    """Check that the compiled model gives the single device's outputs and gradients, by the collectives of eager mode.

    Returns:
        The collectives of a step.
    """
    fresh(mesh)
    model = parallelize_module(copy.deepcopy(single), mesh, plan)
    with CommDebugMode() as comm:
        step(model, xs[0], model, around)
    step(model, xs[0], model, around)
    graphs = Graphs()
    call = (compile or whole)(model, graphs.backend)
    found: dict[str, int] = {}
    for x in xs:
        sent: list[Any] = []
        # Not in a CommDebugMode: torch compiles nothing inside of a mode that sees operations.
        LISTENERS.append(sent.append)
        try:
            y, gradient = step(model, x, call, around)
        finally:
            LISTENERS.remove(sent.append)
        assert graphs.graphs and not sent
        if not found:
            found = dict(graphs.counts)
            if counts:
                same_counts(graphs, comm)
        wanted, wanted_gradient = step(single, x, single, around)
        close(y, wanted, "the output", tolerance)
        if gradient is not None:
            close(gradient, wanted_gradient, "the gradient of the input", tolerance)
        of_single = dict(single.named_parameters())
        for name, p in model.named_parameters():
            wanted = of_single[name].grad
            assert (p.grad is None) == (wanted is None), f"the gradient of {name}"
            if wanted is not None:
                close(p.grad, wanted, f"the gradient of {name}", tolerance)
    return found


def whole(model: nn.Module, backend: Any) -> Callable[..., Any]:
    """The whole model, in one graph."""
    compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
    return compiled
