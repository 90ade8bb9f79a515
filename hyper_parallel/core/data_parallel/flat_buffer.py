"""The parameters of one dtype of a unit of `fully_shard`: gathered, and their gradients reduced, by one collective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from hyper_parallel.core.dtensor.communication import asynchronous
from hyper_parallel.core.dtensor.layouts.chunking import chunk_sizes

__all__ = ["Call", "FlatBuffer"]


class Call:
    """One call of a unit; it lives as long as its graph.

    Attributes:
        shards: of each buffer of the unit, the parameters.
        recorded: whether there will be a backward.
    """

    def __init__(self, shards: dict[FlatBuffer, list[Any]], recorded: bool) -> None:
        self.shards, self.recorded = shards, recorded
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return [p._version for parameters in self.shards.values() for p in parameters]

    def check_unchanged(self) -> None:
        """Raise RuntimeError when a parameter was written to since, as frameworks do for what autograd keeps: backward
        would read other values than forward has read."""
        if self._versions_now() != self._versions:
            raise RuntimeError(
                "a parameter under fully_shard was changed in place between a forward and its backward: run backward "
                "before the optimizer's step, or forward again"
            )


class FlatBuffer:
    """Whole parameters as views of one storage.

    Each rank sends its shards one after the other, and zeros: as many elements as rank 0, whose shards are the largest.

    Attributes:
        whole: the storage, as a 1-D tensor, which has no memory between the forward and the backward of a call. None
            before there is one; a call without backward, or on a platform that frees no storage, has its own.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        self.mesh, self._dtype = parameters[0].device_mesh, parameters[0].dtype
        self.platform, self._size = self.mesh.platform, self.mesh.shape[0]
        self._shapes = [tuple(p._layout.shape) for p in parameters]
        rows = [chunk_sizes(shape[0], self._size) for shape in self._shapes]
        local = [[(n[i], *s[1:]) for n, s in zip(rows, self._shapes, strict=True)] for i in range(self._size)]
        counts = [sum(map(math.prod, shapes)) for shapes in local]
        self._length = counts[0]
        #: Of each rank, the shapes of what it sends.
        self._sent = [[*shapes, (self._length - n,)] for shapes, n in zip(local, counts, strict=True)]
        self.whole: Any = None
        self._freed = False
        #: The calls whose backward is under way. One that does not get to all buffers is there until its graph is gone.
        self._active: WeakSet[Call] = WeakSet()
        #: ``views(call, *parameters)``: the whole parameters, differentiable.
        self.views = self.platform.joint_function(self._views_forward, self._views_backward)

    def _views_forward(self, ctx: Any, call: Call, *shards: Any) -> Sequence[Any]:
        ctx.call = call
        return self.platform.part(self.platform.detach(self._fill(call)), self._shapes)

    def _views_backward(self, ctx: Any, *cotangents: Any) -> Sequence[Any]:
        platform, mesh = self.platform, self.mesh
        if any(map(platform.requires_grad, cotangents)):
            raise RuntimeError(
                "gradients of gradients do not go through fully_shard: leave create_graph off, or do not shard the "
                "modules that they go through"
            )
        # Parameter by parameter what each rank gets, then rank by rank.
        *of_parameters, padding = zip(*self._sent, strict=True)
        parts = [platform.part(x, shapes) for x, shapes in zip(cotangents, of_parameters, strict=True)]
        parts.append([platform.zeros(shape, cotangents[0]) for shape in padding])
        summands = platform.join([x for of_rank in zip(*parts, strict=True) for x in of_rank])
        mine = platform.factory("empty", (self._length,), None, self._dtype)
        asynchronous.start("reduce_scatter", mine, summands, mesh, 0, "avg").wait()
        self._active.discard(ctx.call)
        self.free()
        return [platform.clone(x) for x in platform.part(mine, self._sent[mesh.get_local_rank(0)])[:-1]]

    def _fill(self, call: Call) -> Any:
        platform, sent = self.platform, self._sent
        shards = [platform.detach(p) for p in call.shards[self]]
        mine = platform.join([*shards, platform.zeros(sent[self.mesh.get_local_rank(0)][-1], shards[0])])
        gathered = platform.factory("empty", (self._size * self._length,), None, self._dtype)
        asynchronous.start("all_gather", gathered, mine, self.mesh, 0).wait()
        pieces = platform.part(gathered, [shape for shapes in sent for shape in shapes])
        values = platform.join([x for i in range(len(shards)) for x in pieces[i :: len(shards) + 1]])
        if not (platform.frees_storage and call.recorded):
            return values
        if self.whole is None:
            self.whole = values
        else:
            platform.refill_storage(self.whole, values)
        self._freed = False
        return self.whole

    def open(self, call: Call) -> None:
        """Have the whole parameters there for the backward of ``call``, which begins."""
        call.check_unchanged()
        self._active.add(call)
        if self._freed:
            self._fill(call)

    def free(self) -> None:
        """Give the whole parameters back, unless a backward reads them."""
        if self.whole is not None and not self._freed and not self._active:
            self._freed = True
            self.platform.free_storage(self.whole)

    def holds(self, x: Any) -> bool:
        """Whether a plain tensor lies in the storage that `free` gives back."""
        if self.whole is None or 0 in (*self.whole.shape, *self.platform.shape_of(x)):
            return False
        return self.platform.same_memory(self.whole, x)
