"""One call of a unit of data parallelism, and its state that several modules of the unit share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

__all__ = ["Call", "Leaves", "ModuleGroup", "RecordedCall", "chosen", "versions_of"]

_VERSION = attrgetter("_version")


class RecordedCall:
    """A call of a unit, to which the autograd functions of its results refer. It lives as long as its autograd graph.

    Attributes:
        anchors: tensors that backward reaches from any result, one for each buffer. They are set only while the forward
            runs.
        returns: weak references to the autograd contexts of the functions that return the call's results.
        again: whether one of the call's backwards was recorded. Another backward may then need the unsharded parameters
            before it reaches the results.
    """

    def __init__(self) -> None:
        self.anchors: Sequence[Any] = ()
        self.returns: list[Any] = []
        self.again = False

    def anchors_as(self, dtype: Any) -> Sequence[Any]:
        """Return `anchors` for results of ``dtype``. They are converted if that costs nothing."""
        return self.anchors


class Call(RecordedCall):
    """One call of a unit of `fully_shard`. With several ranks, `anchors` are unsharded parameters, one of each buffer.

    Attributes:
        parameters: the shards.
        trained: for each buffer, the indices of its trained parameters.
        recorded: whether a backward may follow.
        within: the units whose forwards contain this call.
        unsummed: summands of gradients that tensor-parallel ranks must still add up; set by `DTensor._collect`.
        freed: whether its unsharded parameters were freed when it ended.
        gives: weak references to the autograd contexts of the functions that return the unsharded parameters.
        reached: number of the last backward pass that unsharded the parameters for this call.
    """

    def __init__(self, parameters: list[Any], trained: list[list[int]], recorded: bool, within: tuple) -> None:
        super().__init__()
        self.parameters, self.trained, self.recorded, self.within = parameters, trained, recorded, within
        self.versions = versions_of(parameters)
        self.unsummed: list[Any] = []
        self.freed = False
        self.gives: list[Any] = []
        self.reached = 0

    def comes_around(self, runs: Callable[[Any], bool]) -> bool:
        """Return whether a backward pass reaches the parameters, but bypasses the results.

        Args:
            runs: returns whether the pass runs the function of an autograd context; see `Platform.before_backward`.
        """
        # A usual backward reaches the results, and the first check alone decides.
        return not _any(self.returns, runs) and _any(self.gives, runs)

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
        if versions_of(self.parameters) != self.versions:
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

    def call_of(self, module: Any, asked: bool, again: bool) -> tuple[Call, Sequence[Any]] | None:
        """Return the running call that ``module`` joins, and its unsharded parameters; None if a new call starts.

        Args:
            module: a module of the unit, which starts to run.
            asked: whether gradients of parameters are required.
            again: whether the module is computed again in backward.
        """
        if self._call is None or again or asked is not self._asked or id(module) in self._ran:
            return None
        self._ran.add(id(module))
        return self._call, self._wholes

    def begin(self, module: Any, call: Call, wholes: Sequence[Any], asked: bool, again: bool) -> None:
        """Start a call, in which ``module`` is the first to run."""
        if self._count > 1 and not again:
            self._ran, self._call, self._wholes, self._asked = {id(module)}, call, wholes, asked

    def end(self) -> Call | None:
        """End the shared call, and return it; None for a unit of one module."""
        call, self._call, self._wholes = self._call, None, ()
        self._ran = set()
        return call


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


def versions_of(parameters: Sequence[Any]) -> list[int]:
    """Return how often each parameter has been written to."""
    return list(map(_VERSION, parameters))
