"""Attention modules in the checks of a plan: their numbers of heads, and the norms inside heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.layouts.placement_types import Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel.checks.known_names import (
    HEAD_SIZE,
    HEADS,
    KEY_OR_VALUE,
    KEY_VALUE_HEADS,
    QUERY_OR_KEY_NORM,
)
from hyper_parallel.core.tensor_parallel.checks.paths import by_parent
from hyper_parallel.core.tensor_parallel.program.heads import check_heads
from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle
from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
from hyper_parallel.core.tensor_parallel.styles.head_norm import HeadNormParallel

#: (path, module, style) of a module in a plan.
Match = tuple[str, Any, ParallelStyle]


@dataclass(frozen=True)
class Attention:
    """The heads of an attention module, read from its attributes or its config.

    Attributes:
        heads: name of the attribute with the number of query heads, and the number.
        key_value_heads: the same for key and value heads.
        size: features of a head, or None if no attribute has it.
    """

    heads: tuple[str, int]
    key_value_heads: tuple[str, int]
    size: int | None

    @staticmethod
    def of(module: Any) -> Attention | None:
        """Return the attention heads of a module, or None if it has none.

        The numbers of heads and the size of a head are read from attributes with known names. The module itself must
        have at least one of these attributes. Its config may have the others.
        """
        if not any(_number(module, names) for names in (HEADS, KEY_VALUE_HEADS, HEAD_SIZE)):
            return None
        holders = (module, getattr(module, "config", None))
        heads, key_value, size = (
            next((found for holder in holders if (found := _number(holder, names))), None)
            for names in (HEADS, KEY_VALUE_HEADS, HEAD_SIZE)
        )
        return None if heads is None else Attention(heads, key_value or heads, None if size is None else size[1])

    def of_projection(self, name: str, features: int) -> tuple[str, int] | None:
        """Return the heads of a projection, or None for an unknown kind of projection, such as a fused one."""
        for heads in (self.key_value_heads, self.heads) if KEY_OR_VALUE.match(name) else (self.heads,):
            if self.size is None:
                return heads if features % heads[1] == 0 else None
            if features == heads[1] * self.size:
                return heads
        return None


def _number(holder: Any, names: tuple[str, ...]) -> tuple[str, int] | None:
    for name in names:
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return name, value
    return None


def check_projections(matches: list[Match], modules: dict[str, Any], mesh: DeviceMesh) -> None:
    """Raise ValueError if a plan shards heads that the ranks cannot share evenly.

    Code on local tensors needs complete heads.
    """
    for path, module, style, attention in _projections(matches, modules, mesh):
        features = style.features(module, mesh.platform)
        name = path.rpartition(".")[2]
        if style.use_local_output and style.heads is None and not style._is_packed:
            found = attention.of_projection(name, features)
            if found is not None:
                check_heads(found[1], (features,), mesh, path, source=f" ({found[0]})")


def head_norms(matches: list[Match], modules: dict[str, Any], mesh: DeviceMesh) -> list[Match]:
    """Return `HeadNormParallel` styles for norms inside sharded heads that the plan does not name.

    Raises:
        ValueError: for a norm over the features of all heads, which are sharded.
    """
    planned = {id(module) for _, module, _ in matches}
    found: dict[str, Match] = {}
    below = by_parent(modules)
    for path, module, style, attention in _projections(matches, modules, mesh):
        parent = path.rpartition(".")[0]
        features = style.features(module, mesh.platform)
        for name, norm, size in _norms(below[parent], mesh):
            if id(norm) in planned:
                continue
            if size == attention.size:
                where = f"{parent}.{name}" if parent else name
                found[where] = (where, norm, HeadNormParallel(use_local_output=style.use_local_output))
            elif size == features and style.use_local_output and QUERY_OR_KEY_NORM.match(name):
                raise ValueError(
                    f"{name!r} normalises all {size} features of {path!r} together, but under the plan each rank has "
                    f"a shard of these features. Set output_layouts=Replicate() for {path!r}. Or set "
                    f"use_local_output=False for {path!r}, and use HeadNormParallel(use_local_output=False) for "
                    f"{name!r}"
                )
    return list(found.values())


def _projections(
    matches: list[Match], modules: dict[str, Any], mesh: DeviceMesh
) -> Iterator[tuple[str, Any, ColwiseParallel, Attention]]:
    """Yield the linear layers of attention modules that return outputs sharded along the features, with style and
    heads."""
    for path, module, style in matches:
        if isinstance(style, ColwiseParallel) and style.output_layouts == (Shard(-1),):
            attention = Attention.of(modules[path.rpartition(".")[0]]) if path else None
            if attention is not None and mesh.platform.is_linear_module(module):
                yield path, module, style, attention


def _norms(modules: dict[str, Any], mesh: DeviceMesh) -> Iterator[tuple[str, Any, int]]:
    """Yield (name, module, size) of each module without submodules whose parameters are vectors of one size."""
    platform = mesh.platform
    for path, module in modules.items():
        is_alone = len(list(platform.named_modules(module))) == 1
        shapes = {tuple(parameter.shape) for _, parameter in platform.named_parameters(module)}
        if is_alone and len(shapes) == 1 and len(shape := shapes.pop()) == 1:
            yield path.rpartition(".")[2], module, shape[0]
