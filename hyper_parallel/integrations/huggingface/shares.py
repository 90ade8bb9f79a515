"""The share of a model's parameters that a plan shards: a log entry, and a warning if it is small."""

from __future__ import annotations

import re
import warnings
from typing import Any, NamedTuple

from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.platform.logs import LOG

__all__ = ["Shares", "say_shares", "shares_of"]

#: Share below which the plan has probably forgotten parameters, and number of parameter names in a message.
_SMALL, _NAMED = 0.5, 6


class Shares(NamedTuple):
    """Counts and bytes of a model's parameters, in which tied ones count once.

    Attributes:
        parameters: number of parameters.
        sharded: number of sharded parameters.
        nbytes: bytes of all parameters.
        sharded_nbytes: bytes of the sharded ones.
        whole: names of the unsharded parameters with their bytes, the largest first. ``*`` stands for the number of a
            layer.
    """

    parameters: int
    sharded: int
    nbytes: int
    sharded_nbytes: int
    whole: dict[str, int]


def shares_of(model: Any) -> Shares:
    """Return counts and bytes of a model's parameters."""
    count = sharded = nbytes = sharded_nbytes = 0
    whole: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        size = parameter.numel() * parameter.element_size()
        count, nbytes = count + 1, nbytes + size
        if isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements):
            sharded, sharded_nbytes = sharded + 1, sharded_nbytes + size
        else:
            pattern = re.sub(r"\.\d+\.", ".*.", name)
            whole[pattern] = whole.get(pattern, 0) + size
    largest = dict(sorted(whole.items(), key=lambda item: -item[1]))
    return Shares(count, sharded, nbytes, sharded_nbytes, largest)


def say_shares(model: Any, mesh: DeviceMesh) -> None:
    """Log the share of sharded bytes, and the unsharded parameters. Warn if less than half is sharded."""
    if mesh.size() == 1:
        return
    found = shares_of(model)
    names = [f"{name!r}" for name in found.whole]
    share = found.sharded_nbytes / max(found.nbytes, 1)
    text = (
        f"parallelize_model shards {share:.0%} of the bytes of {type(model).__name__} over {mesh.size()} ranks, "
        f"{found.sharded} of {found.parameters} parameters"
    )
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    LOG.info("%s; whole on each rank: %s%s", text, ", ".join(names[:_NAMED]) or "none", more)
    if share < _SMALL:
        warnings.warn(
            f"{text}: the plan has no style that shards {', '.join(names[:_NAMED])}{more}. Results are right, but "
            "each rank holds these parameters in full. To shard them, add styles for their modules with plan={...}",
            UserWarning,
            stacklevel=4,
        )
