"""Guards for layers without a style that may get the sharded output of a column-parallel layer as their input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.layouts.chunking import shard_sizes
from hyper_parallel.core.layouts.placement_types import Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.rules.logit_shards import remember_part_of_classes
from hyper_parallel.core.tensor_parallel.checks.attention import Match
from hyper_parallel.core.tensor_parallel.program.planned_parameters import module_label
from hyper_parallel.core.tensor_parallel.styles.base import is_styled
from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
from hyper_parallel.core.tensor_parallel.styles.rowwise import RowwiseParallel
from hyper_parallel.core.tensor_parallel.styles.weight import recurrent_kind


@dataclass(frozen=True)
class _Guard:
    """Forward pre-hook of a layer without a style, which refuses an input with only this rank's features.

    The layer takes as many features as the column-parallel layer ``source`` returns on all ranks together.

    Attributes:
        path: path of the layer.
        source: path of the column-parallel layer.
        features: global number of features.
        dim: dimension of the features in the input.
        styled: styles that the layer could have, for the message; "" if no style takes a shard.
        own: number of this rank's features.
        mesh: description of the mesh.
    """

    path: str
    source: str
    features: int
    dim: int
    styled: str
    own: int
    mesh: str

    def __call__(self, module: Any, args: tuple) -> None:
        x = args[0] if args else None
        shape = getattr(x, "shape", ())
        fits = len(shape) <= max(self.dim, 0) or shape[self.dim] != self.own
        if fits or isinstance(x, DTensor) or is_styled(module):
            return
        own_style = f"{self.styled} for {self.path!r}, or " if self.styled else ""
        raise ValueError(
            f"{module_label(module)} takes {self.features} features in {_DIMS[self.dim]} of its input, but gets a "
            f"plain tensor with this rank's shard of these features from {self.source!r}. The ColwiseParallel of "
            f"{self.source!r} shards its output features over {self.mesh}. In the plan, use "
            f"{own_style}ColwiseParallel(output_layouts=Replicate()) for {self.source!r}"
        )


def guard_forgotten_layers(
    matches: list[Match], modules: dict[str, Any], mesh: DeviceMesh
) -> list[tuple[str, Any, _Guard]]:
    """Return (path, module, hook) for each layer that a plan may have forgotten.

    Only a call of such a layer shows whether its input is sharded. A column-parallel layer with a row-parallel layer
    next to it needs no hooks. The output of any other column-parallel layer may be logits, so the layer is registered
    in `logit_shards`.
    """
    platform, guards = mesh.platform, []
    above_rows = {
        path.rpartition(".")[0]
        for path, module, style in matches
        if isinstance(style, RowwiseParallel) and platform.is_linear_module(module)
    }
    planned = {id(module) for _, module, _ in matches}
    takes: dict[int, list[tuple[str, Any, int, str]]] = {}
    for path, module in modules.items():
        found = None if id(module) in planned else _taken(module, mesh)
        if found is not None:
            features, *how = found
            takes.setdefault(features, []).append((path, module, *how))
    for source, module, style in matches:
        if not isinstance(style, ColwiseParallel) or not source or source.rpartition(".")[0] in above_rows:
            continue
        if style.output_layouts != (Shard(-1),) or not style.use_local_output or style._keeps_whole(mesh):
            continue
        kind = platform.kind_of(module)
        dim = kind.out_dim if platform.is_linear_module(module) else 1
        whole = int(getattr(module, kind.weight).shape[dim])
        parts = style.parts(module, platform) if platform.is_linear_module(module) else None
        for features in dict.fromkeys((whole, *(parts or ()))):  # the parts of a packed weight are taken apart
            sizes = shard_sizes(Shard(0), features, mesh.size())
            if max(sizes) == features:
                continue  # a rank with all features could not detect that other ranks have none
            own = sizes[mesh.get_local_rank()]
            if features == whole:
                remember_part_of_classes(module, source, features, own, mesh)
            for path, taker, along, styled in takes.pop(features, ()):  # one guard for each layer, for the first source
                guards.append((path, taker, _Guard(path, source, features, along, styled, own, str(mesh))))
    return guards


#: Attribute with the number of input features -> dimension of the features in the input. These are attributes of
#: recurrent cells, attention and batch norms, and have the same names in both frameworks.
_NUMBERS = {"input_size": -1, "embed_dim": -1, "num_features": 1}
_STYLED = "RowwiseParallel() (SequenceParallel() for a norm)"
_DIMS = {-1: "the last dimension", 1: "dimension 1"}


def _taken(module: Any, mesh: DeviceMesh) -> tuple[int, int, str] | None:
    """Return the number of a layer's input features, the dimension of the features, and styles for sharded features.

    Known modules are linear layers, norms, recurrent layers and fused attention. The result is None for other modules.
    """
    platform = mesh.platform
    if platform.is_linear_module(module):
        kind = platform.kind_of(module)
        weight = getattr(module, kind.weight)
        known = not isinstance(weight, DTensor) and (platform.is_meta(weight) or platform.has_values(weight))
        return (int(weight.shape[1 - kind.out_dim]), -1, _STYLED) if known else None
    if platform.normalized_dims(module) == 1:
        sizes = {tuple(parameter.shape) for _, parameter in platform.named_parameters(module)}
        return (sizes.pop()[0], -1, _STYLED) if len(sizes) == 1 else None
    if not any(True for _ in platform.named_parameters(module)):
        return None  # a container; its layers are examined themselves
    if recurrent_kind(module, platform):
        own = dict(platform.named_parameters(module))
        return int(next(p for name, p in own.items() if name.startswith("weight_ih")).shape[-1]), -1, ""
    for name, dim in _NUMBERS.items():
        if isinstance(features := getattr(module, name, None), int):
            return features, dim, ""
    return None
