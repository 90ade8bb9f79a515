"""`ContextParallel`: attention over sequences that are sharded over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.communication.recorder import LISTENERS, current_module, run_in_module
from hyper_parallel.core.dtensor.plain_attention import Earlier, PartsOfModule, ranges_on
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.rules.sequence_cut import METHODS, order_on, sizes_of
from hyper_parallel.core.tensor_parallel.program.planned_parameters import module_label, path_of
from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle, check_flag, mark_applied

__all__ = ["ContextParallel"]


class ContextParallel(ParallelStyle):
    """Compute the attention of a module over the full sequence, which is sharded over the ranks.

    Inputs and outputs of the module are plain shards of the sequence, as inside `context_parallel`. Calls of the
    framework's scaled dot-product attention in the module's forward attend to the shards of all ranks. Parameters are
    unchanged, and their gradients are local to each rank. To reduce the gradients, apply `fully_shard` or `replicate`
    over a mesh that includes this dimension.

    With tensor parallelism use one plan for each mesh dimension. First shard heads on ``mesh["tp"]``, then apply this
    style on ``mesh["cp"]``. The model must use the positions of its shard, which `shard_sequence` makes.

    Args:
        balance: whether a rank has one piece from the start of the sequence and one from its end, as for
            `shard_sequence`.
        method: ``"gather"``, ``"exchange"`` or ``"ring"``; by default each call chooses.

    Raises:
        TypeError: if ``balance`` is not a bool.
        ValueError: for another method. When the module is called, on all ranks before any communication: for inputs
            that are not shards of a sequence, a mask that does not cover the full sequence, dropout of attention
            weights, or a forward that never calls scaled dot-product attention.

    Example:
        >>> from hyper_parallel import ContextParallel
        >>> ContextParallel(method="ring")
        ContextParallel(balance=True, method='ring')
    """

    along_one_dimension = True

    def __init__(self, *, balance: bool = True, method: str | None = None) -> None:
        self.balance = check_flag(balance, "balance", type(self).__name__)
        if method is not None and method not in METHODS:
            raise ValueError(f"ContextParallel(method=...) takes one of {METHODS} or None, got {method!r}")
        self.method = method

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        platform = device_mesh.platform
        platform.replace_forward(module, lambda forward: self._new_forward(forward, device_mesh))
        platform.set_compiled_forward(module, None)
        mark_applied(module, self, device_mesh)
        return module

    def _new_forward(self, forward: Callable[..., Any], mesh: DeviceMesh) -> Callable[..., Any]:
        earlier = Earlier()

        def run(module: Any, *args: Any, **kwargs: Any) -> Any:
            name = module_label(module)
            mesh.require_member(f"a call of {name}")
            if LISTENERS and current_module() != path_of(module):
                return run_in_module(path_of(module), run, module, *args, **kwargs)
            order = order_on(mesh)
            if order is not None:  # inside `context_parallel`, which knows the length of the sequence
                if order != ranges_on(mesh, sum(sizes_of(order)), self.balance):
                    raise ValueError(
                        f"{name} has the style {self!r}, but is called inside a context_parallel with another load "
                        "balancing: use the same for both, or leave the context out"
                    )
                return forward(module, *args, **kwargs)
            parts = PartsOfModule(mesh, f"attention in {name}", self.balance, self.method, earlier)
            with mesh.platform.attention_calls(parts, parts.mixes):
                y = forward(module, *args, **kwargs)
            if not parts.called:
                raise ValueError(
                    f"{name} has the style {self!r}, but its forward called no supported attention function. "
                    "Attention composed of other operations sees this rank's shard of the sequence alone. Call "
                    "scaled_dot_product_attention in the module, or name the module that calls it in the plan"
                )
            return y

        return run
