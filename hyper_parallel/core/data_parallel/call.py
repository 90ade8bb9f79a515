"""One call of a unit of data parallelism, and the backward passes that reach calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from hyper_parallel.platform.contract import NOTHING_FASTER, Platform

if TYPE_CHECKING:
    from hyper_parallel.core.data_parallel.model import Model
    from hyper_parallel.core.data_parallel.unit_parameters import UnitParameters

__all__ = ["BackwardPass", "Call", "Leaves", "ModuleGroup", "RecordedCall", "chosen", "writes_to"]

_WRITES = attrgetter("_version", "_writes")


class RecordedCall:
    """A call of a unit, to which the autograd functions of its results refer. It lives as long as its autograd graph.

    Attributes:
        anchors: tensors that backward reaches from any result, one for each buffer. They are set only while the forward
            runs.
        returns: weak references to the autograd contexts of the functions that return the call's results.
        again: whether one of the call's backwards was recorded. Another backward may then need the unsharded parameters
            before it reaches the results.
        marks: weak references to the autograd contexts of functions that cotangents have passed. They passed them where
            they entered recorded backwards of the call.
    """

    def __init__(self) -> None:
        self.anchors: Sequence[Any] = ()
        self.returns: list[Any] = []
        self.again = False
        self.marks: list[Any] = []

    def anchors_as(self, dtype: Any) -> Sequence[Any]:
        """Return `anchors` for results of ``dtype``. They are converted if that costs nothing."""
        return self.anchors


class Call(RecordedCall):
    """One call of a unit of `fully_shard`. With several ranks, `anchors` contains one unsharded parameter of each
    buffer.

    Attributes:
        parameters: the shards.
        trained: for each buffer, the indices of its trained parameters.
        recorded: whether a backward may follow.
        within: the units whose forwards contain this call.
        unsummed: summands of gradients that tensor-parallel ranks must still add up; set by `DTensor._collect`.
        one_loss: whether the batch of the call is distributed. Forwards of other batches may run before its backward.
        freed: whether its unsharded parameters were freed when it ended.
        gives: weak references to the autograd contexts of the functions that return the unsharded parameters.
        reached: number of the last backward pass that unsharded the parameters for this call.
    """

    def __init__(
        self, parameters: list[Any], trained: list[list[int]], recorded: bool, within: tuple, one_loss: bool
    ) -> None:
        super().__init__()
        self.parameters, self.trained, self.recorded, self.within = parameters, trained, recorded, within
        self.one_loss = one_loss
        self.versions = writes_to(parameters)
        self.unsummed: list[Any] = []
        self.freed = False
        self.gives: list[Any] = []
        self.reached = 0

    def runs_in_order(self, platform: Platform) -> bool:
        """Return whether all modules that read the parameters have run in backward once the cotangents are complete."""
        all_trained = sum(map(len, self.trained)) == len(self.parameters)
        return all_trained and (platform.fast or NOTHING_FASTER).backward_in_order

    def comes_around(self, runs: Callable[[Any], bool], again: bool) -> bool:
        """Return whether a backward pass may read the parameters before it reaches the results of the call, or without
        them.

        After a recorded backward, a pass may also start at cotangents of that backward. It may end at inputs alone,
        which no function of the call notices.

        Args:
            runs: returns whether the pass runs the function of an autograd context; see `Platform.before_backward`.
            again: whether the graph of the pass contains recorded backwards of the model; see `is_in`.
        """
        # A usual backward reaches the results, and the first check alone decides.
        comes, goes = _any(self.returns, runs), _any(self.gives, runs)
        if self.again:
            return comes or goes or (again and writes_to(self.parameters) == self.versions)
        return not comes and goes

    def is_in(self, leads: Callable[[Any], bool]) -> bool:
        """Return whether the graph of a backward pass contains functions of the call. Only the graph decides, and ranks
        have the same graph. The lifetime of the call must not matter: a rank may keep an old graph longer than others.

        Args:
            leads: returns whether the graph contains the function of an autograd context; see
                `Platform.before_backward`.
        """
        return any(_any(contexts, leads) for contexts in (self.returns, self.gives, self.marks))

    def check_whole(self, what: str) -> None:
        """Raise RuntimeError if unsharded parameters were freed or written to, in a backward that bypassed the results.

        Backward has read the freed parameters by then, and its gradients are wrong.
        """
        self.check_unchanged(what)
        if self.freed:
            raise RuntimeError(
                f"{what}: a backward reached its parameters without passing through its outputs, so the parameters "
                "were not gathered again. Gradients are wrong. Return every tensor that the loss needs, such as an "
                "auxiliary loss, from the module. Or keep the parameters unsharded with "
                "fully_shard(reshard_after_forward=False)"
            )

    def check_unchanged(self, what: str) -> None:
        """Raise RuntimeError if a parameter was written to after forward, as frameworks do for saved tensors.

        Otherwise backward would read other values than forward.
        """
        if writes_to(self.parameters) != self.versions:
            raise RuntimeError(
                f"{what}: a parameter was changed in place between a forward and its backward: run backward before "
                "the optimizer's step, or repeat the forward"
            )


class ModuleGroup:
    """The modules of one unit, and a record of which have run since the parameters were gathered.

    Args:
        count: number of modules. With one module, no call is shared.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._ran: set[int] = set()
        self._call: Call | None = None
        self._wholes: Sequence[Any] = ()
        self._asked = False

    @property
    def is_over(self) -> bool:
        """Return whether all modules of the unit have run in this call, or no call is shared."""
        return self._call is None or len(self._ran) == self._count

    def call_of(self, module: Any, new: Call, asked: bool, again: bool) -> tuple[Call, Sequence[Any]] | None:
        """Return the running call to which ``module`` belongs, and the unsharded parameters of this call. Return None
        if a new call starts.

        Args:
            module: a module of the unit, which starts to run.
            new: the call that would start.
            asked: whether gradients of parameters are required.
            again: whether the module is computed again in backward.
        """
        if self._call is None or again or asked is not self._asked or id(module) in self._ran:
            return None
        if self._call.versions != new.versions:  # the program wrote to a parameter since the last module
            return None
        self._ran.add(id(module))
        return self._call, self._wholes

    def begin(self, module: Any, call: Call, wholes: Sequence[Any], asked: bool, again: bool) -> None:
        """Start a call, in which ``module`` is the first to run."""
        if self._count > 1 and not again:
            self._ran, self._call, self._wholes, self._asked = {id(module)}, call, wholes, asked

    def end(self) -> Call | None:
        """End and return the call that the modules of the unit share; None for a unit of one module."""
        call, self._call, self._wholes = self._call, None, ()
        self._ran = set()
        return call


class BackwardPass:
    """One backward pass over a model, and the units that are unsharded in it.

    Attributes:
        number: number of the pass among the passes of the model, from 1.
        one_loss: `Call.one_loss` of the call that was reached last; None before the first one.
    """

    def __init__(self, model: Model, number: int) -> None:
        self._model, self.number = model, number
        self.one_loss: bool | None = None
        self._open: list[UnitParameters] = []
        self._held: list[UnitParameters] = []  # unsharded until the pass is over
        self._kinds: dict[UnitParameters, bool] = {}  # `Call.one_loss` of the calls for which units were unsharded

    def reached(self, unit: UnitParameters, call: Call) -> None:
        """Unshard ``unit``, because the cotangents of its results have arrived.

        The unit stays open until the pass reaches a unit whose forward did not run inside the forward of ``unit``.
        """
        call.reached, self.one_loss = self.number, call.one_loss
        if unit in self._open or unit in self._held:
            return
        for other in reversed(self._open):
            if other not in call.within:
                self._open.remove(other)
                self._close(other)
        self._open.append(unit)
        # Free the sent rows of the previous unit, if they are reduced, to make memory for new gradients.
        if self._model.pending:
            self._model.pending[-1][0].let_go()
        self._open_for(unit, call)
        self._model.prefetch_before(unit, self._open)

    def hold(self, unit: UnitParameters, call: Call) -> None:
        """Unshard ``unit`` until the backward pass ends."""
        call.check_unchanged(unit.what)
        call.reached, self.one_loss = self.number, call.one_loss
        if unit not in self._held:
            self._held.append(unit)
            self._open_for(unit, call)

    def _open_for(self, unit: UnitParameters, call: Call) -> None:
        self._kinds[unit] = call.one_loss
        unit.open(call, call.one_loss)

    def _close(self, unit: UnitParameters) -> None:
        self._model.close(unit, self._kinds[unit])

    def left(self, unit: UnitParameters) -> None:
        """End the backward of ``unit``, if the unit was called only once."""
        if self._open and self._open[-1] is unit and self._model.ran_once(unit):
            self._close(self._open.pop())

    def close(self) -> None:
        """End the pass, and the backward of all units that are still open."""
        for units in (self._open, self._held):
            while units:
                self._close(units.pop())

    def abandon(self) -> None:
        """Discard the state of a failed pass."""
        for units in (self._open, self._held):
            while units:
                units.pop().abandon()


class Leaves:
    """Unsharded parameters as new leaves of autograd, which modules read when backward recomputes a forward.

    Args:
        xs: new tensors, one for each parameter.
        trained: for each buffer of the unit, the indices of trained parameters.
    """

    def __init__(self, xs: Sequence[Any], trained: Sequence[Sequence[int]]) -> None:
        self.xs, self.trained = xs, trained
        self._indices = [i for indices in trained for i in indices]
        for i in self._indices:
            xs[i].requires_grad_()

    def add(self, indices: Sequence[int], cotangents: Sequence[Any]) -> list[Any]:
        """Return sums of cotangents and the leaves' gradients, and clear those gradients. An entry is None if both are
        missing."""
        found = []
        for leaf, g in zip(chosen(self.xs, indices), cotangents, strict=True):
            found.append(leaf.grad if g is None else g if leaf.grad is None else g + leaf.grad)
            leaf.grad = None
        return found

    def clear(self) -> None:
        """Discard the gradients of the leaves."""
        for i in self._indices:
            self.xs[i].grad = None


def _any(contexts: Sequence[Any], runs: Callable[[Any], bool]) -> bool:
    return any(ctx is not None and runs(ctx) for ctx in (ref() for ref in contexts))


def chosen(xs: Sequence[Any], indices: Sequence[int]) -> Sequence[Any]:
    """Return ``xs[i]`` for each of the ascending ``indices``, or ``xs`` itself if these are all indices."""
    return xs if len(indices) == len(xs) else [xs[i] for i in indices]


def writes_to(shards: Sequence[Any]) -> list[tuple[int, int]]:
    """Return two numbers of writes to each shard: the count of the framework, and the count of the DTensor.

    The DTensor also counts writes to other tensors of its memory, such as ``p.data.mul_()``. New memory counts too, as
    in ``p.data = x``.
    """
    return list(map(_WRITES, shards))
