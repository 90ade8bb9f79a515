"""Attention heads: checks that ranks get complete heads, and fewer key and value heads than ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.layouts.placement_types import Partial, Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.plain_code.following import FOLLOWING
from hyper_parallel.core.tensor_parallel.program.local_forward import layout_of_even_part


def as_heads(heads: int | Sequence[int] | None, style: str) -> int | tuple[int, ...] | None:
    """Check and return the keyword ``heads``: a number, a number for each matrix of a packed weight, or None.

    Raises:
        TypeError: for anything else.
        ValueError: for numbers below 1.
    """
    if heads is None:
        return None
    numbers = (heads,) if isinstance(heads, int) else tuple(heads)
    if any(not isinstance(n, int) or isinstance(n, bool) for n in numbers):
        raise TypeError(f"{style}(heads=...) takes a number of heads, or a number for each part, got {heads!r}")
    if not numbers or min(numbers) < 1:
        raise ValueError(f"{style}(heads=...) takes numbers of at least 1, got {heads!r}")
    return heads if isinstance(heads, int) else numbers


def sizes_of_heads(features: int, heads: tuple[int, ...], where: str) -> tuple[int, ...]:
    """Return the features of each matrix in a packed weight, if all heads have one size.

    Raises:
        ValueError: if the number of heads does not divide the number of features.
    """
    if features % sum(heads):
        raise ValueError(
            f"{where!r} has {features} features, which do not divide into {sum(heads)} heads (heads={heads}) of equal "
            "size: pass packed=... as well"
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
    """Raise ValueError unless every rank of a 1-D mesh gets complete heads of each matrix.

    Args:
        heads: number of heads, or of the heads of each matrix in a packed weight.
        features: number of features of each matrix.
        mesh: mesh over which the heads are sharded.
        where: name of the module.
        may_replicate: whether several ranks may share a head if there are fewer heads than ranks.
        source: origin of the number of heads, for the message.
    """
    ranks = mesh.size()
    for count, size in zip((heads,) if isinstance(heads, int) else heads, features, strict=True):
        if size % count:
            raise ValueError(
                f"{where!r} has {size} features, which do not divide into {count} heads{source}: correct the number "
                "of heads"
            )
        if count % ranks == 0 or (may_replicate and ranks % count == 0):
            continue
        fitting = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        choices = [f"a mesh of {fitting} ranks"]
        if ranks % count == 0 and not may_replicate:
            choices.append(f"for keys and values ColwiseParallel(heads={count}, replicate_heads=True)")
        choices.append("use_local_output=False for the projections, which keeps the heads distributed without counting")
        raise ValueError(
            f"{where!r} has {count} heads of {size // count} features{source}, which do not divide over the {ranks} "
            f"ranks of {mesh}: use {'; or '.join(choices)}"
        )


def local_heads(y: Any, heads: Any, mesh: DeviceMesh) -> Any:
    """Return this rank's head, (..., size), of a replicated output (..., heads * size).

    The gradient of the output is partial: backward sums the contributions of ranks that share a head.
    """
    platform = mesh.platform
    local = y.to_local(grad_placements=[Partial()])
    shape = platform.shape_of(local)
    size = shape[-1] // heads
    own = platform.narrow(local, len(shape) - 1, mesh.get_local_rank() * heads // mesh.size() * size, size)
    if FOLLOWING:  # reported as a shard, as if there were a head for each rank
        FOLLOWING[-1].given(own, layout_of_even_part(own, mesh, Shard(-1)))
    return own
