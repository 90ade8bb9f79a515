"""A unit of `replicate`: its parameters are replicated on each rank, and its gradients are all-reduced in buckets.

A call creates the following autograd functions. A root takes the parameters. For each bucket, a function returns views,
which modules read in place of its parameters. An identity wraps the results (`Results`). Backward runs these functions
in the reverse order. The views collect the gradients of their bucket. A bucket is sent when it and all earlier buckets
are complete. The root waits for all buckets, and returns gradients for the parameters. A token, which is a zero tensor,
leads from each function to the next. So backward reaches the root on every rank, whichever parameters it has used.

A call holds no strong reference to the module, so that its graph does not keep the model alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.communication.redistribute import partial_key
from hyper_parallel.core.data_parallel.batches import is_distributed, summed_over
from hyper_parallel.core.data_parallel.call import RecordedCall
from hyper_parallel.core.data_parallel.gradients import Gradients
from hyper_parallel.core.data_parallel.hooks import (
    REPLICATED_FUNCTIONS,
    Results,
    refuse_compiling,
    refuse_second_order,
)
from hyper_parallel.core.data_parallel.places import Places, Slot
from hyper_parallel.core.data_parallel.reduction import Buckets, Reduction
from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.dtensor.undistributed import broadcast_tensors
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.trees import tensors_in
from hyper_parallel.platform.contract import NOTHING_FASTER

__all__ = ["Options", "ReplicatedUnit"]

_VIEWS = "views of replicated parameters"
#: The last call, its anchors, views of the trained parameters, and the tensors that the module read.
_Last = tuple["_Call", Sequence[Any], list[Any], list[Any]]


@dataclass(frozen=True)
class Options:
    """The arguments of `replicate`."""

    mesh: DeviceMesh
    bucket_bytes: float
    broadcast_buffers: bool
    #: Whether some parameters had no values. If so, all get the values of the first rank when the module is called.
    without_values: bool = False


class _Shared:
    """State that the unit of a module shares with the units of its submodules.

    Attributes:
        gradients: reduction of gradients, and accumulated gradients by the ids of parameters.
        running: whether a forward is running.
        call: the running call; None if nothing is recorded.
        open: the call whose backward is running, or None.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.gradients, self.running = Gradients(mesh), False
        self.call: _Call | None = None
        self.open: _Call | None = None


class ReplicatedUnit:
    """The parameters of a module and its submodules, as local tensors that modules read during forward.

    Args:
        module: the module.
        options: the arguments of `replicate`.
        slots: places in modules that hold the parameters.
        inner: for each parameter, the tensor-parallel layout with which it is read; None for a plain parameter.
        shared: state of the larger unit that contains this one; None for a unit of its own.

    Attributes:
        module, options, shared: the arguments. Without ``shared``, a new state is created.
        parts: id of a submodule that was called directly -> its unit.
        checked: number of calls that have looked for parameters that were added later.
    """

    def __init__(
        self,
        module: Any,
        options: Options,
        slots: Sequence[Slot],
        inner: Sequence[Layout | None],
        shared: _Shared | None = None,
    ) -> None:
        self.module, self.options, self.mesh = module, options, options.mesh
        self.platform, self.inner = options.mesh.platform, inner
        self.shared, self._is_part = shared or _Shared(self.mesh), shared is not None
        self.parts: dict[int, ReplicatedUnit] = {}
        self.checked = 0
        self.what = f"{type(module).__name__} under replicate"
        self._places = Places(self.platform, [module], slots, self.what, "replicate")
        #: The meshes on which tensor-parallel styles have placed parameters.
        self._beside = tuple(dict.fromkeys(inner.mesh for inner in self.inner if inner is not None))
        self._without_values = options.without_values
        self._results = Results(self.mesh, self.what, "replicate", _Call.begin)
        self._known: tuple[Any, Buckets] | None = None
        self._last: _Last | None = None

    def __deepcopy__(self, memo: dict) -> None:
        """Return None, because a copy of the module creates its own unit."""

    def __reduce__(self) -> tuple:
        return (_nothing, ())

    def run(self, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run the module's ``forward(module, *args, **kwargs)`` on local parameters."""
        platform, shared = self.platform, self.shared
        refuse_compiling(platform, self.what)
        if self._without_values:
            self._broadcast_values()
        one_loss = bool(is_distributed(tensors_in((args, kwargs), platform), self.mesh, self.what))
        with platform.no_dispatch():
            known = self._buckets()
            call, tensors = self._begin(known, one_loss)
        if call is not None and self.options.broadcast_buffers and call.sync:
            self._broadcast_buffers()
        shared.running, shared.call = True, call
        try:
            with summed_over(self.mesh if one_loss else None, self._beside):
                platform.stand_for(tensors, known.parameters)
                before = self._places.put(tensors, known.parameters)
                with platform.no_dispatch():
                    addresses = platform.addresses(tensors)
                try:
                    output = forward(self.module, *args, **kwargs)
                    with platform.no_dispatch():
                        if self._places.keep_exchanged(addresses, self.inner):
                            self._last = None  # its views have the other memory
                finally:
                    self._places.take_back(before)
            # In a distributed batch all ranks use the same parameters, and backward reaches the root through these. But
            # accumulated gradients wait for the next backward, even if that backward reaches no parameters.
            if call is None or call.into is not None or (one_loss and not shared.gradients.has_accumulated):
                return output
            return self._results.opening(output, call, one_loss)
        finally:
            shared.running, shared.call = False, None
            if call is not None:
                call.anchors = ()  # else the graph would hold a reference to itself

    def _buckets(self) -> Buckets:
        """Return the trained parameters and their buckets, which are recreated when parameters have changed."""
        parameters = self._places.parameters()
        key = [x for p in parameters for x in (id(p), p.requires_grad, p.dtype)]
        if self._known is None or self._known[0] != key:
            self._known, self._last = (key, Buckets(self.mesh, parameters, self.options.bucket_bytes)), None
        return self._known[1]

    def _begin(self, known: Buckets, one_loss: bool) -> tuple[_Call | None, list[Any]]:
        """Start a call. Return the call, or None if nothing is recorded, and the tensors that modules read."""
        platform, shared = self.platform, self.shared
        recorded = bool(known.trained) and platform.requires_grad(known.parameters[known.trained[0]])
        tensors: list[Any] = [None] * len(known.parameters)
        for i in known.frozen if recorded else range(len(tensors)):
            local = platform.as_parameter(platform.detach(known.parameters[i]))
            tensors[i] = self._as_read(known, i, local, local if one_loss else None)
        if not recorded:
            return None, tensors
        shared.gradients.check_kind(one_loss, self.what)
        into = shared.open if self._is_part and platform.in_backward() else None
        last = self._last
        if last is None or into is not None or not self._goes_on(last, known, one_loss):
            call = _Call(self, known, one_loss, into)
            last = call, *self._views(call, known, one_loss)
            if into is None:
                platform.write_cache(known.parameters[known.trained[0]], _VIEWS, last[2][0])
                self._last = last
        call, call.anchors, _, read = last
        for i, x in zip(known.trained, read, strict=True):
            tensors[i] = x
        return call, tensors

    def _goes_on(self, last: _Last, known: Buckets, one_loss: bool) -> bool:
        """Return whether a new call can reuse the views and all-reduces of the last call. No backward may have run
        between them."""
        platform, (call, _, views, _) = self.platform, last
        trained = [known.parameters[i] for i in known.trained]
        return (
            (call.sync, call.one_loss, call.touched) == (self.shared.gradients.reduce_gradients, one_loss, False)
            and platform.read_cache(trained[0], _VIEWS) is views[0]
            and all(platform.same_memory(p, x) for p, x in zip(trained, views, strict=True) if 0 not in p.shape)
        )

    def _views(self, call: _Call, known: Buckets, one_loss: bool) -> tuple[Sequence[Any], list[Any], list[Any]]:
        """Return the token of a call, views of the trained parameters for backward, and the tensors that modules
        read."""
        (give, read), soon = REPLICATED_FUNCTIONS[self.platform], (self.platform.fast or NOTHING_FASTER).run_soon
        trained = [known.parameters[i] for i in known.trained]
        anchors: Sequence[Any] = ()
        for members, zero in known.roots:
            before = [self.platform.to_dtype(x, zero.dtype) for x in anchors]
            anchors = give((call, members, zero), *before, *[trained[i] for i in members])
        views: list[Any] = [None] * len(trained)
        tensors: list[Any] = [None] * len(trained)
        for k, members in enumerate(known.members):
            parameters = [trained[i] for i in members]
            token = self.platform.to_dtype(anchors[0], parameters[0].dtype)
            found = read((call, k, parameters * 2 if one_loss else parameters), token)
            soon(found[0])
            for j, i in enumerate(members):
                views[i], whole = found[j], found[j + len(members)] if one_loss else None
                tensors[i] = self._as_read(known, known.trained[i], views[i], whole)
        return anchors, views, tensors

    def _as_read(self, known: Buckets, i: int, local: Any, whole: Any) -> Any:
        """Return a parameter in the form that modules read. A tensor-parallel parameter is a DTensor for this rank's
        samples.

        Args:
            known: the parameters.
            i: index of the parameter.
            local: local data, whose cotangents are summands.
            whole: in a distributed batch, the same data for readers whose full cotangent is equal on all ranks.
        """
        platform, inner = self.platform, self.inner[i]
        if inner is not None or whole is None:
            return local if inner is None else platform.wrap(local, inner)
        found = platform.wrap(whole, known.parameters[i]._layout)
        if whole is not local:  # trained: here cotangents are summands, which need no separate all-reduce
            platform.write_cache(found, partial_key(self.mesh, (0,)), local)
        return found

    def _broadcast_values(self) -> None:
        """Broadcast values from the first rank, for a module that had none when `replicate` was called."""
        parameters = self._places.parameters()
        self._places.check_values(parameters)
        broadcast_tensors(parameters, self.mesh, 0)
        self._broadcast_buffers()
        self._without_values = False

    def _broadcast_buffers(self) -> None:
        held = [b for _, m in self.platform.named_modules(self.module) for _, b in self.platform.named_buffers(m)]
        broadcast_tensors([b for b in held if not isinstance(b, DTensor)], self.mesh, 0)

    def share_no_more(self, call: _Call) -> None:
        """Let the next call create new views, because the backward of ``call`` has ended."""
        if self._last is not None and self._last[0] is call:
            self._last = None


class _Call(RecordedCall):
    """A call of a module, or several calls that share their gradients. Backward reaches the call through the call's
    token.

    Attributes:
        known: the trained parameters and their buckets.
        one_loss: whether all ranks have one loss, so that gradients are summed.
        sync: whether gradients are all-reduced. If not, they are accumulated.
        into: for a call within the backward of another call: the outer call, which gets the gradients.
        deferred: whether buckets are sent only when all gradients are complete.
        touched: whether a gradient has arrived in a backward that has not ended.
    """

    def __init__(self, unit: ReplicatedUnit, known: Buckets, one_loss: bool, into: _Call | None) -> None:
        super().__init__()
        self._unit, self._shared, self.known = weakref.ref(unit), unit.shared, known
        self.one_loss, self.sync, self.into = one_loss, unit.shared.gradients.reduce_gradients, into
        self.deferred = False
        self._reset()

    def anchors_as(self, dtype: Any) -> Sequence[Any]:
        """Return the anchors converted to ``dtype``. The token is the only anchor, and its conversion costs nothing."""
        return [self.known.mesh.platform.to_dtype(x, dtype) for x in self.anchors]

    def _reset(self) -> None:
        self._found: list[Any] = [None] * len(self.known.trained)
        self._complete = [False] * len(self.known.buckets)
        self._sent: list[Reduction] = []
        self._gone: set[int] = set()
        self._results: list[Any] | None = None
        self.touched = False

    def begin(self) -> None:
        """Start the backward, when cotangents of results arrive. Further calls in this backward change nothing."""
        if self._shared.open is not self:
            self._reset()
            self._shared.open = self

    def collect(self, k: int, cotangents: Sequence[Any]) -> None:
        """Add the cotangents of one bucket to its gradients.

        Each parameter has a partial cotangent and, for a distributed batch, a full cotangent. Only the first rank adds
        full cotangents.

        Raises:
            RuntimeError: if gradients of gradients are recorded.
            TypeError: for sparse cotangents.
        """
        known, platform = self.known, self.known.mesh.platform
        refuse_second_order(platform, "replicate")
        for x in cotangents if k not in known.dense else ():
            foreign = None if x is None else platform.foreign_tensor(x)
            if foreign is not None:
                raise TypeError(f"replicate all-reduces dense gradients, and a parameter got {foreign}")
        known.dense.add(k)  # a module gives one kind of gradients
        self._results = None
        members, first = known.members[k], known.mesh.get_local_rank(0) == 0
        for i, x in zip(members * 2 if first else members, cotangents, strict=False):
            self.add(i, x)
        self._complete[k] = True
        if self.sync and self.into is None and not self.deferred:
            while len(self._sent) < len(self._complete) and self._complete[len(self._sent)]:
                self._send()

    def add(self, i: int, x: Any) -> None:
        """Add ``x`` to the gradient of a parameter, unless ``x`` is None.

        Raises:
            RuntimeError: if the gradient was sent already.
        """
        if x is None:
            return
        if i in self._gone:
            raise RuntimeError(
                "a gradient of a module under replicate arrived after its bucket was reduced. A part of the forward "
                "was recorded twice, in forward and in backward. Use the framework's own activation checkpointing"
            )
        self.touched = True
        have = self._found[i]
        self._found[i] = x if have is None else have + x

    def _send(self) -> None:
        """Send the next bucket, including gradients that were accumulated for it."""
        gradients, keys, k = self._shared.gradients, self.known.keys, len(self._sent)
        members = self.known.members[k]
        found = gradients.with_accumulated([keys[i] for i in members], [self._found[i] for i in members])
        self._gone.update(members)
        op, _ = gradients.scale(self.one_loss)
        self._sent.append(self.known.buckets[k].reduce(found, op))

    def take(self, members: Sequence[int]) -> list[Any]:
        """Return gradients of parameters of one dtype, and release them, so that autograd takes them without a copy.
        The first root that backward reaches completes the gradients of all roots."""
        if self._results is None:
            self._results = self._finish()
        found = [self._results[i] for i in members]
        for i in members:
            self._results[i] = None
        return found

    def _finish(self) -> list[Any]:
        """Complete the gradients, and return one for each trained parameter."""
        known, results = self.known, [None] * len(self.known.trained)
        if self.into is not None:
            places = {key: i for i, key in enumerate(self.into.known.keys)}
            for key, x in zip(known.keys, self._found, strict=True):
                if x is not None:
                    self.into.add(places[key], x)
        elif not self.sync:
            self._shared.gradients.accumulate(known.keys, self._found, self.one_loss)
        else:
            while len(self._sent) < len(self._complete):
                self._send()
            for members, sent in zip(known.members, self._sent, strict=True):
                for i, x in zip(members, sent.shards(), strict=True):
                    results[i] = x
        self._reset()
        if self._shared.open is self:
            self._shared.open = None
        unit = self._unit()
        if unit is not None:
            unit.share_no_more(self)
        return results


def _nothing() -> None:
    """Return None, which an unpickled module has in place of its unit."""
