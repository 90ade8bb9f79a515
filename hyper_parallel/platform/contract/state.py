"""State that a training job saves: the tensors of modules, and the state of optimizers. All backends share torch's
names, so that one framework can load the checkpoints of another."""

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
    """The state of an optimizer.

    Attributes:
        parameters: of each group, in order.
        options: of each group: learning rate, betas, ..., as numbers, strings, None, and tuples of these.
        state: of each parameter, over all groups, by name: tensors of one element or more (distributed ones where the
            parameter is), the optimizer's own; and plain numbers, floats for values that the framework may keep as a
            tensor without dimensions. Empty before the first step, where a framework makes the state then.
    """

    parameters: list[list[Tensor]]
    options: list[dict[str, Any]]
    state: list[dict[str, Any]]


class StateRole:
    """Modules and optimizers, as something to be saved, and tensors as bytes."""

    #: Class of modules -> names of its parameters -> a dimension of size 1 that the parameter has in one framework and
    #: lacks in the other: kernels of 1-D convolutions. A load takes files of both.
    singleton_dims: Mapping[type, Mapping[str, int]] = MappingProxyType({})
    #: The framework's dtypes by their usual names ("float32", "bfloat16", "int64", "bool", ...): those of files.
    dtypes: Mapping[str, Any] = MappingProxyType({})

    def saved_tensors(self: Any, module: Module) -> Iterator[tuple[str, Tensor]]:
        """(path, tensor) of the parameters and buffers of a module and of all below it that belong into a checkpoint.
        A tied tensor comes under each of its paths."""
        for path, submodule in self.named_modules(module):
            for name, x in [*self.named_parameters(submodule), *self.named_buffers(submodule)]:
                yield f"{path}.{name}" if path else name, x

    def give_memory(self, x: Tensor) -> None:
        """Give a parameter or buffer without values (`TensorRole.is_meta`) memory on this rank's device. A distributed
        one gets memory for this rank's part. It stays the same object, of the same layout, and has any values."""
        raise TypeError(f"{type(self).__name__} gives tensors without values no memory")

    def is_optimizer(self, x: Any) -> bool:
        """Return whether ``x`` is an optimizer of the framework."""
        return False

    def optimizer_state(self, optimizer: Any) -> OptimizerState:
        """Return the present state of the optimizer. Called where `is_optimizer` says yes."""
        raise TypeError(f"{type(self).__name__} knows no optimizers")

    def set_optimizer_state(self, optimizer: Any, state: OptimizerState) -> None:
        """Let the optimizer go on with ``state``: options that it has, numbers, and tensors. Tensors that are its own
        have been filled; others, which only an optimizer without state gets, it keeps."""
        raise TypeError(f"{type(self).__name__} knows no optimizers")

    def host_memory(self: Any, x: Tensor) -> memoryview:
        """The bytes of `bytes_of`, to be read at once: they may be the memory of ``x`` itself, and change with it."""
        return memoryview(self.bytes_of(x))

    def from_bytes(self, values: Any, shape: Sequence[int], dtype: Any) -> Tensor:
        """Make a plain tensor of that shape and dtype, on this rank's device, from bytes as `bytes_of` gives them.
        ``values`` is any object that lends its memory. The tensor may keep that memory, which its owner forgets.
        Checkpoints are read with it; a backend without it reads none."""
        raise TypeError(f"{type(self).__name__} makes no tensors of bytes")

    def write_bytes(self: Any, x: Tensor, size: int, fill: Callable[[memoryview], None]) -> None:
        """`write` of values that ``fill`` puts, as the ``size`` bytes of `bytes_of`, into memory that it is given: that
        of ``x`` itself where the host can write there, which saves copies. Called without interception."""
        values = bytearray(size)
        fill(memoryview(values))
        self.write(x, self.from_bytes(values, self.shape_of(x), x.dtype))
