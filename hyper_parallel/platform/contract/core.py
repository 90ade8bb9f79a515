"""Services that core hands to a backend when the DTensor class is made. A backend imports nothing of core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hyper_parallel.platform.contract.compiled import CompiledLosses
from hyper_parallel.platform.contract.dispatch import Dispatch

__all__ = ["Core"]

Tensor = Any
Layout = Any
Mesh = Any


class Core(CompiledLosses, Protocol):
    """Services of core for a backend.

    Everything but `dispatch` serves uses of tensors in a framework besides operations: clipping, gradients,
    hooks, copies, its own collectives. A backend whose framework has less of that needs less.
    """

    # ------------------------------------------------------------------------------------ operations
    @property
    def dispatch(self) -> Dispatch:
        """Runs native operations of which some argument is a DTensor."""

    def implicit_replication(self) -> AbstractContextManager[None]:
        """Inside, a plain tensor that meets a DTensor counts as replicated."""

    def replicated(self, local: Tensor, mesh: Mesh) -> Any:
        """A DTensor made of a new plain tensor that is the same on every rank of ``mesh``."""

    # ------------------------------------------------------------------------------------ memory
    def before_write(self, x: Tensor) -> None:
        """Check a write; called before the backend itself writes to the DTensor ``x``. Raises ValueError on all ranks
        if tensors that share memory with ``x`` on a single device would miss it."""

    def after_write(self, x: Tensor) -> None:
        """To be called after it, with interception on."""

    def is_contiguous(self, x: Tensor) -> bool:
        """Return whether the single device's tensor would be contiguous; False where its shards do not tell."""

    def strides_of_whole(self, x: Tensor) -> tuple[int, ...]:
        """Strides that the single device's tensor would have, as far as they are known; the same on all ranks."""

    # ------------------------------------------------------------------------------------ the framework's own DTensors
    def layout_of_native(
        self, native: Any, device_type: str, placements: Sequence[tuple[Any, ...]], shape: Sequence[int]
    ) -> Layout:
        """The layout of a tensor of global ``shape`` on a mesh of the framework's own.

        Args:
            native: mesh that `GroupRole.describe_native_mesh` knows.
            device_type: of its devices.
            placements: for each dimension the name of a class of placements and its arguments: ``("Shard", 0)``.
            shape: global shape.
        """

    def layout_of_cut(self, mesh: Mesh, cut: int | None, shape: Sequence[int]) -> Layout:
        """The layout of a tensor of global ``shape`` on the 1-D ``mesh``. Ranks have consecutive parts along dimension
        ``cut``; None means that each has the whole tensor."""

    def cut_of_layout(self, layout: Layout) -> tuple[Mesh, int | None]:
        """The mesh and the cut of which `layout_of_cut` makes ``layout``, where all ranks have equal parts; else (None,
        None)."""

    def from_local(self, local: Tensor, layout: Layout) -> Any:
        """The DTensor of ``layout`` of which ``local``, a plain tensor, is this rank's part; differentiable."""

    # ------------------------------------------------------------------------------------ gradients
    def to_owner(self, gradient: Tensor, layout: Layout) -> Tensor:
        """Convert the plain local gradient of a tensor of ``layout``, to be read as a DTensor. Values computed from it
        count once in a second backward. Interception is off."""

    def to_summands(self, gradient: Tensor, layout: Layout) -> Tensor:
        """Convert in the other direction: the local part of a user's gradient, for the backward of the tensor."""

    def failed_in_backward(self, error: Exception, meshes: Iterable[Mesh]) -> None:
        """Tell the other ranks of ``meshes``, on which a backward pass communicates, that it has failed here with
        ``error``. See `Platform.tell_of_failure`."""

    def open_block(self) -> AbstractContextManager[Any] | None:
        """Inside `coalesce_gradients`, a further block of that kind; None outside."""

    # ------------------------------------------------------------------------------------ norms
    def total_norm(
        self,
        tensors: Sequence[Tensor],
        layouts: Sequence[Layout | None],
        order: float,
        norm_of: Callable[[Sequence[Tensor]], Tensor],
    ) -> tuple[Tensor, Mesh]:
        """The norm of all elements of several tensors, not differentiable. It takes one all-reduce for each mesh
        dimension that shards some of them. Interception is off.

        Args:
            tensors: plain local tensors, or plain tensors that are the same on all ranks.
            layouts: theirs, None for the latter; at least one is a layout.
            order: 0 counts the tensors that are not zero.
            norm_of: gives the norm of plain local tensors, at least one, as a new tensor without dimensions, always of
                the same dtype and on the same device. Its powers should not overflow.

        Returns:
            The norm, a plain tensor, and the first mesh.
        """

    def norms_over_ranks(
        self, norms: Sequence[Tensor], layouts: Sequence[Layout | None], order: float
    ) -> Sequence[Tensor]:
        """The norm of each whole tensor, from new norms of local tensors: a sum over ranks if ``order`` is 0 or 1."""

    def largest_over_ranks(self, value: Tensor, layouts: Sequence[Layout | None]) -> Tensor:
        """The largest ``value``, which may be overwritten, over all ranks that share one of the sharded tensors."""

    def on_joined_meshes(self, layouts: Sequence[Layout | None]) -> Sequence[Layout | None]:
        """The layouts on one mesh where theirs are slices of one, with the same local tensors: for functions of the
        framework that combine tensors on several slices."""

    # ------------------------------------------------------------------------------------ random numbers
    def draw(
        self,
        fill: Callable[[Tensor], Tensor],
        x: Tensor,
        layout: Layout,
        shared: bool = True,
        by_counter: Callable[[Callable[..., Tensor]], Tensor] | None = None,
    ) -> Tensor:
        """This rank's part of the tensor that ``fill(whole)`` draws. ``whole`` is a plain tensor of ones with the shape
        of the whole tensor of ``layout``. Interception is off.

        Args:
            fill: may write to the tensor, or return a new one.
            x: local tensor with the dtype, the device and the strides.
            layout: of the result.
            shared: whether ranks have to agree on the numbers. False for constants, and for a user's own generator.
            by_counter: ``by_counter(numbers)`` draws the same numbers for this rank's part alone, where the program has
                asked for it. ``numbers(kind, dtype=None)`` gives numbers as `Platform.numbers_by_counter`, of the dtype
                of ``x`` unless another is given. None for tensors that have to be drawn as a whole.
        """

    def take_part(self, drawn: Tensor, layout: Layout) -> Tensor:
        """This rank's part of a whole tensor that each rank has drawn, as a new tensor: ranks that hold the same part
        get that of the first of them. Interception is off."""

    def of_first_rank(self, value: Any, mesh: Mesh) -> Any:
        """The picklable ``value`` of the first rank of ``mesh``, on all of its ranks."""

    # ------------------------------------------------------------------------------------ refusals
    def refuse_part_of_classes(self, count: int, logits: Tensor | None = None) -> None:
        """Check plain logits of ``count`` classes that a loss of the framework takes. Raises ValueError where they may
        be one rank's part of a module's classes. The ``logits`` themselves can disprove that."""

    def check_local_collective(
        self,
        name: str,
        layout: Layout,
        ranks: Sequence[int],
        *,
        linear: bool = True,
        apart: bool = False,
        parts: bool = False,
    ) -> None:
        """Check a collective of the program's own over global ``ranks``, on the local tensor of a DTensor. Raises
        ValueError on all ranks that take part, if it would be wrong there.

        Args:
            name: of the collective, for the message.
            layout: of the DTensor.
            ranks: those that take part.
            linear: whether it moves, adds or averages values.
            apart: whether the operands of the ranks stay apart, in plain tensors.
            parts: whether it leaves another result on each rank.
        """

    def check_rows(self, name: str, whole: Layout, part: Layout, count: int) -> None:
        """Raise ValueError unless a DTensor with layout ``whole`` is ``count`` DTensors with layout ``part`` in a row.
        They follow each other along dimension 0, on local tensors as on global ones."""

    # ------------------------------------------------------------------------------------ copies
    def held_rectangles(self, layout: Layout) -> Sequence[Any]:
        """The boxes of a tensor of ``layout`` that this rank holds: ``offsets`` and ``sizes`` in the whole tensor,
        ``local_offsets`` in its part. None where the part is empty, or the rank is not in the mesh."""

    @property
    def restore(self) -> Callable:
        """The function that is pickled with a DTensor, and makes it again: ``restore(rebuild, layout, coordinate,
        *parts)``.

        It makes the DTensor class, and returns ``rebuild(layout, *parts)``. The pickled part is that of the rank at
        ``coordinate``. RuntimeError where this rank has another part of the tensor."""

    @property
    def unpickling(self) -> tuple[Any, ...]:
        """Return the callables that unpickle a layout, and `restore`."""
