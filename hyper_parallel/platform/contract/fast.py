"""Verbs that only improve speed: `Platform.fast`, an optional object of a backend. Results are the same without it.

Every method may decline (return None or False), as the defaults of `Fast` do. Core then takes the general path. With
the environment variable ``HYPER_PARALLEL_FAST=0`` no platform has such an object.
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
    """Collective for `Fast.linear_with_collective`.

    Attributes:
        collective: ``"all_reduce"``: the sum over the ranks of ``x @ weight.T``, whose cotangent is the same on all
            ranks. ``"reduce_scatter"``: this rank's chunk of that sum along ``dim``. ``"all_gather"``: ``x`` of all
            ranks, concatenated along ``dim``, times ``weight.T``; backward reduce-scatters the gradient of ``x``.
        group: group of ranks.
        size: number of ranks.
        dim: a dimension of ``x``, not the last; ignored for ``"all_reduce"``.
        record: called with the name and the operand of each collective, right before it, in backward too.
        chunks: maximal number of chunks, if it is more than one; fewer where it does not divide. A native operation
            fuses both where `Fast.fuses_linear` is set.
    """

    collective: str
    group: Group
    size: int
    dim: int
    record: Callable[[str, Tensor], None]
    chunks: int = 1


class Rows(ABC):
    """Staging buffer for an all-gather: the result of `Fast.gathered_rows`."""

    @abstractmethod
    def take(self) -> Tensor:
        """Return the concatenated rows as a 1-D tensor that occupies its entire storage, with undefined values. Each
        call returns the same tensor. Its memory lasts until `unpack` or `free`."""

    @abstractmethod
    def unpack(self) -> None:
        """Copy the rows into the tensor's storage, which is allocated again as in `Platform.refill_storage`."""

    @abstractmethod
    def free(self) -> None:
        """Free the memory of the rows."""


class Fast:
    """Faster paths, all optional: a backend overrides the methods that it can speed up."""

    #: Whether `linear_with_collective` is also asked for fused native operations outside `overlap_collectives`.
    fuses_linear: bool = False

    #: Whether backward runs ready nodes of a device in reverse order of recording.
    backward_in_order: bool = False

    def is_plain_linear(self, module: Module) -> bool:
        """Return whether a call of ``module`` computes exactly `linear` of its input, weight and bias. The module must
        be of the framework's own class, not a subclass, and without an activation. Where a backend answers False, its
        linear layers are dispatched."""
        return False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias`` of plain local tensors. Differentiable. Called only after `is_plain_linear`
        answered True."""
        raise TypeError(f"{type(self).__name__} does not implement plain linear layers")

    def norm_call(self, module: Module) -> Callable[[Module, Tensor, Mapping[str, Tensor | None]], Tensor] | None:
        """Return ``call(module, x, parameters)``, the forward of the framework's own norm class with other parameters.
        None where this call is no cheaper than calling the module."""
        return None

    def linear_with_collective(self, x: Tensor, weight: Tensor, how: LinearCollective) -> Tensor | None:
        """Compute `linear` without bias, overlapped with a collective. Differentiable in ``x`` and ``weight``. Returns
        None, without side effects, where the backend cannot overlap the two for these operands. All ranks must get the
        same answer, so core asks only where their operands have the same shapes."""
        return None

    def autograd_step(
        self, forward: Callable[[Any, Tensor], Tensor], backward: TensorFunction
    ) -> TensorFunction | None:
        """Return a function of autograd, ``apply(x)``, for frequent calls. The calls save nothing for backward.

        ``forward(ctx, x)`` ignores ``ctx`` and returns a new tensor, no view. ``apply`` is called with interception
        off.
        """
        return None

    def autograd_pair(
        self, forward: Callable[[Any, Tensor], tuple[Tensor, Tensor]], backward: Callable[[Any, Any], Tensor]
    ) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
        """Return a function as `autograd_step` does, with two results and an ``x`` that requires a gradient.
        ``backward(first, second)`` gets None for the cotangent of an unused result. None in a framework that does not
        report unused results."""
        return None

    def linear_view(
        self,
        convert: TensorFunction,
        record: TensorFunction,
        key: Any,
        otherwise: TensorFunction,
    ) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Return ``view(x, weight)``, which gives the data of ``x`` for ``linear(view, weight, bias)`` alone. The
        view's cotangent reaches ``x`` as ``convert(cotangent)``, which may overwrite it. For gradients of gradients,
        ``record(cotangent)`` reaches ``x`` instead, which is differentiable. The view is ``x`` itself if ``x`` requires
        no gradient. The view is cached under ``key``, and valid under the conditions of `read_cache`.

        A framework overrides this if it has something cheaper than `Platform.autograd_function`. The view has the shape
        of ``x``, or is 2-D with the leading dimensions flattened. The operation must save the view until its backward;
        where the operation would save nothing, ``otherwise(x)`` replaces the view. Called with interception off.
        """
        return None

    def in_place_step(self, write: TensorFunction, record: TensorFunction) -> TensorFunction | None:
        """Return ``apply(y)``, which writes into ``y`` the values that ``write(data)`` returns outside autograd.
        ``write`` may overwrite its argument. The cotangent passes unchanged; for gradients of gradients it is
        ``record(cotangent)``.

        ``y`` must be new, and the backward of its operation must not need its value. The graph gets no node. None where
        a framework has no hooks for that. Called with interception off.
        """
        return None

    def can_delay_gradient(self, *parameters: Tensor) -> bool:
        """Return whether the caller may return no cotangents of ``parameters``, and call `add_to_gradients` later
        instead. True only if the cotangents contribute to nothing but accumulated gradients. Called inside the backward
        of a function of the parameters. A framework that returns gradients, instead of accumulating them, answers
        False.
        """
        return False

    def add_to_gradients(self, parameters: Sequence[Tensor], cotangents: Sequence[Tensor | None]) -> None:
        """Accumulate a plain tensor into the gradient of each parameter, or make it the gradient. No other code writes
        to these tensors; None adds nothing. Called after `can_delay_gradient` answered True, with interception off."""
        raise TypeError(f"{type(self).__name__} does not accumulate gradients in parameters (`.grad`)")

    def tell_gradient(self, x: Tensor, call: Callable[[], None]) -> Tensor:
        """Return ``x`` as another tensor, which can replace it in every use, including writes. Backward calls ``call``
        when the cotangent of that tensor is complete. A framework that cannot do this cheaply returns ``x`` and never
        calls ``call``. Called with interception off."""
        return x

    def move_to_one_storage(self, xs: Sequence[Tensor], lengths: Sequence[int]) -> Tensor | None:
        """Move the data of the parameters ``xs`` into a new 1-D tensor, one after the other, and return that tensor.
        ``xs[i]`` takes ``lengths[i]`` elements: its own, then zeros. Tensors that aliased a parameter before keep its
        old memory. So core asks only where no such tensors exist. Returns None where the data cannot be moved. Called
        with interception off."""
        return None

    def in_one_storage(self, xs: Sequence[Tensor], lengths: Sequence[int], flat: Tensor | None) -> Tensor | None:
        """Return the 1-D tensor that holds the data of the parameters ``xs`` as `move_to_one_storage` arranges them.
        Returns ``flat`` itself if ``flat`` holds the data, and None for any other arrangement. Nothing is moved. Called
        with interception off."""
        return None

    def pack_rows(self, xs: Sequence[Tensor], size: int) -> Tensor | None:
        """Pack ``xs`` into a (``size``, n) tensor: row i concatenates chunk i of each tensor. Each tensor is padded
        with zeros where needed, and split along dimension 0 into ``size`` equal chunks. None where this is no faster
        than splitting and joining."""
        return None

    def cut(self, shapes: Sequence[tuple[int, ...]]) -> Callable[[Tensor], list[Tensor]] | None:
        """Return ``cut(x)``, which splits a 1-D ``x`` into consecutive tensors of these shapes. ``x`` occupies its
        entire storage and may have more elements. None where `Platform.part` is as fast."""
        return None

    def gathered_rows(self, whole: Tensor, count: int, lengths: Sequence[int]) -> Rows | None:
        """Return a staging buffer of ``count`` rows, to gather into and to fill the 1-D tensor ``whole`` from. Filling
        copies the first ``lengths[0]`` elements of each row, then the next ``lengths[1]`` of each, and so on. The
        storage of ``whole`` is freed and refilled."""
        return None

    def run_soon(self, x: Tensor) -> None:
        """Let backward run the function that returned ``x`` as soon as it can, before other functions that are ready.
        In the function's backward, data parallelism starts the communication of gradients. Called with interception
        off."""
        return


#: Default for a platform without `Platform.fast`.
NOTHING_FASTER = Fast()
