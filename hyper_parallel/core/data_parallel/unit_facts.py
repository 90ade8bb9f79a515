"""Facts that `fully_shard` found about a module. Copies of the module share these facts, which never change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from hyper_parallel.core.data_parallel.flat_buffer import FlatBuffer
from hyper_parallel.core.data_parallel.options import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from hyper_parallel.core.data_parallel.places import Slot
from hyper_parallel.core.data_parallel.reduction import Block
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.placement_types import Replicate
from hyper_parallel.core.mesh.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from hyper_parallel.core.data_parallel.unit_parameters import UnitParameters

__all__ = ["UnitFacts", "Settings"]


class UnitFacts:
    """The parameters of a unit, and how they are treated.

    Attributes:
        mesh: data-parallel mesh: 1-D, which shards, or 2-D, whose first dimension replicates.
        slots: places in modules that hold the parameters.
        inner: for each parameter, its layout on a tensor-parallel mesh; None for a plain parameter.
        shapes: for each parameter, its local shape under that layout.
        dims: for each parameter, the sharded dimension; None for a parameter that is replicated.
        reshard_after_forward, mp_policy, offload_policy: arguments of `fully_shard`. A number of ranks becomes True.
        fewer: mesh whose last dimension has the number of ranks to reshard over after forward; None without such a
            number.
        keeps_dtype: for each parameter, whether it is gathered in its own dtype, whatever ``mp_policy`` says.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        slots: Sequence[Slot],
        inner: Sequence[Layout | None],
        shapes: Sequence[tuple[int, ...]],
        dims: Sequence[int | None],
        reshard_after_forward: bool | None,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
        fewer: DeviceMesh | None = None,
        keeps_dtype: Sequence[bool] = (),
    ) -> None:
        self.mesh, self.slots, self.inner = mesh, tuple(slots), tuple(inner)
        #: Index and layout of each parameter that is read as a DTensor, and whether its layout replicates over some
        #: mesh dimension.
        self.distributed = [
            (i, layout, any(p is Replicate() for p in layout.placements))
            for i, layout in enumerate(inner)
            if layout is not None
        ]
        #: Indices of the parameters that are read as plain tensors.
        self.plain = [i for i, layout in enumerate(inner) if layout is None]
        self.shapes, self.dims, self.fewer = tuple(shapes), tuple(dims), fewer
        self.keeps_dtype = tuple(keeps_dtype) or (False,) * len(self.shapes)
        self.reshard_after_forward, self.mp_policy, self.offload_policy = (
            reshard_after_forward,
            mp_policy,
            offload_policy,
        )

    @property
    def moves_shards(self) -> bool:
        """Return whether `stored` copies shards."""
        return isinstance(self.offload_policy, CPUOffloadPolicy)

    def stored(self, x: Any) -> Any:
        """Return a plain tensor where shards are stored: ``x``, or its copy in the memory of the host."""
        policy = self.offload_policy
        return self.mesh.platform.to_host(x, policy.pin_memory) if isinstance(policy, CPUOffloadPolicy) else x

    def reduce_dtype(self, dtype: Any) -> Any:
        """Return the dtype in which gradients of parameters of ``dtype`` are reduced."""
        return dtype if self.mp_policy.reduce_dtype is None else self.mp_policy.reduce_dtype

    def buffers(self, parameters: Sequence[Any]) -> tuple[list[FlatBuffer], list[list[int]]]:
        """Return a flat buffer for each pair of stored and read dtypes, and the indices of its parameters."""
        mesh, platform = self.mesh, self.mesh.platform
        size, rank = mesh.shape[-1], mesh.get_local_rank(mesh.ndim - 1)
        by_dtype: dict[tuple[Any, Any], list[int]] = {}
        cast = self.mp_policy.param_dtype
        for i, p in enumerate(parameters):
            stays = cast is None or self.keeps_dtype[i] or not platform.is_floating_point(p)
            by_dtype.setdefault((p.dtype, p.dtype if stays else cast), []).append(i)
        buffers = []
        for (dtype, read), members in by_dtype.items():
            blocks = [Block(platform, self.shapes[i], self.dims[i], size, rank) for i in members]
            buffers.append(FlatBuffer(mesh, blocks, read, self.reduce_dtype(dtype)))
        return buffers, list(by_dtype.values())

    def __copy__(self) -> UnitFacts:
        return self

    def __deepcopy__(self, memo: dict) -> UnitFacts:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a module under fully_shard cannot be pickled: save module.state_dict(), and load it into a module with "
            "the same calls of fully_shard"
        )


class Settings:
    """Settings of one unit, which methods of its modules change.

    Attributes:
        reshard_after_forward: None lets the model decide: only the outermost unit stays unsharded until its backward.
        fewer: mesh whose last dimension has the ranks over which parameters are resharded after forward, or None.
        reshard_after_backward: whether parameters are resharded after backward.
        whole_in_backward: whether backward needs the unsharded parameters.
        keeps_storage: whether the storage of unsharded parameters is never freed, so that its address stays the same.
        forward_prefetch, backward_prefetch: units to prefetch, in place of the unit that comes next.
        finalized_by_hand: whether the user finalizes backward by a call. Only the outermost unit reads it.
        post_optim_event: event that the next forward waits for, or None.
    """

    def __init__(self, facts: UnitFacts) -> None:
        self.reshard_after_forward, self.fewer = facts.reshard_after_forward, facts.fewer
        self.reshard_after_backward = self.whole_in_backward = True
        self.keeps_storage = self.finalized_by_hand = False
        self.forward_prefetch: Sequence[UnitParameters] = ()
        self.backward_prefetch: Sequence[UnitParameters] = ()
        self.post_optim_event: Any = None
