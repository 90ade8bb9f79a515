"""Local parts of parameters, with which a module under `replicate` computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.communication.redistribute import partial_key
from hyper_parallel.core.data_parallel.backward import Arrangement, Call, State
from hyper_parallel.core.data_parallel.batches import is_distributed
from hyper_parallel.core.data_parallel.hooks import through
from hyper_parallel.core.data_parallel.places import found_there
from hyper_parallel.core.data_parallel.replica_functions import functions_of
from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.dtensor.undistributed import broadcast_tensors
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.rules.random import BESIDE
from hyper_parallel.core.tensor_parallel.program.distributed_batches import SUMMED_OVER
from hyper_parallel.core.trees import map_tensors, tensors_in
from hyper_parallel.platform.contract import NOTHING_FASTER

__all__ = ["MARK", "REPLICA", "Mark", "Options", "Replica", "entered", "replica_of"]

#: Attribute of a module at or below one that `replicate` was applied to: its `Mark`.
MARK = "_replicated"
#: Attribute of a module: the `Replica` that it belongs to; None before the first call, also of a copy.
REPLICA = "_replica"


@dataclass(frozen=True)
class Options:
    """The arguments of `replicate`."""

    mesh: DeviceMesh
    bucket_bytes: float
    broadcast_buffers: bool
    #: Whether some parameters had no values. All then get those of the first rank when the module is called.
    waits: bool = False


@dataclass(frozen=True)
class Mark:
    """Mark that `replicate` leaves on one module. Copies of the module share it.

    Attributes:
        options: the arguments of `replicate`.
        layouts: name of a parameter that the module itself holds -> its layout, and the tensor-parallel layout with
            which the module reads it, None for a plain parameter.
    """

    options: Options
    layouts: dict[str, tuple[Layout, Layout | None]] = field(default_factory=dict)

    def marks(self, module: Any) -> bool:
        """Return whether this mark's call of `replicate` marked ``module`` too. Experts may have one of their own."""
        other: Mark | None = vars(module).get(MARK)
        return other is not None and other.options is self.options

    def __deepcopy__(self, memo: dict) -> Mark:
        return self


class Replica:
    """The parameters that a module and those below it hold, as this rank computes with them.

    Args:
        module: the module.
        state: state of the replica that this one is a part of, if it is one.
    """

    def __init__(self, module: Any, state: State | None = None) -> None:
        mark: Mark = vars(module)[MARK]
        self.module, self.options, self.mesh = module, mark.options, mark.options.mesh
        self.platform = platform = self.mesh.platform
        self.state = state or State()
        self._is_part = state is not None
        #: Places of parameters: module, its table of parameters, name, layouts.
        self._at = [
            (holder, platform.own_parameters(holder), name, *layout)
            for _, holder in platform.named_modules(module)
            if mark.marks(holder)
            for name, layout in vars(holder)[MARK].layouts.items()
        ]
        self._parts: dict[int, Replica] = {}
        #: The meshes on which tensor-parallel styles have placed parameters.
        self._beside = tuple(dict.fromkeys(inner.mesh for *_, inner in self._at if inner is not None))
        self._waits = mark.options.waits
        self._known: tuple[Any, Arrangement] | None = None
        #: The last call, its token, views of the trained parameters, and the tensors that the module read.
        self._last: tuple[Call, Any, list[Any], list[Any]] | None = None

    def __deepcopy__(self, memo: dict) -> None:
        """Return None: a copy of the module makes its own replica."""

    def __reduce__(self) -> tuple:
        return (_nothing, ())

    def part(self, module: Any) -> Replica:
        """Return the `Replica` of a submodule that is called directly."""
        if module is self.module:
            return self
        found = self._parts.get(id(module))
        if found is None:
            found = self._parts[id(module)] = Replica(module, self.state)
        return found

    def run(self, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run the module's ``forward(module, *args, **kwargs)`` on local parameters."""
        platform, module, state = self.platform, self.module, self.state
        what = f"{type(module).__name__} under replicate"
        if platform.is_compiling():
            raise RuntimeError(f"{what} is being compiled, which is not supported: compile the modules inside of it")
        if self._waits:
            self._broadcast_values(what)
        inputs = tensors_in((args, kwargs), platform)
        one_batch = bool(is_distributed(inputs, self.mesh, what))
        with platform.no_dispatch():
            known = self._arrange(what)
            call, token, tensors = self._begin(known, one_batch, what)
        if call is not None and self.options.broadcast_buffers and call.sync:
            self._broadcast_buffers()
        state.running, state.call, state.token = True, call, token
        summed = SUMMED_OVER.set(self.mesh if one_batch else None)
        beside = BESIDE.set(self._beside) if one_batch else None
        try:
            held = [own[name] for _, own, name, _, _ in self._at]
            platform.stand_for(tensors, known.parameters)
            for (_, own, name, _, _), i in zip(self._at, known.slots, strict=True):
                own[name] = tensors[i]
            try:
                output = forward(module, *args, **kwargs)
            finally:
                for (_, own, name, _, _), p in zip(self._at, held, strict=True):
                    own[name] = p
        finally:
            state.running, state.call, state.token = False, None, None
            SUMMED_OVER.reset(summed)
            if beside is not None:
                BESIDE.reset(beside)
        # With one batch all ranks use the same parameters, and backward comes to the root through them. But accumulated
        # gradients wait for the next backward, also for one that comes to no parameters.
        if call is None or call.into is not None or (one_batch and not state.kept):
            return output
        return self._anchored(output, call, token, one_batch)

    def _arrange(self, what: str) -> Arrangement:
        held: list[Any] = [own.get(name) for _, own, name, _, _ in self._at]
        for p, (holder, _, name, layout, _) in zip(held, self._at, strict=True):
            if getattr(p, "_layout", None) is not layout:
                path = next(path for path, module in self.platform.named_modules(self.module) if module is holder)
                at = f"{path}.{name}" if path else name
                raise ValueError(
                    f"{what}: something has taken the place of a parameter {at!r}. Copy values into "
                    f"the parameter that is there instead{found_there(self.platform, p)}"
                )
        key = [x for p in held for x in (id(p), p.requires_grad, p.dtype)]
        if self._known is None or self._known[0] != key:
            read_as = [inner for *_, inner in self._at]
            known = Arrangement(self.mesh, list(zip(held, read_as, strict=True)), self.options.bucket_bytes)
            self._known, self._last = (key, known), None
        return self._known[1]

    def _begin(self, known: Arrangement, one_batch: bool, what: str) -> tuple[Call | None, Any, list[Any]]:
        """Begin a call. Return it, its token, and the tensor that the module reads of each parameter.

        The call is None where nothing is recorded.
        """
        platform, state = self.platform, self.state
        recorded = bool(known.trained) and platform.requires_grad(known.parameters[known.trained[0]])
        tensors: list[Any] = [None] * len(known.parameters)
        for i in known.frozen if recorded else range(len(tensors)):
            held = platform.as_parameter(platform.detach(known.parameters[i]))
            tensors[i] = self._as_read(held, known, i, one_batch)
        if not recorded:
            return None, None, tensors
        if any(average is one_batch for _, average in state.kept.values()):
            now, before = ("distributed", "plain") if one_batch else ("plain", "distributed")
            raise ValueError(
                f"{what} is called with {now} inputs, and has gradients of {before} ones that were not all-reduced: "
                "let a backward of such inputs, with synchronisation, come first"
            )
        into = state.open if self._is_part and platform.in_backward() else None
        last = self._last
        if last is None or into is not None or not self._goes_on(last, known, one_batch):
            call = Call(self, state, known, not one_batch, into)
            last = call, *self._views(call, known, one_batch)
            if into is None:
                platform.write_cache(known.parameters[known.trained[0]], REPLICA, last[2][0])
                self._last = last
        for i, x in zip(known.trained, last[3], strict=True):
            tensors[i] = x
        return last[0], last[1], tensors

    def _goes_on(self, last: tuple[Call, Any, list[Any], list[Any]], known: Arrangement, one_batch: bool) -> bool:
        """Return whether a call shares the views, and so the all-reduces, of the last one: no backward came between."""
        platform, (call, _, views, _) = self.platform, last
        trained = [known.parameters[i] for i in known.trained]
        return (
            (call.sync, call.average, call.touched) == (self.state.sync, not one_batch, False)
            and platform.read_cache(trained[0], REPLICA) is views[0]
            and all(platform.same_memory(p, x) for p, x in zip(trained, views, strict=True) if 0 not in p.shape)
        )

    def _views(self, call: Call, known: Arrangement, one_batch: bool) -> tuple[Any, list[Any], list[Any]]:
        """Return the token of a call, views of trained parameters for its backward, and the tensors that modules
        read."""
        platform, functions = self.platform, functions_of(self.platform)
        soon = (platform.fast or NOTHING_FASTER).run_soon
        trained = [known.parameters[i] for i in known.trained]
        tokens = [functions.give((call, m, zero), *[trained[i] for i in m])[0] for m, zero in known.roots]
        token, zero = tokens[0], known.roots[0][1]
        if len(tokens) > 1:
            (token,) = functions.gather((call, zero), *[platform.to_dtype(x, zero.dtype) for x in tokens])
        views: list[Any] = [None] * len(trained)
        read = list(views)
        for k, bucket in enumerate(known.buckets):
            members = [trained[i] for i in bucket.members]
            given = platform.to_dtype(token, bucket.zero.dtype)
            found = functions.read((call, k, members * 2 if one_batch else members), given)
            soon(found[0])
            for j, i in enumerate(bucket.members):
                views[i] = found[j]
                if not one_batch or known.read_as[known.trained[i]] is not None:
                    # A tensor-parallel module computes with this rank's part of the batch.
                    read[i] = self._as_read(views[i], known, known.trained[i], False)
                else:
                    read[i] = self._as_read(found[j + len(members)], known, known.trained[i], True)
                    # Readers whose cotangents are summands get these, instead of an all-reduce for each parameter.
                    platform.write_cache(read[i], partial_key(self.mesh, (0,)), views[i])
        return token, views, read

    def _as_read(self, local: Any, known: Arrangement, i: int, one_batch: bool) -> Any:
        layout = known.read_as[i]
        if layout is None and one_batch:
            layout = known.parameters[i]._layout
        return local if layout is None else self.platform.wrap(local, layout)

    def _anchored(self, output: Any, call: Call, token: Any, one_batch: bool) -> Any:
        """Return ``output``, connected to the root, although this rank may have used no parameter for it."""
        platform = self.platform
        anchor = functions_of(platform).anchor
        found: list[Any] = []

        def collect(x: Any) -> Any:
            if one_batch or not isinstance(x, DTensor):
                with platform.no_dispatch():
                    if platform.requires_grad(x):
                        found.append(x)
            return x

        def anchored(call: Call, *xs: Any) -> Any:
            given = platform.to_dtype(token, xs[0].dtype)
            return anchor((call, platform.detach(given)), given, *xs)

        map_tensors(output, collect, platform, _left)
        new = through(platform, anchored, call, found)
        return map_tensors(output, lambda x: new.get(id(x), x), platform, _left) if new else output

    def _broadcast_values(self, what: str) -> None:
        """Give all ranks the values of the first, for a module that had none when `replicate` was called."""
        held = [(name, own.get(name)) for _, own, name, _, _ in self._at]
        if self.platform.needs_values:
            for name, p in held:
                if p is not None and self.platform.is_meta(p):
                    raise ValueError(
                        f"{what}: parameter {name!r} has no values: give it some on this rank's device before the "
                        "module is called, as to_empty() and reset_parameters() do"
                    )
        broadcast_tensors(list({id(p): p for _, p in held if p is not None}.values()), self.mesh, 0)
        self._broadcast_buffers()
        self._waits = False

    def _broadcast_buffers(self) -> None:
        platform = self.platform
        held = [b for _, m in platform.named_modules(self.module) for _, b in platform.named_buffers(m)]
        broadcast_tensors([b for b in held if not isinstance(b, DTensor)], self.mesh, 0)

    def end(self, call: Call) -> None:
        """End the backward of ``call``, whose views the next call does not share."""
        if self._last is not None and self._last[0] is call:
            self._last = None


def replica_of(module: Any) -> Replica:
    """Return the `Replica` of a module under `replicate`, made at its first use."""
    replica: Replica | None = vars(module)[REPLICA]
    if replica is None:
        replica = Replica(module)
        mark: Mark = vars(module)[MARK]
        for _, submodule in replica.platform.named_modules(module):
            if mark.marks(submodule):
                object.__setattr__(submodule, REPLICA, replica)
    return replica


def entered(forward: Callable[..., Any], requires_grad: Callable[[Any], bool]) -> Callable[..., Any]:
    """Return the function that a call of a module runs in place of ``forward``.

    The outermost call, usually of the whole model, puts local parameters in all submodules. Calls inside it change
    nothing.

    Args:
        forward: the module's own forward.
        requires_grad: see `Platform.requires_grad`.
        requires_grad: see `Platform.requires_grad`.
    """

    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        replica: Replica = module.__dict__[REPLICA] or replica_of(module)
        state = replica.state
        if not state.running:
            return replica.part(module).run(forward, args, kwargs)
        if state.call is not None and not requires_grad(state.token):
            # Perhaps backward recomputes this: until then no bucket is complete.
            state.call.deferred = True
        return forward(module, *args, **kwargs)

    return run


def _left(x: Any) -> Any:
    """Return an object that may hold unknown tensors as it is: backward comes to the root through parameters."""
    return x


def _nothing() -> None:
    """Return None. An unpickled module has this function in place of its replica."""
