"""Services that core hands to a backend when the DTensor class is made. A backend imports nothing of core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hyper_parallel.platform.contract.compiled import CompiledLosses
from hyper_parallel.platform.contract.dispatch import Dispatch
from hyper_parallel.platform.contract.passes import PassServices

__all__ = ["Core"]

Tensor = Any
Layout = Any
Mesh = Any


class Core(CompiledLosses, PassServices, Protocol):
    """Services of core for a backend.

    Besides `dispatch`, these serve clipping, gradients, hooks, copies and the framework's own collectives. A backend
    needs no service for a feature that its framework lacks.
    """

    # ------------------------------------------------------------------------------------ operations
    @property
    def dispatch(self) -> Dispatch:
        """Core's dispatcher, which runs native operations that have a DTensor argument."""

    def implicit_replication(self) -> AbstractContextManager[None]:
        """Return a context in which a plain tensor that meets a DTensor counts as replicated."""

    def replicated(self, local: Tensor, mesh: Mesh) -> Any:
        """Return a replicated DTensor on ``mesh``, made of a new plain tensor that is the same on every rank."""

    # ------------------------------------------------------------------------------------ memory
    def before_write(self, x: Tensor) -> None:
        """Raise ValueError, on all ranks, if tensors that share memory on one device would miss a write to ``x``."""

    def after_write(self, x: Tensor) -> None:
        """Finish a write that `before_write` checked. Called with interception on."""

    def before_writes(self, xs: Iterable[Tensor]) -> None:
        """Check writes to ``xs`` that the framework is about to make without dispatch, as `before_write` does."""

    def notice_writes(self, xs: Iterable[Tensor] = ()) -> None:
        """Finish these writes, and others that the framework has counted. Called with interception on."""

    moved_views: set[Any]  #: views in use that had to move data: without any, `notice_writes` does nothing

    def outdate_views(self, x: Tensor) -> None:
        """Refuse later uses of views of ``x`` that had to move data: ``x`` gets another shape or other memory."""

    def share_memory(self, x: Tensor, y: Tensor) -> None:
        """Register that ``y`` shares the memory of ``x``."""

    def is_contiguous(self, x: Tensor) -> bool:
        """Return whether the single device's tensor would be contiguous; False if the shards do not determine that."""

    def strides_of_whole(self, x: Tensor) -> tuple[int, ...]:
        """Return the strides of the single device's tensor, or contiguous ones if unknown; the same on all ranks."""

    # ------------------------------------------------------------------------------------ the framework's own DTensors
    def layout_of_native(
        self, native: Any, device_type: str, placements: Sequence[tuple[Any, ...]], shape: Sequence[int]
    ) -> Layout:
        """Return the layout of a tensor of global ``shape`` on a mesh of the framework.

        Args:
            native: mesh that `GroupRole.describe_native_mesh` knows.
            device_type: device type of the mesh.
            placements: for each mesh dimension the name of a placement class and its arguments: ``("Shard", 0)``.
            shape: global shape.
        """

    def layout_of_cut(self, mesh: Mesh, cut: int | None, shape: Sequence[int]) -> Layout:
        """Return the layout of a tensor of global ``shape`` on the 1-D ``mesh``. It is sharded along dimension ``cut``,
        or replicated if ``cut`` is None."""

    def cut_of_layout(self, layout: Layout) -> tuple[Mesh, int | None]:
        """Invert `layout_of_cut`: return (mesh, cut), or (None, None) for uneven shards and other meshes."""

    def from_local(self, local: Tensor, layout: Layout) -> Any:
        """Return the DTensor with ``layout`` and the plain ``local`` as this rank's local tensor; differentiable."""

    # ------------------------------------------------------------------------------------ norms
    def total_norm(
        self,
        tensors: Sequence[Tensor],
        layouts: Sequence[Layout | None],
        order: float,
        norm_of: Callable[[Sequence[Tensor]], Tensor],
    ) -> tuple[Tensor, Mesh]:
        """Return the norm of all elements of several tensors, not differentiable. It takes one all-reduce for each mesh
        dimension that shards some of them. Interception is off.

        Args:
            tensors: plain local tensors, or plain tensors that are the same on all ranks.
            layouts: layout of each local tensor, None for a plain tensor; at least one is a layout.
            order: order of the norm; 0 counts the tensors that are not zero.
            norm_of: returns the norm of one or more plain local tensors as a new 0-d tensor, always of the same dtype
                and on the same device. Its powers should not overflow.

        Returns:
            The norm, a plain tensor, and the first mesh.
        """

    def norms_over_ranks(
        self, norms: Sequence[Tensor], layouts: Sequence[Layout | None], order: float
    ) -> Sequence[Tensor]:
        """Return norms of full tensors, from ``norms`` of local tensors, which may be overwritten."""

    def largest_over_ranks(self, value: Tensor, layouts: Sequence[Layout | None]) -> Tensor:
        """Return the maximum of ``value`` over all ranks that share a sharded tensor. ``value`` may be overwritten."""

    def on_joined_meshes(self, layouts: Sequence[Layout | None]) -> Sequence[Layout | None]:
        """Convert layouts on slices of one mesh to equivalent layouts on that mesh, with the same local tensors. The
        backend calls this for functions of the framework that combine tensors on several slices."""

    # ------------------------------------------------------------------------------------ random numbers
    def draw(
        self,
        fill: Callable[[Tensor], Tensor],
        x: Tensor,
        layout: Layout,
        shared: bool = True,
        by_counter: Callable[[Callable[..., Tensor]], Tensor] | None = None,
    ) -> Tensor:
        """Return this rank's shard of the tensor that ``fill(whole)`` draws. ``whole`` is a plain tensor of ones with
        the global shape of ``layout``. Interception is off.

        Args:
            fill: function that may write to the tensor, or return a new one.
            x: local tensor with the dtype, the device and the strides of the result.
            layout: layout of the result.
            shared: whether ranks must agree on the numbers. False for constants, and for a user's own generator.
            by_counter: ``by_counter(numbers)`` draws the same numbers for this rank's shard alone, if the program asked
                for that. ``numbers(kind, dtype=None)`` calls `Platform.numbers_by_counter`; the default dtype is that
                of ``x``. None for tensors that must be drawn in full.
        """

    def take_part(self, drawn: Tensor, layout: Layout) -> Tensor:
        """Return this rank's shard of a full tensor that each rank has drawn, as a new tensor. Ranks with the same
        shard get the numbers of the first such rank. Interception is off."""

    def of_first_rank(self, value: Any, mesh: Mesh) -> Any:
        """Broadcast the picklable ``value`` of the first rank of ``mesh`` to all of its ranks."""

    # ------------------------------------------------------------------------------------ refusals
    def owner_of(self, x: Tensor) -> str | None:
        """Return the name of a distributed parameter or buffer, ``"weight of 'layers.0.norm'"``; None for others."""

    def refuse_part_of_classes(self, count: int, logits: Tensor | None = None) -> None:
        """Check plain logits of ``count`` classes that are passed to a loss of the framework. Raises ValueError if the
        logits may be one rank's shard of a module's classes. If ``logits`` are passed, their graph can show that they
        are not."""

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
        """Check a collective that the program issues over global ``ranks`` on the local tensor of a DTensor. Raises
        ValueError on all participating ranks if its result would be wrong.

        Args:
            name: name of the collective, for the message.
            layout: layout of the DTensor.
            ranks: ranks that take part.
            linear: whether the collective moves, adds or averages values.
            apart: whether operands stay separate, in plain tensors.
            parts: whether each rank gets a different result.
        """

    def check_rows(self, name: str, whole: Layout, part: Layout, count: int) -> None:
        """Raise ValueError unless a DTensor with layout ``whole`` concatenates ``count`` DTensors with layout ``part``.
        The concatenation is along dimension 0, for local tensors and global ones."""

    # ------------------------------------------------------------------------------------ copies
    def held_rectangles(self, layout: Layout) -> Sequence[Any]:
        """Return this rank's rectangles of a tensor of ``layout``: ``offsets`` and ``sizes`` in that tensor,
        ``local_offsets`` in the local one. The result is empty for an empty shard, or on a rank outside the mesh."""

    @property
    def restore(self) -> Callable:
        """Function that is pickled with a DTensor and recreates it: ``restore(rebuild, layout, coordinate, *parts)``.

        `restore` creates the DTensor class, and returns ``rebuild(layout, *parts)``. The pickled shard is the shard of
        the rank at ``coordinate``. Raises RuntimeError if this rank has another shard of the tensor."""

    @property
    def unpickling(self) -> tuple[Any, ...]:
        """Callables that unpickle a layout, and `restore`."""
