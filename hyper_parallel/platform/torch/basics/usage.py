"""Counter of floating point operations, memory traffic and live memory of torch's operations."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch
from torch.utils.flop_counter import flop_registry

from hyper_parallel.platform.contract.dry import Usage
from hyper_parallel.platform.torch.basics.private import TorchDispatchMode

__all__ = ["UsageMode", "resized"]

#: The modes that are entered.
_OPEN: list[UsageMode] = []


def resized(x: Tensor) -> None:
    """Report to all active `Usage` counters that the storage of ``x`` has changed its size."""
    for mode in _OPEN:
        mode.resized(x.untyped_storage())


class _Size:
    """The counted bytes of one storage."""

    def __init__(self, usage: Usage) -> None:
        self.usage, self.bytes = usage, 0

    def set(self, size: int) -> None:
        """Set the size of the storage."""
        self.usage.live += size - self.bytes
        self.bytes = size


class UsageMode(TorchDispatchMode):
    """Context manager that yields a `Usage`. The context counts all calls of torch's kernels: from the program, core
    and autograd. A storage counts from the operation that allocates it until nothing references it."""

    def __enter__(self) -> Usage:
        self.usage = Usage()
        self._sizes: weakref.WeakKeyDictionary[Any, _Size] = weakref.WeakKeyDictionary()
        super().__enter__()
        _OPEN.append(self)
        return self.usage

    def __exit__(self, *exc_info: Any) -> None:
        _OPEN.remove(self)
        super().__exit__(*exc_info)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count one operation."""
        kwargs = dict(kwargs or {})
        with no_dispatch():
            result = func(*args, **kwargs)
            inputs = list(_tensors((args, tuple(kwargs.values()))))
            outputs = list(_tensors(result))
            given = {x.untyped_storage()._cdata for x in inputs}
            made = [x for x in outputs if x.untyped_storage()._cdata not in given]
            for x in made:
                self._count(x.untyped_storage())
            formula = _formula(func._overloadpacket)
            flops = int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
            # A view moves no bytes, nor does uninitialized memory.
            if "empty" in func._opname:
                return result
            if made or flops or func._schema.is_mutable:
                moved = sum(map(_nbytes, (*inputs, *outputs)))
                size = outputs[0].element_size() if outputs else 0
                what = (str(func._overloadpacket), flops, moved, size)
                self.usage.operations[what] += 1
                self.usage.timeline.append((hash(what), self.usage.live))
        return result

    def _count(self, storage: Any) -> None:
        """Start to count a storage."""
        if storage in self._sizes:
            return
        size = self._sizes[storage] = _Size(self.usage)
        size.set(storage.nbytes())
        weakref.finalize(storage, size.set, 0).atexit = False

    def resized(self, storage: Any) -> None:
        """Update the size of a storage that has changed."""
        if storage in self._sizes:
            self._sizes[storage].set(storage.nbytes())
            self.usage.timeline.append((storage.nbytes(), self.usage.live))


def _formula(operator: Any) -> Callable[..., Any] | None:
    """Return torch's formula for the floating-point operations of an operator, None if torch has none. Before 2.15,
    torch has none for attention on CPUs; the formula for GPUs takes the same operands."""
    found: Callable[..., Any] | None = flop_registry.get(operator)
    if found is None and (name := str(operator)).partition("_for_cpu")[1]:
        name = name.replace("_for_cpu", "")
        found = next((formula for known, formula in flop_registry.items() if str(known) == name), None)
    return found


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
