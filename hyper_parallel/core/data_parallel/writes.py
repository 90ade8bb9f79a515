"""Writes of modules to whole parameters while their unit runs. They go into the shards: each rank keeps its part.

Frameworks and the platform's hooks count most writes. Others (`p.data.mul_()`) are found by comparing values. Values
are compared in the first forwards of a unit, and inside `check_ranks`. A parameter with one such write is compared in
every forward after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.data_parallel.call import versions_of
from hyper_parallel.core.observers import CHECKS

if TYPE_CHECKING:
    from hyper_parallel.core.data_parallel.flat_buffer import FlatBuffer
    from hyper_parallel.core.data_parallel.plan import Plan

__all__ = ["Writes", "counts_of"]

#: Number of first forwards of a unit in which values are compared.
_FIRST = 2


def counts_of(wholes: Sequence[Any]) -> list[int]:
    """Return how often each tensor has been written to, as far as that is counted."""
    try:
        return versions_of(wholes)
    except RuntimeError:  # torch's inference mode counts nothing
        return [0] * len(wholes)


class Writes:
    """Writes to the parameters of one unit.

    Args:
        plan: plan of the unit.
        what: the unit, for messages.
    """

    def __init__(self, plan: Plan, what: str) -> None:
        self._plan, self._platform, self._what = plan, plan.mesh.platform, what
        self._forwards = 0
        self._uncounted: set[int] = set()  # parameters with writes that are not counted

    def arrive(
        self,
        wholes: Sequence[Any],
        versions: Sequence[int],
        parameters: Sequence[Any],
        buffers: Sequence[FlatBuffer],
        members: Sequence[Sequence[int]],
    ) -> bool:
        """Copy values that a forward has written into the shards; returns whether there were any. Interception is off.

        Args:
            wholes: the tensors that modules have found, by the index of the parameter.
            versions: their `counts_of` before the forward.
            parameters: the shards.
            buffers, members: buffers of the unit, and the indices of their parameters.
        """
        self._forwards += 1
        counted = counts_of(wholes)
        looks = (self._forwards <= _FIRST or bool(CHECKS)) and self._platform.needs_values
        if counted == versions and not looks and not self._uncounted:
            return False
        written = False
        with self._platform.no_grad():
            for buffer, indices in zip(buffers, members, strict=True):
                for place, i in enumerate(indices):
                    is_counted = counted[i] != versions[i]
                    if (is_counted or looks or i in self._uncounted) and self._take(
                        buffer, place, wholes[i], parameters[i]
                    ):
                        written = True
                        if not is_counted:
                            self._uncounted.add(i)
            if CHECKS and looks:
                self._compare(wholes)
        return written

    def _take(self, buffer: FlatBuffer, place: int, whole: Any, parameter: Any) -> bool:
        """Write this rank's part of a whole parameter to its shard; returns False where that has these values."""
        platform, block = self._platform, buffer.blocks[place]
        if not block.local_count:
            return False
        part, sent = platform.clone(block.part_of(platform.detach(whole))), buffer.sent(parameter)
        if platform.bytes_of(part) == platform.bytes_of(sent):
            return False
        shard = platform.detach(parameter)
        if part.dtype != shard.dtype:
            # Gathered in another dtype: elements that were not written keep their own precision.
            kept = platform.masked_fill(platform.to_device(shard), part != sent, 0.0)
            part = kept + platform.masked_fill(platform.to_dtype(part, shard.dtype), part == sent, 0.0)
        platform.write(shard, self._plan.kept(part))
        return True

    def _compare(self, wholes: Sequence[Any]) -> None:
        """Have ranks compare the whole parameters: gathered values, and values that they have written."""
        platform, mesh = self._platform, self._plan.mesh
        facts = {}
        for slot in self._plan.slots:
            values = platform.bytes_of(platform.clone(platform.detach(wholes[slot.index])))
            facts[f"the values written to {slot}"] = f"digest {hashlib.sha256(values).hexdigest()[:12]}"
        for mesh_dim in range(mesh.ndim):
            if mesh.shape[mesh_dim] > 1:
                CHECKS[-1].agree(
                    f"the end of the forward of {self._what}",
                    None,
                    mesh.ranks_along(mesh_dim),
                    facts,
                    "each rank keeps its part of what it writes: write the same on all ranks",
                )
