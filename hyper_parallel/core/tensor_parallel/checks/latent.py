"""Attention with latent keys and values (DeepSeek's MLA), as a plan cuts it.

A layer that all ranks have whole gives two outputs. One is a latent. The other, its last features, is a rotary part of
the keys that all heads share. The latent goes into a layer that the plan cuts by heads, which sums the gradient of its
input. Code that has some heads only reads the rotary part as it is. So each rank computes a part of that gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.layouts.placement_types import Replicate
from hyper_parallel.core.tensor_parallel.checks.paths import by_parent
from hyper_parallel.core.tensor_parallel.styles.replicated import NoParallel
from hyper_parallel.core.tensor_parallel.styles.weight import WeightParallel, linear_sizes

__all__ = ["Latent", "Latents"]


@dataclass(frozen=True)
class Latent:
    """Source of the latent that a projection takes.

    Attributes:
        path: of the layer.
        features: how many it gives.
        styles: of the plan, for that layer.
    """

    path: str
    features: int
    styles: tuple[Any, ...]

    @property
    def _says_how_it_is_read(self) -> bool:
        """Return whether the gradient of the features that local code reads is known to be right."""
        for style in self.styles:
            known = isinstance(style, (NoParallel, WeightParallel))
            if not known or not style.use_local_output or style.output_layouts != (Replicate(),):
                return True  # a DTensor, or the affair of that style
            if isinstance(style, NoParallel) and style._says_how_it_is_read:
                return True
        return False


class Latents:
    """The layers of a model that may give latents, each with the layers next to it.

    Args:
        matches, modules: of the plan.
        platform: that of the modules.
    """

    def __init__(self, matches: Sequence[Any], modules: dict[str, Any], platform: Any) -> None:
        self._platform, self._below = platform, by_parent(modules)
        self._styles: dict[str, list[Any]] = {}
        for path, _, style in matches:
            self._styles.setdefault(path, []).append(style)
        self._known: dict[str, _Siblings] = {}

    def of(self, path: str, inputs: int) -> Latent | None:
        """Return the layer next to a projection that gives its latent input and more features, which no other layer
        takes.

        None where the projection has no such input.

        Args:
            path: of the projection.
            inputs: how many features it takes.
        """
        parent = path.rpartition(".")[0]
        if parent not in self._known:
            self._known[parent] = self._siblings(self._below.get(parent, {}))
        known = self._known[parent]
        if known.giving[inputs] > (known.given.get(path) == inputs):
            return None
        all_found = (
            other
            for (size, given), latents in known.latents.items()
            if given > inputs != size and given not in known.taken
            for other in latents
        )
        found = [*islice(all_found, 2)]
        return found[0] if len(found) == 1 else None

    def _siblings(self, modules: dict[str, Any]) -> _Siblings:
        found = _Siblings({}, Counter(), set(), {})
        for path, module in modules.items():
            if _is_known(module, self._platform):
                size, given = linear_sizes(module, self._platform)
                found.given[path] = given
                found.giving[given] += 1
                found.taken.add(size)
                styles = tuple(self._styles.get(path, ()))
                if not any(map(_cuts, styles)):
                    found.latents.setdefault((size, given), []).append(Latent(path, given, styles))
        return found


class _Siblings(NamedTuple):
    """The linear layers of one parent module.

    Attributes:
        given: how many features each gives.
        giving: how many layers give so many.
        taken: how many features some layer takes.
        latents: those that every rank has whole, by how many features they take and give.
    """

    given: dict[str, int]
    giving: Counter[int]
    taken: set[int]
    latents: dict[tuple[int, int], list[Latent]]


def _cuts(style: Any) -> bool:
    """Return whether a rank has a part of the output only."""
    return isinstance(style, WeightParallel) and style.output_layouts != (Replicate(),)


def _is_known(module: Any, platform: Any) -> bool:
    """Return whether a module is a linear layer with a weight whose shape is known."""
    if not platform.is_linear_module(module):
        return False
    weight = dict(platform.named_parameters(module)).get(platform.kind_of(module).weight)
    return weight is not None and (
        isinstance(weight, DTensor) or platform.is_meta(weight) or platform.has_values(weight)
    )
