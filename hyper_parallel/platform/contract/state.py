"""State that a training job saves: tensors of modules, and optimizer state. All backends use torch's names, so that one
framework can load the checkpoints of another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

__all__ = ["OptimizerState", "StateRole"]

Tensor = Any
Module = Any


@dataclass
class OptimizerState:
    """State of an optimizer.

    Attributes:
        parameters: for each parameter group, its parameters in order.
        options: for each parameter group, its options: learning rate, betas, ..., as numbers, strings, None, and tuples
            of these.
        state: for each parameter, over all groups, its state by name. Tensors are the optimizer's own, of one element
            or more, and distributed where the parameter is. Plain floats stand for values that the framework may store
            as 0-d tensors; other plain numbers are allowed. Empty before the first step, where a framework makes the
            state then.
    """

    parameters: list[list[Tensor]]
    options: list[dict[str, Any]]
    state: list[dict[str, Any]]


class StateRole:
    """Modules and optimizers as saved state, and tensors as bytes."""

    #: Class of modules -> names of its parameters -> a dimension of size 1 that the parameter has in one framework and
    #: lacks in the other. Kernels of 1-D convolutions are an example. A load accepts files of both.
    singleton_dims: Mapping[type, Mapping[str, int]] = MappingProxyType({})
    #: The framework's dtypes by the names that files use: "float32", "bfloat16", "int64", "bool", ...
    dtypes: Mapping[str, Any] = MappingProxyType({})

    def saved_tensors(self: Any, module: Module) -> Iterator[tuple[str, Tensor]]:
        """Yield (path, tensor) for each parameter and buffer that a checkpoint of the module saves, submodules
        included. A tied tensor appears under each of its paths."""
        for path, submodule in self.named_modules(module):
            for name, x in [*self.named_parameters(submodule), *self.named_buffers(submodule)]:
                yield f"{path}.{name}" if path else name, x

    def give_memory(self, x: Tensor) -> None:
        """Allocate memory on this rank's device for a parameter or buffer without values (`TensorRole.is_meta`). A
        distributed tensor gets memory for this rank's shard. The tensor stays the same object, with the same layout.
        Its values are undefined."""
        raise TypeError(f"{type(self).__name__} cannot allocate memory for tensors on the meta device")

    def is_optimizer(self, x: Any) -> bool:
        """Return whether ``x`` is an optimizer of the framework."""
        return False

    def optimizer_state(self, optimizer: Any) -> OptimizerState:
        """Return the present state of the optimizer. Called where `is_optimizer` returns True."""
        raise TypeError(f"{type(self).__name__} does not support optimizers")

    def set_optimizer_state(self, optimizer: Any, state: OptimizerState) -> None:
        """Set the state of the optimizer: its options, numbers and tensors. Its existing state tensors were filled in
        place before. New tensors are passed only to an optimizer without state, which keeps them."""
        raise TypeError(f"{type(self).__name__} does not support optimizers")

    def host_memory(self: Any, x: Tensor) -> memoryview:
        """Return the bytes of `bytes_of` for immediate reading. The bytes may be the memory of ``x`` itself, and change
        with ``x``."""
        return memoryview(self.bytes_of(x))

    def from_bytes(self, values: Any, shape: Sequence[int], dtype: Any) -> Tensor:
        """Make a plain tensor of that shape and dtype, on this rank's device, from bytes in the format of `bytes_of`.
        ``values`` is any object with the buffer protocol. The tensor may take over the memory of ``values``.
        Checkpoints are read with this verb; a backend without it cannot read any."""
        raise TypeError(f"{type(self).__name__} does not support tensors of bytes")

    def write_bytes(self: Any, x: Tensor, size: int, fill: Callable[[memoryview], None]) -> None:
        """Overwrite ``x`` with the values that ``fill`` puts into a buffer of ``size`` bytes, in the format of
        `bytes_of`. The buffer is the memory of ``x`` itself if the host can write there, which saves copies. Called
        with interception off.
        """
        values = bytearray(size)
        fill(memoryview(values))
        self.write(x, self.from_bytes(values, self.shape_of(x), x.dtype))
