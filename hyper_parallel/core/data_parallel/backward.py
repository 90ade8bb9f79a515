"""One backward of a module under `replicate`, which collects cotangents and makes gradients of them.

No strong reference here leads to the module: the autograd graph of a call must not keep the model alive.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.data_parallel.buckets import Bucket, Sent, assign
from hyper_parallel.core.data_parallel.hooks import refuse_second_order

if TYPE_CHECKING:
    from hyper_parallel.core.data_parallel.replica import Replica
    from hyper_parallel.core.layouts.layout import Layout
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh

__all__ = ["Arrangement", "Call", "State"]


class Arrangement:
    """Facts that follow from the parameters of a module: which are trained, and the bucket of each.

    Args:
        mesh: 1-D.
        held: the parameters in the order in which modules hold them, tied ones several times. Each has the layout with
            which the module reads it, None for a plain tensor. Interception is off.
        bucket_bytes: see `buckets.assign`.

    Attributes:
        parameters, read_as: each parameter once, and the layout with which it is read.
        slots: for each entry of ``held``, the index of its parameter.
        frozen: indices of parameters that are not trained.
        trained: indices of parameters that are trained. All that follows counts these from 0.
        place: id of a trained parameter -> its place among these.
        roots: for each dtype, its trained parameters, and a 0-D zero.
    """

    def __init__(self, mesh: DeviceMesh, held: Sequence[tuple[Any, Layout | None]], bucket_bytes: float) -> None:
        platform, self.mesh = mesh.platform, mesh
        index: dict[int, int] = {}
        self.parameters: list[Any] = []
        self.read_as: list[Layout | None] = []
        for p, layout in held:
            if id(p) not in index:
                index[id(p)] = len(self.parameters)
                self.parameters.append(p)
                self.read_as.append(layout)
        self.slots = [index[id(p)] for p, _ in held]
        self.trained = [i for i, p in enumerate(self.parameters) if p.requires_grad]
        self.frozen = [i for i, p in enumerate(self.parameters) if not p.requires_grad]
        trained = [self.parameters[i] for i in self.trained]
        self.place = {id(p): i for i, p in enumerate(trained)}
        # Sizes of evenly cut parts: where tensor parallelism has cut unevenly, all ranks make the same buckets.
        sizes = [(p.dtype, p.itemsize * math.prod(p._layout.shape) / _parts(p._layout)) for p in trained]
        self.buckets = [Bucket(mesh, m, [trained[i] for i in m]) for m in assign(sizes, bucket_bytes)]
        groups: dict[Any, list[int]] = {}
        for i, (dtype, _) in enumerate(sizes):
            groups.setdefault(dtype, []).append(i)
        self.roots = [(m, platform.zeros((), platform.detach(trained[m[0]]))) for m in groups.values()]


def _parts(layout: Layout) -> int:
    """Return the number of parts into which a tensor is cut."""
    return math.prod(layout.shard_count(dim) for dim in range(layout.ndim))


class State:
    """State that the calls of a module and its submodules share.

    Attributes:
        sync: whether calls that begin now all-reduce gradients.
        running: whether a forward is running.
        call, token: the call that is running, and its token; None where nothing is recorded.
        open: the call whose backward is running.
        kept: id of a parameter -> accumulated gradient, not all-reduced yet, and whether it is part of an average.
    """

    def __init__(self) -> None:
        self.sync, self.running = True, False
        self.call: Call | None = None
        self.token: Any = None
        self.open: Call | None = None
        self.kept: dict[int, tuple[Any, bool]] = {}


class Call:
    """A call of a module, or several calls that share their gradients. It lives as long as its graph.

    Attributes:
        arrangement: `Arrangement` of the parameters.
        average: whether each rank has a loss of its own, so that gradients are averaged.
        sync: whether gradients are all-reduced. Otherwise they are accumulated.
        into: for a call within the backward of another one: the call that gets its gradients.
        deferred: whether nothing is sent before all gradients are there.
        touched: whether a gradient has come in a backward that has not ended.
    """

    def __init__(
        self, replica: Replica, state: State, arrangement: Arrangement, average: bool, into: Call | None
    ) -> None:
        self._replica, self._state, self.arrangement = weakref.ref(replica), state, arrangement
        self.average, self.sync, self.into = average, state.sync, into
        self._parameters = [arrangement.parameters[i] for i in arrangement.trained]
        #: Whether this rank's whole cotangents count, where all ranks share one batch and gradients are sums.
        self._first = arrangement.mesh.get_local_rank(0) == 0
        self.deferred = False
        self._results: list[Any] = []
        self._reset()

    def _reset(self) -> None:
        self._found: list[Any] = [None] * len(self._parameters)
        self._complete = [False] * len(self.arrangement.buckets)
        self._sent: list[Sent] = []
        self._gone: set[int] = set()
        self.touched = False

    def begin(self) -> None:
        """Begin the backward. Further calls within the same backward change nothing."""
        platform = self.arrangement.mesh.platform
        if not platform.tells_beginning:
            refuse_second_order(platform, "replicate")
        if self._state.open is not self:
            self._reset()
            self._state.open = self

    def collect(self, k: int, cotangents: Sequence[Any]) -> None:
        """Take the cotangents of one bucket: summands, one for each parameter.

        Where all ranks share one batch, as many whole cotangents follow.
        """
        bucket = self.arrangement.buckets[k]
        bucket.check(cotangents)
        count = len(bucket.members)
        for i, x in zip(bucket.members, cotangents, strict=False):
            if x is not None:
                self.add(i, x)
        if self._first:
            for i, x in zip(bucket.members, cotangents[count:], strict=False):
                if x is not None:
                    self.add(i, x)
        self._complete[k] = True
        if self.sync and self.into is None and not self.deferred:
            while len(self._sent) < len(self._complete) and self._complete[len(self._sent)]:
                self._send()

    def add(self, i: int, x: Any) -> None:
        """Add ``x`` to the gradient of a parameter.

        Raises:
            RuntimeError: when the gradient was sent already.
        """
        if i in self._gone:
            raise RuntimeError(
                "a gradient has come to a module under replicate after its bucket was sent: something computes a part "
                "of the forward again in backward that was recorded the first time. Use the framework's own "
                "checkpointing"
            )
        self.touched = True
        have = self._found[i]
        self._found[i] = x if have is None else have + x

    def _send(self) -> None:
        """Send the next bucket, with gradients that were accumulated for it."""
        bucket, kept = self.arrangement.buckets[len(self._sent)], self._state.kept
        for i in bucket.members:
            before = kept.pop(id(self._parameters[i]), None)
            if before is not None:
                self.add(i, before[0])
        self._gone.update(bucket.members)
        self._sent.append(bucket.send([self._found[i] for i in bucket.members], self.average))

    def finish(self) -> None:
        """Complete the gradients. `take` then returns each of them once."""
        self._results = [None] * len(self._parameters)
        if self.into is not None:
            for p, x in zip(self._parameters, self._found, strict=True):
                if x is not None:
                    self.into.add(self.into.arrangement.place[id(p)], x)
        elif not self.sync:
            self._keep()
        else:
            while len(self._sent) < len(self._complete):
                self._send()
            for bucket, sent in zip(self.arrangement.buckets, self._sent, strict=True):
                for i, x in zip(bucket.members, sent.gradients(), strict=True):
                    self._results[i] = x
        self._reset()
        if self._state.open is self:
            self._state.open = None
        replica = self._replica()
        if replica is not None:
            replica.end(self)

    def _keep(self) -> None:
        kept, platform = self._state.kept, self.arrangement.mesh.platform
        for p, x in zip(self._parameters, self._found, strict=True):
            if x is not None:
                before = kept.get(id(p))
                kept[id(p)] = (platform.clone(x) if before is None else before[0] + x), self.average

    def take(self, members: Sequence[int]) -> list[Any]:
        """Return gradients, and drop all references here, so that the framework takes them without a copy."""
        results = self._results
        found = [results[i] for i in members]
        for i in members:
            results[i] = None
        return found
