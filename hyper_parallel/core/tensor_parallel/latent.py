"""Attention with latent keys and values (DeepSeek's MLA), as a plan cuts it.

A layer that all ranks have whole gives a latent and, as its last features, a rotary part of the keys that all heads
share. The latent goes into a layer that the plan cuts by heads, which sums the gradient of its input. Code that has
some heads only reads the rotary part as it is, so that each rank computes a part of that gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.placement_types import Replicate
from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.tensor_parallel.replicated import NoParallel
from hyper_parallel.core.tensor_parallel.weight import WeightParallel, linear_sizes

__all__ = ["Latent", "latent_of"]


@dataclass(frozen=True)
class Latent:
    """What gives the latent that a projection takes.

    Attributes:
        path: of the layer.
        features: how many it gives.
        styles: of the plan, for that layer.
    """

    path: str
    features: int
    styles: tuple[Any, ...]

    @property
    def says_how_it_is_read(self) -> bool:
        """Whether the gradient of what local code reads of it is known to be right."""
        for style in self.styles:
            known = isinstance(style, (NoParallel, WeightParallel))
            if not known or not style.use_local_output or style.output_layouts != (Replicate(),):
                return True  # a DTensor, or the affair of that style
            if isinstance(style, NoParallel) and style.says_how_it_is_read:
                return True
        return False


def latent_of(path: str, inputs: int, matches: Sequence[Any], modules: dict[str, Any], platform: Any) -> Latent | None:
    """The layer beside a projection that gives its latent input and more, which no other layer takes; None if the
    projection has no such input.

    Args:
        path, inputs: of the projection: where it is, and how many features it takes.
        matches, modules: of the plan.
        platform: that of the modules.
    """
    parent = path.rpartition(".")[0]
    beside = {
        other: linear_sizes(module, platform)
        for other, module in modules.items()
        if other and other != path and other.rpartition(".")[0] == parent and _is_known(module, platform)
    }
    if any(given == inputs for _, given in beside.values()):
        return None
    taken = {size for size, _ in beside.values()} | {inputs}
    found = [
        Latent(other, given, tuple(style for at, _, style in matches if at == other))
        for other, (size, given) in beside.items()
        if given > inputs != size and given not in taken
    ]
    found = [latent for latent in found if not any(map(_cuts, latent.styles))]
    return found[0] if len(found) == 1 else None


def _cuts(style: Any) -> bool:
    """Whether a rank has a part of the output only."""
    return isinstance(style, WeightParallel) and style.output_layouts != (Replicate(),)


def _is_known(module: Any, platform: Any) -> bool:
    """Whether a module is a linear layer with a weight whose shape is known."""
    if not platform.is_linear_module(module):
        return False
    weight = dict(platform.named_parameters(module)).get(platform.kind_of(module).weight)
    return weight is not None and (
        isinstance(weight, DTensor) or platform.is_meta(weight) or platform.has_values(weight)
    )
