"""Attention heads: whole ones on every rank, fewer key and value heads than ranks, and norms inside a head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.layouts.placement_types import Partial, Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.plain_code.following import FOLLOWING
from hyper_parallel.core.tensor_parallel.program.local_forward import layout_of_even_part


def as_heads(heads: int | Sequence[int] | None, style: str) -> int | tuple[int, ...] | None:
    """The keyword ``heads``, checked: a number, one for each part of a packed weight, or None.

    Raises:
        TypeError: for anything else. ValueError: for numbers below 1.
    """
    if heads is None:
        return None
    numbers = (heads,) if isinstance(heads, int) else tuple(heads)
    if any(not isinstance(n, int) or isinstance(n, bool) for n in numbers):
        raise TypeError(f"{style}(heads=...) takes a number of heads, or one for each part, got {heads!r}")
    if not numbers or min(numbers) < 1:
        raise ValueError(f"{style}(heads=...) takes numbers of at least 1, got {heads!r}")
    return heads if isinstance(heads, int) else numbers


def sizes_of_heads(features: int, heads: tuple[int, ...], where: str) -> tuple[int, ...]:
    """Features of each part of a packed weight whose heads all have one size.

    Raises:
        ValueError: when the heads do not divide the features.
    """
    if features % sum(heads):
        raise ValueError(
            f"{where!r} has {features} features, which are not {sum(heads)} heads (heads={heads}) of one size: give "
            "packed=... as well"
        )
    return tuple(n * (features // sum(heads)) for n in heads)


def check_heads(
    heads: int | tuple[int, ...],
    features: Sequence[int],
    mesh: DeviceMesh,
    where: str,
    *,
    may_replicate: bool = False,
    source: str = "",
) -> None:
    """Raise ValueError unless every rank of a 1-D mesh gets whole heads of each part.

    Args:
        heads: number of heads, of each part.
        features: features of each part.
        mesh: the mesh over which they are sharded.
        where: names the module.
        may_replicate: whether fewer heads than ranks may be on several ranks each.
        source: where the number of heads was found, for the message.
    """
    ranks = mesh.size()
    for count, size in zip((heads,) if isinstance(heads, int) else heads, features, strict=True):
        if size % count:
            raise ValueError(f"{where!r} has {size} features, which are not {count} heads{source}: correct the number")
        if count % ranks == 0 or (may_replicate and ranks % count == 0):
            continue
        fitting = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        choices = [f"a mesh of {fitting} ranks"]
        if ranks % count == 0 and not may_replicate:
            choices.append(f"for keys and values ColwiseParallel(heads={count}, replicate_heads=True)")
        choices.append("use_local_output=False for the projections, which keeps the heads distributed without counting")
        raise ValueError(
            f"{where!r} has {count} heads of {size // count} features{source}, which the {ranks} ranks of {mesh} "
            f"cannot share: use {'; or '.join(choices)}"
        )


def local_heads(y: Any, heads: Any, mesh: DeviceMesh) -> Any:
    """Return this rank's one head of an output that is the same on every rank: (..., size) of (..., heads * size).

    The ranks that share a head each contribute a part of its gradient.
    """
    platform = mesh.platform
    local = y.to_local(grad_placements=[Partial()])
    shape = platform.shape_of(local)
    size = shape[-1] // heads
    own = platform.narrow(local, len(shape) - 1, mesh.get_local_rank() * heads // mesh.size() * size, size)
    if FOLLOWING:  # as if there were as many heads as ranks
        FOLLOWING[-1].given(own, layout_of_even_part(own, mesh, Shard(-1)))
    return own
