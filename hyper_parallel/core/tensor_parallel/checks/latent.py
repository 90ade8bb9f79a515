"""Sharding of attention with latent keys and values (DeepSeek's MLA).

The output of a replicated layer has two parts: a latent, and in the last features a rotary part of the keys that all
heads share. A layer that is sharded by heads takes the latent, and sums the gradient of the latent over ranks. Code
with only this rank's heads reads the rotary part directly. So the gradient of the rotary part is partial.
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
    """The layer whose output contains the latent input of a projection.

    Attributes:
        path: path of the layer.
        features: number of its output features.
        styles: styles of the layer in the plan.
    """

    path: str
    features: int
    styles: tuple[Any, ...]

    @property
    def _says_how_it_is_read(self) -> bool:
        """Return whether the plan declares the gradient of the rotary features, which code with local heads reads."""
        for style in self.styles:
            known = isinstance(style, (NoParallel, WeightParallel))
            if not known or not style.use_local_output or style.output_layouts != (Replicate(),):
                return True  # the output is a DTensor, or the style itself handles its gradient
            if isinstance(style, NoParallel) and style._says_how_it_is_read:
                return True
        return False


class Latents:
    """Search for the layers of a model whose output may contain a latent.

    Args:
        matches: matches of the plan.
        modules: modules of the model, by path.
        platform: platform of the modules.
    """

    def __init__(self, matches: Sequence[Any], modules: dict[str, Any], platform: Any) -> None:
        self._platform, self._below = platform, by_parent(modules)
        self._styles: dict[str, list[Any]] = {}
        for path, _, style in matches:
            self._styles.setdefault(path, []).append(style)
        self._known: dict[str, _Siblings] = {}

    def of(self, path: str, inputs: int) -> Latent | None:
        """Return the layer whose output contains the input of a projection and further features.

        The layer must have the same parent as the projection, and no other layer may take its full output. The result
        is None if no layer or several layers fit.

        Args:
            path: path of the projection.
            inputs: number of its input features.
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
        given: path of a layer -> number of output features.
        giving: number of output features -> number of layers.
        taken: all numbers of input features.
        latents: (input features, output features) -> layers whose output is not sharded.
    """

    given: dict[str, int]
    giving: Counter[int]
    taken: set[int]
    latents: dict[tuple[int, int], list[Latent]]


def _cuts(style: Any) -> bool:
    """Return whether a style shards the output."""
    return isinstance(style, WeightParallel) and style.output_layouts != (Replicate(),)


def _is_known(module: Any, platform: Any) -> bool:
    """Return whether a module is a linear layer whose weight has a known shape."""
    if not platform.is_linear_module(module):
        return False
    weight = dict(platform.named_parameters(module)).get(platform.kind_of(module).weight)
    return weight is not None and (
        isinstance(weight, DTensor) or platform.is_meta(weight) or platform.has_values(weight)
    )
