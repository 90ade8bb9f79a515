"""Verbs that only make things faster: `Platform.fast`, an object that a backend may have. Without it, results are the
same.

Every method may answer "no" (None or False), as those of `Fast` itself do. Core takes the general way then. With the
environment variable ``HYPER_PARALLEL_FAST=0`` no platform has such an object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.platform.contract.autograd import TensorFunction

__all__ = ["NOTHING_FASTER", "Fast", "LinearCollective", "Rows"]

Tensor = Any
Module = Any
Group = Any


@dataclass(frozen=True)
class LinearCollective:
    """Collective that `Fast.linear_with_collective` is to do.

    Attributes:
        collective: ``"all_reduce"``: the sum over the ranks of ``x @ weight.T``, whose cotangent is the same on all of
            them. ``"reduce_scatter"``: this rank's part of that sum along ``dim``. ``"all_gather"``: ``x`` of all
            ranks, one after the other along ``dim``, times ``weight.T``; backward sums the gradient of ``x`` over the
            ranks and gives each its part.
        group: of ranks.
        size: how many they are.
        dim: a dimension of ``x``, not the last; of no meaning to ``"all_reduce"``.
        record: is called with the name and the operand of each collective, in backward too, right before it.
        chunks: into how many both are cut if that is more than one, fewer where that number does not divide; a native
            operation does both where `Fast.fuses_linear` is set.
    """

    collective: str
    group: Group
    size: int
    dim: int
    record: Callable[[str, Tensor], None]
    chunks: int = 1


class Rows(ABC):
    """Result of `Fast.gathered_rows`."""

    @abstractmethod
    def take(self) -> Tensor:
        """The rows one after the other, as a 1-D tensor that is all of its storage, with any values. It is the same
        each time, and has memory until `unpack` or `free`."""

    @abstractmethod
    def unpack(self) -> None:
        """Refill the storage of the tensor, as `Platform.refill_storage` does, with the values of the rows."""

    @abstractmethod
    def free(self) -> None:
        """Give the memory of the rows back."""


class Fast:
    """Short ways, all optional: a backend overrides those that it has."""

    #: Whether `linear_with_collective` is asked for native operations outside `overlap_collectives` too.
    fuses_linear: bool = False

    #: Whether backward, of all nodes that it could run next on a device, runs the one recorded last.
    backward_in_order: bool = False

    def is_plain_linear(self, module: Module) -> bool:
        """Return whether a call of ``module`` is `linear` of its input, its weight and its bias and nothing else: of
        the framework's own class, not of one derived from it, and without an activation. A backend that answers False
        has its linear layers dispatched.
        """
        return False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ weight.T + bias`` on plain local tensors. Differentiable. Asked for after `is_plain_linear` said
        yes."""
        raise TypeError(f"{type(self).__name__} has no plain linear layers")

    def norm_call(self, module: Module) -> Callable[[Module, Tensor, Mapping[str, Tensor | None]], Tensor] | None:
        """``call(module, x, parameters)``: the forward of a norm of the framework's own class with other parameters.
        None where that costs no less than calling the module."""
        return None

    def linear_with_collective(self, x: Tensor, weight: Tensor, how: LinearCollective) -> Tensor | None:
        """`linear` without bias, overlapped with a collective. Differentiable in ``x`` and ``weight``. Returns None,
        having done nothing, where the backend cannot overlap the two for these operands. All ranks must get the same
        answer, so core asks only where their operands have the same shapes."""
        return None

    def autograd_step(
        self, forward: Callable[[Any, Tensor], Tensor], backward: TensorFunction
    ) -> TensorFunction | None:
        """`Platform.autograd_function` as ``apply(x)``, for frequent calls that keep nothing for backward.

        ``forward(ctx, x)`` has no use for ``ctx`` and returns a new tensor, no view. ``apply`` is called with
        interception off.
        """
        return None

    def autograd_pair(
        self, forward: Callable[[Any, Tensor], tuple[Tensor, Tensor]], backward: Callable[[Any, Any], Tensor]
    ) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
        """As `autograd_step`, with two results, of an ``x`` that requires a gradient. ``backward(first, second)`` gets
        None for the cotangent of a result that nothing was computed from. None where a framework cannot tell."""
        return None

    def linear_view(
        self,
        convert: TensorFunction,
        record: TensorFunction,
        key: Any,
        otherwise: TensorFunction,
    ) -> Callable[[Tensor, Tensor], Tensor] | None:
        """``view(x, weight)``: the data of ``x`` for ``linear(view, weight, bias)`` alone. Its cotangent reaches ``x``
        as ``convert(cotangent)``, which may overwrite it. Where gradients of gradients are asked for, it arrives as
        ``record(cotangent)``, which is differentiable. The view is ``x`` itself where that requires no gradient. It is
        the same each time under the conditions of `read_cache`; it is kept there under ``key``.

        A framework that has something cheaper for this than `Platform.autograd_function` brings it. The view has the
        shape of ``x``, or is 2-D: its leading dimensions as one. The operation must keep it until its backward; where
        it would not, ``otherwise(x)`` takes its place. Called with interception off.
        """
        return None

    def in_place_step(self, write: TensorFunction, record: TensorFunction) -> TensorFunction | None:
        """``apply(y)``: ``y`` with the values that ``write(data)`` returns outside autograd, which may overwrite the
        data. The cotangent is left as it is; where gradients of gradients are asked for it is ``record(cotangent)``.

        For a new ``y`` whose operation does not need its value in backward: it stands for the written tensor, without a
        node in the graph. None where a framework has no hooks for that. Called with interception off.
        """
        return None

    def can_delay_gradient(self, *parameters: Tensor) -> bool:
        """Asked inside the backward of a function of these: whether `add_to_gradients` after it is as good as returning
        the cotangents, because nothing but the accumulated gradients depends on them. A framework that returns
        gradients answers False."""
        return False

    def add_to_gradients(self, parameters: Sequence[Tensor], cotangents: Sequence[Tensor | None]) -> None:
        """Add a plain tensor to the gradient of each parameter, or make the tensor its gradient. No other code writes
        to the tensor; None adds nothing. Called after `can_delay_gradient` said yes, with interception off."""
        raise TypeError(f"{type(self).__name__} does not accumulate gradients in parameters")

    def tell_gradient(self, x: Tensor, call: Callable[[], None]) -> Tensor:
        """Return ``x`` as another tensor, which can replace it in every use, including writes. Backward calls ``call``
        when the cotangent of that tensor is there. A framework that has no cheap way returns ``x`` and never calls it.
        Called with interception off."""
        return x

    def move_to_one_storage(self, xs: Sequence[Tensor], lengths: Sequence[int]) -> Tensor | None:
        """Move the data of the parameters ``xs`` into a new 1-D tensor, one after the other, and return it. ``xs[i]``
        takes ``lengths[i]`` elements: its own, then zeros. Tensors that aliased a parameter before keep its old memory.
        So core asks only where there are none. Return None where the data cannot be moved. Called with interception
        off."""
        return None

    def in_one_storage(self, xs: Sequence[Tensor], lengths: Sequence[int], flat: Tensor | None) -> Tensor | None:
        """Find the 1-D tensor in which the data of the parameters ``xs`` lie as `move_to_one_storage` lays them:
        ``flat`` where that is the one. None where they lie elsewhere. Nothing is moved. Called with interception
        off."""
        return None

    def pack_rows(self, xs: Sequence[Tensor], size: int) -> Tensor | None:
        """Pack ``xs`` into a (``size``, n) tensor: row i has the i-th part of each, one after the other. Each tensor is
        cut along dimension 0 into ``size`` equal parts, after zeros were added where needed. None where this is no
        faster than cutting and joining."""
        return None

    def cut(self, shapes: Sequence[tuple[int, ...]]) -> Callable[[Tensor], list[Tensor]] | None:
        """``cut(x)``: tensors of these shapes, one after the other in a 1-D ``x``. ``x`` is all of its storage and may
        have more elements. None where `Platform.part` is as good."""
        return None

    def gathered_rows(self, whole: Tensor, count: int, lengths: Sequence[int]) -> Rows | None:
        """Rows to gather into and to fill the 1-D tensor ``whole`` from, whose storage is freed and refilled: the first
        ``lengths[0]`` elements of each of ``count`` rows, then the next ``lengths[1]`` of each, and so on."""
        return None

    def run_soon(self, x: Tensor) -> None:
        """Let backward run the function that gave ``x`` as soon as it can, before others that are ready.
        Data parallelism sends gradients there. Called with interception off."""
        return


#: For a platform without.
NOTHING_FASTER = Fast()
