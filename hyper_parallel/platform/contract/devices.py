"""This rank's device: tensors created there, and its random numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from hyper_parallel.platform.contract import counter

__all__ = ["DeviceRole"]

Tensor = Any
Module = Any


class DeviceRole(ABC):
    """The device, factories, and the default generator."""

    #: Device type of a `DeviceMesh` on this platform: ``"cpu"``, ``"cuda"``, ``"npu"``.
    device_type: ClassVar[str]
    #: Whether every draw of a native operation changes the result of `get_rng_state`, which is a tensor then. So core
    #: can detect that an operation has drawn.
    watches_draws: bool = False

    def to_device(self, x: Tensor) -> Tensor:
        """Return ``x`` on this rank's device of this platform; ``x`` itself if it is on that device already."""
        return x

    def to_host(self, x: Tensor, pin_memory: bool) -> Tensor:
        """Return a plain tensor in host memory with the values of ``x``, or ``x`` itself if it is there already.

        Args:
            x: plain tensor.
            pin_memory: whether to use pinned memory, where the platform has it.
        """
        if self.device_type != "cpu":
            raise TypeError(f"{type(self).__name__} does not support parameters in host memory")
        return x

    def host_tensor(self, values: np.ndarray) -> Tensor:
        """Return a new plain tensor in host memory with the values of an int32 array. Users see the tensor as
        ``mesh.mesh``. Returns the array itself where a framework has no tensors on the host."""
        return values

    def device_count(self) -> int:
        """Return the number of this platform's devices on the machine."""
        return 1

    def synchronize(self) -> None:
        """Wait until this rank's device has finished its queued work, for measuring time. The default does nothing, for
        platforms whose program waits for every operation anyway."""
        return

    @abstractmethod
    def factory(self, name: str, shape: Sequence[int], fill_value: Any, dtype: Any) -> Tensor:
        """Return a new plain local tensor on this rank's device. ``name`` is ``"full"`` (with ``fill_value``),
        ``"empty"``, ``"rand"``, ``"randn"``, ``"linspace"`` (``fill_value`` is (start, end)) or ``"logspace"`` ((start,
        end, base)). ``dtype`` None gives the framework's default dtype: that of ``fill_value``, where it is given."""

    def counter_key(self: Any) -> Tensor:
        """Draw a key of four uniform float32 numbers from the default generator, as a plain tensor on this rank's
        device. A recomputation in backward draws the same key."""
        return self.factory("rand", (4,), None, self.dtypes["float32"])

    def numbers_by_counter(
        self: Any, kind: str, key: Tensor, shape: Sequence[int], ranges: counter.Ranges, dtype: Any
    ) -> Tensor:
        """Return a shard of a plain tensor of random numbers on this rank's device. Only the memory of the shard is
        needed. Each number is a function of ``key`` and its index in the global tensor: see
        `platform.contract.counter`.

        Args:
            kind: ``uniform`` in [0, 1), or ``normal``.
            key: result of `counter_key`.
            shape: global shape.
            ranges: for each dimension the (start, length) of the ranges that the shard consists of.
            dtype: dtype of the framework, one of those in `counter.BITS`; TypeError for others.

        By default, NumPy computes the numbers, and `StateRole.from_bytes` moves them to the device.
        """
        names = [name for name in counter.BITS if self.dtypes.get(name) == dtype]
        if not names:
            raise TypeError(
                f"parallel_rng='counter' draws no numbers of {dtype}: draw floating point numbers, and convert them"
            )
        key = counter.words_of(np.frombuffer(self.bytes_of(key), np.float32))
        found = counter.numbers(kind, key, shape, ranges, names[0])
        x = self.from_bytes(bytearray(found.tobytes()), found.shape, self.dtypes[str(found.dtype)])
        return self.to_dtype(x, dtype)

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return an uninitialized buffer with the dtype of ``like``, a plain tensor on this rank's device."""
        return self.factory("empty", shape, None, like.dtype)

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the framework's default generator on this rank's device."""

    @abstractmethod
    def get_rng_state(self) -> Any:
        """Return the picklable state of the default generator of this rank's device."""

    @abstractmethod
    def set_rng_state(self, state: Any) -> None:
        """Restore a state from `get_rng_state`."""

    def share_draws(self, modules: Iterable[Module], share: Callable[[Any], Any]) -> None:
        """Let ``modules`` draw the same random numbers on all ranks of a group.

        All ranks call this with the same model. ``share`` returns the picklable value of the first rank. The default
        generators have the same state on all ranks, so modules that draw from these need nothing.
        """
        return

    def get_host_rng_state(self) -> Any:
        """Return the picklable state of the framework's separate default generator for the host. Returns None if the
        generator of this rank's device is the only one."""
        return None

    def set_host_rng_state(self, state: Any) -> None:
        """Restore a state from `get_host_rng_state` that is not None."""
        raise TypeError(f"{type(self).__name__} has no generator of random numbers on the host")
