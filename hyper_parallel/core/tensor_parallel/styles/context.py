"""`ContextParallel`: attention of a module over sequences of which each rank has a part."""

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
    """Let the attention of a module reach over the whole sequence, of which each rank gives it a part.

    The module's tensors are parts of the sequence, in and out, as inside of `context_parallel`. The framework's
    function of scaled dot-product attention, called in the forward of the module, is over all of them. Parameters stay
    as they are. Their gradients are each rank's own: put the mesh dimension under `fully_shard` or `replicate`.

    With tensor parallelism give each mesh dimension its plan: heads first, on ``mesh["tp"]``, then this on
    ``mesh["cp"]``. Positions are the model's to know: `shard_sequence` makes them.

    Args:
        balance: as for `shard_sequence`: whether a rank holds a piece of the beginning and one of the end.
        method: ``"gather"``, ``"exchange"`` or ``"ring"``; by default each call chooses.

    Raises:
        TypeError: when ``balance`` is no bool. ValueError: for another method. When the module is called, on all ranks
            before anything is sent: for parts of no sequence, a mask that is not of the whole sequence, dropout of
            weights, and a forward without a call of that function.

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
            if order is not None:  # inside of context_parallel, which knows the length
                if order != ranges_on(mesh, sum(sizes_of(order)), self.balance):
                    raise ValueError(
                        f"{name} has the style {self!r}, and is called inside of a context_parallel with another "
                        "balance: give both the same, or leave the context out"
                    )
                return forward(module, *args, **kwargs)
            parts = PartsOfModule(mesh, f"attention in {name}", self.balance, self.method, earlier)
            with mesh.platform.attention_calls(parts, parts.mixes):
                y = forward(module, *args, **kwargs)
            if not parts.called:
                raise ValueError(
                    f"{name} has the style {self!r}, and its forward called no attention function that the style "
                    "handles. Attention that is written out sees this rank's part alone. Call "
                    "scaled_dot_product_attention in it, or give the style to the module that does"
                )
            return y

        return run
