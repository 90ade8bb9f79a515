"""Facts that `fully_shard` found about a module, and checks of its parameters. Copies of the module share these facts,
which never change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from hyper_parallel.core.data_parallel.flat_buffer import FlatBuffer
from hyper_parallel.core.data_parallel.options import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from hyper_parallel.core.data_parallel.places import Slot
from hyper_parallel.core.data_parallel.reduction import Block
from hyper_parallel.core.dtensor.undistributed import held_tensors
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.placement_types import Replicate
from hyper_parallel.core.mesh.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from hyper_parallel.core.data_parallel.unit_parameters import UnitParameters

__all__ = ["CHECKED", "Settings", "UnitFacts", "check_memory", "refuse_added"]

#: Number of first recorded calls of a module that look for added parameters. A first forward may make parameters.
CHECKED = 2


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
        known: paths and names of all parameters that were there, including ignored ones.
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
        left: Iterable[tuple[str, str]] = (),
    ) -> None:
        self.mesh, self.slots, self.inner = mesh, tuple(slots), tuple(inner)
        self.known = {*left, *((slot.path, slot.name) for slot in self.slots)}
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
        checked: id of a module -> number of its calls that have looked for added parameters.
    """

    def __init__(self, facts: UnitFacts) -> None:
        self.reshard_after_forward, self.fewer = facts.reshard_after_forward, facts.fewer
        self.reshard_after_backward = self.whole_in_backward = True
        self.keeps_storage = self.finalized_by_hand = False
        self.forward_prefetch: Sequence[UnitParameters] = ()
        self.backward_prefetch: Sequence[UnitParameters] = ()
        self.post_optim_event: Any = None
        self.checked: dict[int, int] = {}


def refuse_added(
    parameters: Iterable[tuple[str, Any]], mesh: DeviceMesh, what: str, applied: str, ignored: str
) -> bool:
    """Raise ValueError if a trained parameter was added later, because nothing reduces its gradients over ``mesh``.

    Args:
        parameters: names and values of parameters that were not there.
        mesh: data-parallel mesh.
        what: name of the unit in messages.
        applied: name of the function that created the unit.
        ignored: the keyword of this function that leaves out parameters.

    Returns:
        Whether no such parameter was found. Without gradients one does no harm.
    """
    platform, added = mesh.platform, []
    for name, p in parameters:
        layout = getattr(p, "_layout", None)
        is_local = platform.foreign_tensor(p) is None if layout is None else mesh.is_beside(layout.mesh)
        if is_local and p.requires_grad:
            added.append((name, platform.requires_grad(p)))
    for name, is_recorded in added:
        if is_recorded:
            raise ValueError(
                f"{what}: the parameter {name!r} was added after {applied}, so that its gradient would stay different "
                f"on each rank: add parameters before {applied}, exclude them with {ignored}, or freeze them"
            )
    return not added


def check_memory(modules: Sequence[Any], parameters: Sequence[Any], platform: Any) -> None:
    """Raise ValueError if a trained parameter shares memory with another tensor of the modules.

    Each shard has its own memory, so that the two tensors would no longer change together.

    Args:
        modules: the modules of the unit.
        parameters: the parameters that `fully_shard` is about to shard.
    """
    if not platform.needs_values:
        return
    ours, found, seen = {id(p) for p in parameters}, [], set()
    with platform.no_dispatch(), platform.no_grad():
        for module in modules:
            for kind, path, x in held_tensors(module, platform):
                if id(x) in seen or not platform.has_values(x) or 0 in platform.shape_of(x):
                    continue
                seen.add(id(x))
                span = platform.span(platform.detach(x))
                if span is not None:
                    of = f"the {kind} {path!r} of {type(module).__name__}"
                    found.append((span, id(x) in ours, kind == "parameter" and x.requires_grad, of, x))
        found.sort(key=lambda entry: entry[0])
        before: list[Any] = []  # tensors whose memory may reach into that of the next one
        for entry in found:
            (device, begin, _), is_ours, is_trained, of, x = entry
            before = [other for other in before if other[0][0] == device and other[0][2] > begin]
            for _, other_is_ours, other_is_trained, other, y in before:
                if (is_ours or other_is_ours) and (is_trained or other_is_trained) and _share_elements(x, y, platform):
                    raise ValueError(
                        f"fully_shard: {other} and {of} are two tensors that share memory. Shards have separate "
                        "memory: let both modules hold the same Parameter object. If one of the two is a buffer, "
                        "remove the buffer and read the parameter"
                    )
            before.append(entry)


def _share_elements(x: Any, y: Any, platform: Any) -> bool:
    """Return whether two tensors whose memory overlaps have an element at the same address. Two columns of one matrix
    have no such element."""
    addresses = []
    for one in map(platform.detach, (x, y)):
        steps = zip(platform.shape_of(one), platform.strides(one), strict=True)
        grids = np.ix_(*[np.arange(n) * stride * one.itemsize for n, stride in steps])
        addresses.append(platform.span(one)[1] + sum(grids, np.zeros((), np.int64)).reshape(-1))
    return bool(np.intersect1d(*addresses).size)
