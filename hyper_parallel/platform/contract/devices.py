"""This rank's device: tensors made there, and its random numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

__all__ = ["DeviceRole"]

Tensor = Any


class DeviceRole(ABC):
    """The device, factories, and the default generator."""

    #: Device type that a `DeviceMesh` on this platform has: ``"cpu"``, ``"cuda"``, ``"npu"``.
    device_type: ClassVar[str]
    #: Whether every draw of a native operation changes what `get_rng_state` gives, which is a tensor then, so that core
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
        """Return when this rank's device has done what it was given, for measuring time. Nothing to do where the
        program waits for every operation anyway."""
        return

    @abstractmethod
    def factory(self, name: str, shape: Sequence[int], fill_value: Any, dtype: Any) -> Tensor:
        """A new plain local tensor on this rank's device: ``name`` is ``"full"`` (with ``fill_value``), ``"empty"``,
        ``"rand"``, ``"randn"``, ``"linspace"`` (``fill_value`` is (start, end)) or ``"logspace"`` ((start, end,
        base)). ``dtype`` None is the framework's default, of ``fill_value`` where there is one."""

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

    def get_host_rng_state(self) -> Any:
        """State of a further default generator that the framework has for the host, picklable; None where the
        generator of this rank's device is the only one."""
        return None

    def set_host_rng_state(self, state: Any) -> None:
        """Put a state from `get_host_rng_state` back, which is not None."""
        raise TypeError(f"{type(self).__name__} has no generator of the host")
