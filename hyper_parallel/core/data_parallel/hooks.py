"""Autograd functions around inputs and results of a module: hooks that start and check its backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.data_parallel.batches import placed_across
from hyper_parallel.core.data_parallel.call import Call, RecordedCall
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.trees import map_tensors
from hyper_parallel.platform.contract import NOTHING_FASTER, Platform
from hyper_parallel.platform.contract.autograd import named

__all__ = ["REPLICATED_FUNCTIONS", "Inputs", "Results", "cast", "refuse_compiling", "refuse_second_order"]


def cast(tree: Any, dtype: Any, platform: Any) -> Any:
    """Return ``tree`` with its floating point tensors converted to ``dtype``."""

    def convert(x: Any) -> Any:
        return platform.to_dtype(x, dtype) if platform.is_floating_point(x) and x.dtype != dtype else x

    return map_tensors(tree, convert, platform, lambda x: x)


def _through(platform: Any, function: Callable[..., Sequence[Any]], call: Any, xs: Sequence[Any]) -> dict[int, Any]:
    """Apply `Platform.joint_function` to the tensors, and return its results by the ids of its operands.

    Args:
        platform: platform of the tensors.
        function: takes ``call`` and operands, and returns a result of the same shape for each. Operands of one dtype
            share one autograd node, which backward reaches from any of its results.
        call: call of the module.
        xs: plain tensors and DTensors.
    """
    new: dict[int, Any] = {}
    with platform.no_dispatch():
        for same in _by_dtype(xs):
            for x, y in zip(same, function(call, *same), strict=True):
                layout = getattr(x, "_layout", None)
                new[id(x)] = y if layout is None else platform.wrap(y, layout)
    return new


def _by_dtype(xs: Sequence[Any]) -> list[list[Any]]:
    """Return lists of tensors, one list for each dtype, without duplicates."""
    lists: dict[Any, dict[int, Any]] = {}
    for x in xs:
        lists.setdefault(x.dtype, {})[id(x)] = x
    return [list(same.values()) for same in lists.values()]


class Inputs:
    """Autograd functions of the inputs of one unit. Backward reaches the inputs after the modules of the unit.

    On a platform that does not report when backward begins, each call is checked when backward reaches its inputs. The
    cotangents of parameters cannot start this check, because frozen parameters have none. On other platforms, the
    arrival of the input's cotangent shows that backward has finished reading frozen parameters.

    Args:
        platform: platform of the tensors.
        check: function that checks a call.
        told: function that is called without arguments when the cotangent of the input has arrived.
    """

    def __init__(self, platform: Platform, check: Callable[[Call], None], told: Callable[[], None]) -> None:
        self._platform, self._check, self._told = platform, check, told
        self._function = platform.joint_function(named("FullyShardInput", self._forward), self._backward)

    def arguments(
        self, args: tuple, kwargs: dict, inputs: Sequence[Any], call: Call, tells: bool
    ) -> tuple[tuple, dict]:
        """Return the arguments for a recorded call of the module.

        Args:
            args, kwargs: the arguments of the unit's call.
            inputs: the tensors among them.
            call: the call of the unit.
            tells: whether to call ``told``.
        """
        platform = self._platform
        if platform.tells_beginning:
            return self._watched(args, kwargs, inputs) if tells else (args, kwargs)
        new = _through(platform, self._function, call, [x for x in inputs if platform.requires_grad(x)])
        found: tuple[tuple, dict] = map_tensors((args, kwargs), lambda x: new.get(id(x), x), platform, lambda x: x)
        return found

    def _watched(self, args: tuple, kwargs: dict, inputs: Sequence[Any]) -> tuple[tuple, dict]:
        """Return arguments that let backward call ``told`` when the cotangent of the input has arrived.

        If not exactly one input requires gradients, or this input is a DTensor, return the arguments unchanged.
        """
        platform = self._platform
        found = [x for x in inputs if platform.requires_grad(x)]
        if len(found) != 1 or getattr(found[0], "_layout", None) is not None:
            return args, kwargs
        with platform.no_dispatch():
            view = (platform.fast or NOTHING_FASTER).tell_gradient(found[0], self._told)
        if args and args[0] is found[0]:
            return (view, *args[1:]), kwargs
        changed: tuple[tuple, dict] = map_tensors(
            (args, kwargs), lambda x: view if x is found[0] else x, platform, lambda x: x
        )
        return changed

    def _forward(self, ctx: Any, call: Call, *xs: Any) -> Sequence[Any]:
        ctx.call = call
        return [self._platform.detach(x) for x in xs]

    def _backward(self, ctx: Any, *cotangents: Any) -> Sequence[Any]:
        self._check(ctx.call)
        return cotangents


class Results:
    """The results of the calls of one unit.

    Args:
        mesh: data-parallel mesh.
        what: name of the unit in messages.
        applied: name of the function that created the unit.
        reached: function that is called as ``reached(call)`` when the cotangent of a result has arrived.
        freed: function that returns whether a plain tensor is stored in memory that will be freed. None for a unit that
            frees nothing. Such a unit does not rely on its results alone to notice a backward.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        what: str,
        applied: str,
        reached: Callable[[Any], None],
        freed: Callable[[Any], bool] | None = None,
    ) -> None:
        self._mesh, self._platform, self._what, self._applied = mesh, mesh.platform, what, applied
        self._reached, self._freed = reached, freed
        self._identity = self._platform.joint_function(named("DataParallelOutput", self._forward), self._backward)
        self._mark = self._platform.joint_function(
            named("DataParallelAgain", self._mark_forward), lambda ctx, *cotangents: cotangents
        )

    def opening(self, output: Any, call: RecordedCall, one_loss: bool) -> Any:
        """Return ``output`` such that its cotangents unshard the parameters before backward enters the module.

        Args:
            output: result of the module.
            call: the call of the unit.
            one_loss: whether the batch is distributed.
        """
        platform = self._platform
        if type(output) is platform.Tensor:
            # Most modules return one tensor, which needs no search.
            with platform.no_dispatch():
                if self._freed is None or not self._freed(output):
                    leads = platform.requires_grad(output) or self._may_lead(output, call)
                    return self._led(call, output)[0] if leads else output
        found: list[Any] = []
        others: list[Any] = []

        def collect(x: Any) -> Any:
            if placed_across(x, self._mesh) and not one_loss:
                raise ValueError(
                    f"{self._what} returns a DTensor of shape {tuple(x.shape)} placed {list(x.placements)}, but was "
                    "called with plain tensors: return plain tensors, this rank's shard of the batch, such as "
                    "x.to_local()"
                )
            with platform.no_dispatch():
                if self._freed is not None and self._freed(x):
                    layout = getattr(x, "_layout", None)
                    x = platform.clone(x)
                    x = x if layout is None else platform.wrap(x, layout)
                if platform.requires_grad(x):
                    found.append(x)
                elif self._may_lead(x, call):
                    others.append(x)
            return x

        output = map_tensors(output, collect, platform, self._unknown)
        new = _through(platform, self._led, call, found or others)
        return map_tensors(output, lambda x: new.get(id(x), x), platform, self._unknown)

    def _unknown(self, x: Any) -> Any:
        """Return ``x``, a result in which tensors may be hidden, such as a cache.

        The backward of hidden tensors bypasses the results.

        Raises:
            TypeError: on a platform that does not report when backward begins.
        """
        if self._platform.tells_beginning or self._freed is None:
            return x
        raise TypeError(
            f"{self._what} returns a {type(x).__name__}: return tensors, or tuples, lists, dicts and dataclasses of "
            "tensors"
        )

    def _may_lead(self, x: Any, call: RecordedCall) -> bool:
        """Return whether to connect this result to `RecordedCall.anchors` in the graph, even if this rank used only
        frozen parameters."""
        return self._freed is not None and bool(call.anchors) and self._platform.is_floating_point(x)

    def _led(self, call: RecordedCall, *xs: Any) -> Sequence[Any]:
        """Return results from which backward also reaches one parameter of each buffer.

        This rank may use no parameter of a buffer, while other ranks wait for this rank to reduce their gradients.
        """
        return self._identity((call, len(call.anchors)), *call.anchors_as(xs[0].dtype), *xs)

    def _forward(self, ctx: Any, static: tuple[Call, int], *xs: Any) -> Sequence[Any]:
        ctx.call, ctx.anchors = static
        ctx.call.returns.append(weakref.ref(ctx))
        return xs[ctx.anchors :]

    def _mark_forward(self, ctx: Any, call: RecordedCall, *cotangents: Any) -> Sequence[Any]:
        ctx.call = call
        call.marks.append(weakref.ref(ctx))
        return cotangents

    def _backward(self, ctx: Any, *cotangents: Any) -> Sequence[Any]:
        recorded = self._platform.backward_is_recorded()
        if recorded and not self._platform.tells_beginning:
            refuse_second_order(self._platform, self._applied)
        if recorded:
            ctx.call.again = True
            present = [g for g in cotangents if g is not None]
            marked = iter(self._mark(ctx.call, *present))
            cotangents = tuple(None if g is None else next(marked) for g in cotangents)
        self._reached(ctx.call)
        return [*[None] * ctx.anchors, *cotangents]


def refuse_second_order(platform: Platform, what: str) -> None:
    """Raise RuntimeError if the running backward is recorded. All ranks raise it, whichever parameters they have used.

    Args:
        platform: platform of the module.
        what: name of the function that was applied to the module.
    """
    if platform.backward_is_recorded():
        passes = "in a backward with create_graph, compute gradients with respect to inputs alone"
        raise RuntimeError(
            f"second-order gradients through {what} are not supported: "
            f"{passes if platform.tells_beginning else 'leave them out'}, or do not apply {what} to modules with "
            "second-order gradients"
        )


def refuse_compiling(platform: Platform, what: str) -> None:
    """Raise RuntimeError if a compiler traces a call of a unit. ``what`` is the name of the unit."""
    if platform.is_compiling():
        raise RuntimeError(f"{what} is being compiled, which is not supported: compile the modules inside of it")


def _give(ctx: Any, static: tuple[Any, Sequence[int], Any], *parameters: Any) -> Sequence[Any]:
    ctx.call, ctx.members, ctx.zero = static
    ctx.count = len(parameters)
    return [ctx.zero]


def _give_backward(ctx: Any, cotangent: Any) -> Sequence[Any]:
    found = ctx.call.take(ctx.members)
    return [ctx.zero] * (ctx.count - len(found)) + found


def _read(ctx: Any, static: tuple[Any, int, Sequence[Any]], token: Any) -> Sequence[Any]:
    ctx.call, ctx.bucket, parameters = static
    ctx.zero = ctx.call.known.mesh.platform.detach(token)
    return parameters


def _read_backward(ctx: Any, *cotangents: Any) -> Sequence[Any]:
    ctx.call.collect(ctx.bucket, cotangents)
    return [ctx.zero]


#: Platform -> (give, read), for a call of a `ReplicatedUnit`. ``give((call, members, zero), *parameters)`` is the root
#: for one dtype, and returns a token. A root for another dtype takes that token as a further operand.
#: ``read((call, number of the bucket, its parameters), token)`` returns plain tensors with the data of the parameters.
REPLICATED_FUNCTIONS: Table = Table(
    lambda platform: (
        platform.joint_function(named("ReplicateGive", _give), _give_backward),
        platform.joint_function(named("ReplicateRead", _read), _read_backward),
    ),
    1 << 4,
    "functions of replicate",
)
