"""Observation of a torch program: hooks around all modules, and a dispatch mode that sees collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import record_function

from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.contract.observation import Observer, StepWatcher
from hyper_parallel.platform.torch.basics.private import DispatchMode, OpOverloadPacket, dispatch_modes
from hyper_parallel.platform.watching import is_called_from, tensors_in

__all__ = ["ObservationVerbs", "unobserved"]

#: Operation -> core's name for it, and the index of this rank's operand among its arguments.
_KINDS: dict[str, tuple[str, int]] = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "all_reduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 1),
    "allgather_": ("all_gather", 1),
    "allgather_coalesced_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "all_gather_into_tensor": ("all_gather", 0),
    "all_gather_into_tensor_out": ("all_gather", 0),
    "all_gather_into_tensor_coalesced": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 0),
    "shard_dim_alltoall": ("all_to_all", 0),
    "broadcast_": ("broadcast", 0),
    "broadcast": ("broadcast", 0),
    "scatter_": ("scatter", 1),
    "gather_": ("gather", 1),
    "reduce_": ("reduce", 0),
}
_NAMESPACES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})
_PROCESSES = "hyper_parallel.platform.torch.processes"
#: Modules of this backend whose collectives core has already recorded.
_OWN = frozenset({f"{_PROCESSES}.collectives", f"{_PROCESSES}.overlap"})


class ObservationVerbs(Platform):
    """Verbs of `Platform` for observation."""

    @contextmanager
    def observe(self, observer: Observer) -> Iterator[None]:
        """Return a context that reports modules and collectives to ``observer``; see `Platform.observe`."""
        active = [True]
        hooks = [
            register_module_forward_pre_hook(lambda module, args: _before(observer, active, module, args)),
            register_module_forward_hook(
                lambda module, args, output: _after(observer, active, module, output), always_call=True
            ),
        ]
        try:
            with _Collectives(observer):
                yield
        finally:
            active.clear()
            for hook in hooks:
                hook.remove()

    @contextmanager
    def watch_steps(self, watcher: StepWatcher, calls: bool) -> Iterator[None]:
        """Return a context that reports optimizer steps and module calls to ``watcher``; see `Platform.watch_steps`."""

        def before(module: Any, args: Any) -> None:
            if not is_compiling():  # called first, because a compiler stops tracing this function here
                watcher.called(module)

        hooks = [
            *([register_module_forward_pre_hook(before)] if calls else []),
            register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: watcher.steps(optimizer, None)),
            register_optimizer_step_post_hook(lambda optimizer, args, kwargs: watcher.stepped(optimizer)),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def on_gradient(self, x: Tensor, tell: Callable[[Tensor], None]) -> None:
        """Register ``tell`` for the cotangent of ``x``; see `Platform.on_gradient`."""
        x.register_hook(lambda cotangent: None if cotangent is None else tell(cotangent))

    def profiler_range(self, name: str) -> Callable[[], None] | None:
        """Start a range that ``torch.profiler`` shows, and return the function that ends it. A device may show the
        range too."""
        scope = record_function(name)
        scope.__enter__()
        return partial(scope.__exit__, None, None, None)

    def collective_kind(self, native: Any) -> str | None:
        """Return core's name of the collective for an operation of the framework; see `Platform.collective_kind`."""
        if not isinstance(native, OpOverloadPacket):
            return None
        namespace, _, name = str(native).rpartition(".")
        return _KINDS[name][0] if namespace in _NAMESPACES and name in _KINDS else None

    def is_collective(self, native: Any) -> bool:
        """Return whether a function or an operation communicates; see `Platform.is_collective`."""
        if isinstance(native, OpOverloadPacket):
            return str(native).partition(".")[0] in _NAMESPACES
        return str(getattr(native, "__module__", "")).startswith("torch.distributed.")


class _Collectives(DispatchMode):
    """Mode that reports the collectives that the program issues."""

    #: Higher-order operators arrive here like all others: torch rejects a mode that does not declare so.
    supports_higher_order_operators = True

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __enter__(self) -> Any:
        _OPEN.append(self)
        return super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        _OPEN.remove(self)
        super().__exit__(*exc_info)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(func, "namespace", "") in _NAMESPACES:
            found = _KINDS.get(func.overloadpacket.__name__)
            if found is not None and not is_called_from(_OWN):
                self._observer.collective(found[0], list(tensors_in(args[found[1]], Tensor)))
        return func(*args, **(kwargs or {}))


#: The modes that are entered.
_OPEN: list[Any] = []


@contextmanager
def unobserved() -> Iterator[None]:
    """Suspend the observation of collectives inside this context, unless other modes are active too. Functions of torch
    that compile themselves run in this context: torch rejects them while a mode is active."""
    left = list(_OPEN) if dispatch_modes() == len(_OPEN) else []
    for mode in reversed(left):
        mode.__exit__(None, None, None)
    try:
        yield
    finally:
        for mode in left:
            mode.__enter__()


def _before(observer: Observer, active: list[bool], module: Any, args: Any) -> None:
    observer.before_module(module)
    _when_backward_comes(args, active, lambda: observer.backward_before(module))


def _after(observer: Observer, active: list[bool], module: Any, output: Any) -> None:
    _when_backward_comes(output, active, lambda: observer.backward_of(module))
    observer.after_module(module)


def _when_backward_comes(values: Any, active: list[bool], tell: Callable[[], None]) -> None:
    """Call ``tell()`` before backward runs the node that computed a tensor in ``values``. A hook of the node leaves the
    graph unchanged, whereas hooks of modules would add nodes."""
    with no_dispatch():
        for x in tensors_in(values, Tensor):
            if x.grad_fn is not None:
                x.grad_fn.register_prehook(lambda cotangents: tell() if active else None)
