"""Gradients of replicated parameters in buckets: one flat buffer, and one all-reduce, for many gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.communication import asynchronous
from hyper_parallel.core.data_parallel.hooks import refuse_second_order

if TYPE_CHECKING:
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh
    from hyper_parallel.platform.contract.collectives import Work

__all__ = ["Bucket", "Sent", "assign"]


def assign(sizes: Sequence[tuple[Any, float]], cap: float) -> list[list[int]]:
    """Assign parameters to buckets, each of which is all-reduced at once.

    The last parameter comes first, because its gradient does. A bucket is full when it has ``cap`` bytes or more.
    Buckets are sent in the order in which their gradients become complete.

    Args:
        sizes: (dtype, bytes) of each parameter, in the order in which the module holds them.
        cap: bytes.

    Returns:
        For each bucket, in the order of sending, the indices of its parameters, which have one dtype.

    Example:
        >>> assign([("f", 8), ("f", 4), ("h", 4), ("f", 4)], cap=8)
        [[2], [3, 1], [0]]
    """
    filling: dict[Any, tuple[list[int], float]] = {}
    full = []
    for i in reversed(range(len(sizes))):
        dtype, size = sizes[i]
        members, filled = filling.pop(dtype, ([], 0))
        members.append(i)
        if filled + size >= cap:
            full.append(members)
        else:
            filling[dtype] = members, filled + size
    full += [members for members, _ in filling.values()]
    return sorted(full, key=lambda members: -members[-1])


class Bucket:
    """Parameters whose gradients are all-reduced together.

    Besides the gradients, the buffer has a number for each parameter: zero if no rank has used it. A backend that
    does not tell which parameters were unused leaves these out.

    Attributes:
        members: indices of the parameters.
    """

    def __init__(self, mesh: DeviceMesh, members: Sequence[int], parameters: Sequence[Any]) -> None:
        self.mesh, self._platform, self.members = mesh, mesh.platform, tuple(members)
        self._shapes = [tuple(self._platform.shape_of(p)) for p in parameters]
        count = len(self.members)
        self.zero = self._platform.zeros((), self._platform.detach(parameters[0]))
        self._flags: Any = None
        self._known = False
        if self._platform.tells_unused:
            self._shapes.append((count,))
            self._flags = self._platform.ones((count,), self.zero)

    def check(self, cotangents: Sequence[Any]) -> None:
        """Raise for cotangents that cannot be sent.

        Raises:
            RuntimeError: where they have gradients themselves.
            TypeError: for sparse ones.
        """
        platform, found = self._platform, [x for x in cotangents if x is not None]
        refuse_second_order(platform, "replicate")
        if not self._known:
            for x in found:
                foreign = platform.foreign_tensor(x)
                if foreign is not None:
                    raise TypeError(f"replicate all-reduces dense gradients, and a parameter got {foreign}")
            self._known = True  # a module gives one kind of gradients

    def send(self, summands: Sequence[Any], average: bool) -> Sent:
        """Begin the all-reduce of this rank's gradients, None for a parameter that it has not used."""
        platform, mesh, size = self._platform, self.mesh, self.mesh.size()
        used = [x is not None for x in summands]
        if size == 1:
            return Sent(self, None, None, used, list(summands))
        pieces = [
            platform.zeros(shape, self.zero) if x is None else x
            for x, shape in zip(summands, self._shapes, strict=False)
        ]
        if self._flags is not None:
            pieces.append(self._flags if all(used) else self._some_flags(used))
        buffer = platform.join(pieces)
        op = "sum"
        if average and platform.supports("all_reduce", "avg", buffer):
            op = "avg"
        elif average:
            buffer /= size  # before, so that the sum is not too large for a narrow dtype
        return Sent(self, buffer, asynchronous.start("all_reduce", buffer, buffer, mesh, 0, op), used, None)

    def _some_flags(self, used: Sequence[bool]) -> Any:
        """Return 1 for each parameter that was used, 0 for the others."""
        platform = self._platform
        return platform.join([(platform.ones if flag else platform.zeros)((1,), self.zero) for flag in used])

    def split(self, buffer: Any, used: Sequence[bool]) -> list[Any]:
        """Return the gradients in an all-reduced buffer, as views of it; None where no rank has used the parameter."""
        gradients = self._platform.part(buffer, self._shapes)
        if self._flags is None:
            return gradients
        flags = gradients.pop()
        if all(used):
            return gradients
        # Read as late as this, because on an accelerator the host waits for it.
        values, width = self._platform.bytes_of(flags), flags.itemsize
        return [
            x if flag or any(values[i * width : (i + 1) * width]) else None
            for i, (x, flag) in enumerate(zip(gradients, used, strict=True))
        ]


class Sent:
    """The gradients of a bucket whose all-reduce is pending."""

    def __init__(
        self, bucket: Bucket, buffer: Any, work: Work | None, used: Sequence[bool], whole: list[Any] | None
    ) -> None:
        self._bucket, self._buffer, self._work, self._used, self._whole = bucket, buffer, work, used, whole

    def gradients(self) -> list[Any]:
        """Wait for the gradients of the members, and return them as `Bucket.split` does."""
        if self._work is None:
            return self._whole or []
        self._work.wait()
        return self._bucket.split(self._buffer, self._used)
