"""Observation of a MindSpore program: cells and collectives, by their replacements (`patches`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mindspore import Tensor, nn
from mindspore.experimental.optim import Optimizer as ExperimentalOptimizer
from mindspore.profiler import mstx

from hyper_parallel.platform.contract.observation import Observer, StepWatcher
from hyper_parallel.platform.mindspore.processes.communication import is_collective
from hyper_parallel.platform.mindspore.tensors.tensor import NoDispatch
from hyper_parallel.platform.patching import PatchSet
from hyper_parallel.platform.watching import is_called_from, tensors_in

__all__ = ["COLLECTIVES", "ObservationVerbs", "watched_call", "watched_collective", "watched_step"]

#: Function of MindSpore -> core's name for it, and the index of this rank's operand among its arguments.
COLLECTIVES: dict[str, tuple[str, int]] = {
    "all_reduce": ("all_reduce", 0),
    "all_gather": ("all_gather", 1),
    "all_gather_into_tensor": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 1),
    "all_to_all": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "broadcast": ("broadcast", 0),
    "scatter": ("scatter", 1),
    "gather": ("gather", 0),
    "reduce": ("reduce", 0),
}
_PROCESSES = "hyper_parallel.platform.mindspore.processes"
#: Modules of this backend whose collectives core has already recorded.
_OWN = frozenset({f"{_PROCESSES}.collectives", f"{_PROCESSES}.launch"})
_OBSERVERS: list[Observer] = []
_WATCHERS: list[tuple[StepWatcher, bool]] = []
#: Optimizers whose steps are running.
_STEPPING: list[Any] = []


class ObservationVerbs:
    """MindSpore's implementation of `ObservationRole`."""

    #: Patches that are installed during observation.
    watching: PatchSet

    @contextmanager
    def observe(self, observer: Observer) -> Iterator[None]:
        _OBSERVERS.append(observer)
        self.watching.install()
        try:
            yield
        finally:
            _OBSERVERS.remove(observer)
            if not _OBSERVERS and not _WATCHERS:
                self.watching.uninstall()

    @contextmanager
    def watch_steps(self, watcher: StepWatcher, calls: bool) -> Iterator[None]:
        _WATCHERS.append((watcher, calls))
        self.watching.install()
        try:
            yield
        finally:
            _WATCHERS.remove((watcher, calls))
            if not _OBSERVERS and not _WATCHERS:
                self.watching.uninstall()

    def on_gradient(self, x: Tensor, tell: Callable[[Tensor], None]) -> None:
        Tensor.register_hook(x, lambda cotangent: None if cotangent is None else tell(cotangent))

    def profiler_range(self, name: str) -> Callable[[], None] | None:
        """Start a range of MSTX, which MindSpore supports on Ascend, and return the function that ends it."""
        handle = mstx.range_start(name)
        return (lambda: mstx.range_end(handle)) if handle else None

    def collective_kind(self, native: Any) -> str | None:
        """Return core's name of a function of ``mindspore.mint.distributed``, or None."""
        name = getattr(native, "__name__", "")
        known = name in COLLECTIVES and str(getattr(native, "__module__", "")).startswith("mindspore.")
        return COLLECTIVES[name][0] if known else None

    def is_collective(self, native: Any) -> bool:
        """Return whether a function or a primitive communicates. See `Platform.is_collective`."""
        return is_collective(getattr(native, "name", "")) or self.collective_kind(native) is not None


def watched_call(original: Callable, cell: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the call of a cell, to report it. Optimizers are cells, too."""
    if _WATCHERS and isinstance(cell, (nn.Optimizer, ExperimentalOptimizer)):
        return watched_step(original, cell, *args, **kwargs)
    for watcher, calls in tuple(_WATCHERS):
        if calls:
            watcher.called(cell)
    observers = tuple(_OBSERVERS)
    for observer in observers:
        observer.before_module(cell)
    _when_backward_comes((args, kwargs), [o.backward_before for o in observers], cell)
    try:
        output = original(cell, *args, **kwargs)
        _when_backward_comes(output, [o.backward_of for o in observers], cell)
        return output
    finally:
        for observer in reversed(observers):
            observer.after_module(cell)


def watched_step(call: Callable, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``call(optimizer, ...)``, and report the step to each watcher once."""
    if not _WATCHERS or any(optimizer is other for other in _STEPPING):
        return call(optimizer, *args, **kwargs)
    watchers = [watcher for watcher, _ in _WATCHERS]
    given = args[0] if args else next(iter(kwargs.values()), None)
    with NoDispatch():
        gradients = list(tensors_in(given, Tensor)) if isinstance(given, (tuple, list)) else None
    _STEPPING.append(optimizer)
    try:
        for watcher in watchers:
            watcher.steps(optimizer, gradients)
        output = call(optimizer, *args, **kwargs)
        for watcher in watchers:
            watcher.stepped(optimizer)
    finally:
        _STEPPING.pop()
    return output


def watched_collective(original: Callable, *args: Any, name: str, **kwargs: Any) -> Any:
    """Replace a function that communicates, to report it."""
    if _OBSERVERS and not is_called_from(_OWN):
        kind, position = COLLECTIVES[name]
        given = args[position] if len(args) > position else next(iter(kwargs.values()), None)
        for observer in tuple(_OBSERVERS):
            observer.collective(kind, list(tensors_in(given, Tensor)))
    return original(*args, **kwargs)


def _when_backward_comes(values: Any, tell: list[Callable[[Any], None]], cell: Any) -> None:
    def hook(cotangent: Any) -> None:
        if _OBSERVERS:
            for told in tell:
                told(cell)

    with NoDispatch():
        for x in tensors_in(values, Tensor):
            if x._requires_grad and not x._is_leaf:
                Tensor.register_hook(x, hook)
