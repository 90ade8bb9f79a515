"""This rank's device: tensors made there, and its random numbers."""

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

    #: Device type that a `DeviceMesh` on this platform has: ``"cpu"``, ``"cuda"``, ``"npu"``.
    device_type: ClassVar[str]
    #: Whether every draw of a native operation changes the result of `get_rng_state`, which is a tensor then. So core
    #: can see that an operation has drawn.
    watches_draws: bool = False

    def to_device(self, x: Tensor) -> Tensor:
        """``x`` on this rank's device of this platform, or ``x`` itself."""
        return x

    def to_host(self, x: Tensor, pin_memory: bool) -> Tensor:
        """A plain tensor in the memory of the host with the values of ``x``; ``x`` itself where that is there.

        Args:
            x: plain tensor.
            pin_memory: in memory that the device reads without the help of the processor, where there is such.
        """
        if self.device_type != "cpu":
            raise TypeError(f"{type(self).__name__} keeps no parameters in the memory of the host")
        return x

    def host_tensor(self, values: np.ndarray) -> Tensor:
        """A new plain tensor in the memory of the host with the values of an array of int32: ``mesh.mesh``, for users
        to look at. The array itself where a framework has no tensors there."""
        return values

    def device_count(self) -> int:
        """How many devices of this platform the machine has."""
        return 1

    def synchronize(self) -> None:
        """Return when this rank's device has finished its queued work, for measuring time. Nothing to do where the
        program waits for every operation anyway."""
        return

    @abstractmethod
    def factory(self, name: str, shape: Sequence[int], fill_value: Any, dtype: Any) -> Tensor:
        """A new plain local tensor on this rank's device: ``name`` is ``"full"`` (with ``fill_value``), ``"empty"``,
        ``"rand"``, ``"randn"``, ``"linspace"`` (``fill_value`` is (start, end)) or ``"logspace"`` ((start, end,
        base)). ``dtype`` None is the framework's default, of ``fill_value`` where there is one."""

    def counter_key(self: Any) -> Tensor:
        """A plain tensor of four uniform numbers in float32 on this rank's device, from the default generator, which
        moves on. It is the same again where the framework computes something again in backward."""
        return self.factory("rand", (4,), None, self.dtypes["float32"])

    def numbers_by_counter(
        self: Any, kind: str, key: Tensor, shape: Sequence[int], ranges: counter.Ranges, dtype: Any
    ) -> Tensor:
        """A part of a plain tensor of random numbers on this rank's device, which takes the memory of that part: each
        number is a function of ``key`` and of its place in the whole tensor, as `platform.contract.counter` says.

        Args:
            kind: ``uniform`` in [0, 1), or ``normal``.
            key: of `counter_key`.
            shape: of the whole tensor.
            ranges: for each dimension the (start, length) of the pieces that the part consists of.
            dtype: of the framework, one of those in `counter.BITS`; TypeError for others.

        Left alone, NumPy computes them, and `StateRole.from_bytes` brings them to the device.
        """
        names = [name for name in counter.BITS if self.dtypes.get(name) == dtype]
        if not names:
            raise TypeError(
                f"random numbers of {dtype} cannot be drawn by counter: draw floating point numbers, and convert them"
            )
        key = counter.words_of(np.frombuffer(self.bytes_of(key), np.float32))
        found = counter.numbers(kind, key, shape, ranges, names[0])
        x = self.from_bytes(bytearray(found.tobytes()), found.shape, self.dtypes[str(found.dtype)])
        return self.to_dtype(x, dtype)

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """A tensor of any values with the dtype of ``like``, a plain tensor on this rank's device: a buffer that is
        written to."""
        return self.factory("empty", shape, None, like.dtype)

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the framework's default generator on this rank's device."""

    @abstractmethod
    def get_rng_state(self) -> Any:
        """State of the default generator of this rank's device, picklable."""

    @abstractmethod
    def set_rng_state(self, state: Any) -> None:
        """Put a state from `get_rng_state` back."""

    def share_draws(self, modules: Iterable[Module], share: Callable[[Any], Any]) -> None:
        """Let ``modules`` that draw random numbers draw the same on all ranks of a group. All ranks call this with the
        same model. ``share`` returns the picklable value of the first rank. The default generators are in the same
        state on all ranks: modules that draw from these need nothing."""
        return

    def get_host_rng_state(self) -> Any:
        """State of a further default generator that the framework has for the host, picklable. None where the generator
        of this rank's device is the only one."""
        return None

    def set_host_rng_state(self, state: Any) -> None:
        """Put a state from `get_host_rng_state` back, which is not None."""
        raise TypeError(f"{type(self).__name__} has no generator of the host")
