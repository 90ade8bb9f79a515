"""Checks for packed weights (query, key and value; gate and up) that a plan shards as one matrix.

`ColwiseParallel` gives consecutive features to a rank. On a packed weight, one rank could then get queries only,
without values. Code that splits the local output would compute with wrong numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.layouts.placement_types import Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel.checks.attention import Attention, Match
from hyper_parallel.core.tensor_parallel.checks.known_names import FUSED, KEY_OR_VALUE, OF_ATTENTION
from hyper_parallel.core.tensor_parallel.checks.latent import Latent, Latents
from hyper_parallel.core.tensor_parallel.program.heads import check_heads
from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
from hyper_parallel.core.tensor_parallel.styles.rowwise import RowwiseParallel
from hyper_parallel.core.tensor_parallel.styles.weight import linear_sizes
from hyper_parallel.platform.contract import Platform


@dataclass(frozen=True)
class _Projection:
    """A column-parallel linear layer whose local output is read by plain code.

    Attributes:
        path, module, style: entry of the plan.
        inputs: global number of input features.
        features: global number of output features.
        taken: number of input features -> path of the first `RowwiseParallel` layer next to it with this number.
        unstyled: the same for layers without a style, if the projection has a fused name and ``taken`` is empty.
        alone: whether keys and values have separate layers, which may include this one.
    """

    path: str
    module: Any
    style: ColwiseParallel
    inputs: int
    features: int
    taken: dict[int, str]
    unstyled: dict[int, str]
    alone: bool

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


def check_fused(matches: list[Match], modules: dict[str, Any], mesh: DeviceMesh) -> None:
    """Raise ValueError if a plan shards a packed weight as if it were one matrix.

    Raise it also for heads of a packed weight that the ranks cannot share. `core.plain_code` finds packed weights that
    this function does not recognise, when code splits their output.
    """
    latents = Latents(matches, modules, mesh.platform)
    for projection in _projections(matches, modules, mesh):
        attention, style = _attention_above(projection, modules), projection.style
        size = None if attention is None else _size_of_heads(projection, attention)
        if attention is not None and size is not None and not isinstance(style.heads, tuple):
            if _has_all_heads(projection, attention, size):
                _check_attention(projection, attention, size, mesh)
            else:
                _check_parts(projection, attention, size, mesh)
        latent = latents.of(projection.path, projection.inputs)
        if latent is not None and projection.taken:
            _check_latent(projection, latent, mesh)
        elif style.packed is None and style.heads is None and (attention is None or FUSED.match(projection.name)):
            known = projection.taken or (projection.unstyled if attention is None else {})
            _check_multiples(projection, known, mesh)


def _projections(matches: list[Match], modules: dict[str, Any], mesh: DeviceMesh) -> Iterator[_Projection]:
    platform = mesh.platform
    rows: dict[str, dict[int, str]] = {}
    for path, module, style in matches:
        if isinstance(style, RowwiseParallel) and platform.is_linear_module(module):
            rows.setdefault(path.rpartition(".")[0], {}).setdefault(style.features(module, platform), path)
    with_keys = {
        path.rpartition(".")[0]
        for path, module in modules.items()
        if KEY_OR_VALUE.match(path.rpartition(".")[2]) and platform.is_linear_module(module)
    }
    parents = {path.rpartition(".")[0] for path, _, _ in matches if FUSED.match(path.rpartition(".")[2])}
    planned = {id(module) for _, module, _ in matches}
    unplanned: dict[str, dict[int, str]] = {}
    for path, module in modules.items():
        parent = path.rpartition(".")[0]
        if id(module) not in planned and parent in parents and _has_sizes(module, platform):
            unplanned.setdefault(parent, {}).setdefault(linear_sizes(module, platform)[0], path)
    for path, module, style in matches:
        if not isinstance(style, ColwiseParallel) or not platform.is_linear_module(module):
            continue
        if style.output_layouts != (Shard(-1),) or not style.use_local_output:
            continue  # code splits a DTensor or a gathered output by its global sizes
        parent, _, name = path.rpartition(".")
        taken = rows.get(parent, {}) if path else {}
        unstyled = unplanned.get(parent, {}) if path and not taken and FUSED.match(name) else {}
        yield _Projection(
            path,
            module,
            style,
            *linear_sizes(module, platform),
            taken,
            unstyled,
            bool(path) and parent in with_keys,
        )


def _has_sizes(module: Any, platform: Platform) -> bool:
    """Return whether a module is a linear layer whose weight has a shape. A lazy layer has none before its first
    call."""
    if not platform.is_linear_module(module):
        return False
    weight = platform.own_parameters(module).get(platform.kind_of(module).weight)
    return weight is not None and (platform.is_meta(weight) or platform.has_values(weight))


def _attention_above(projection: _Projection, modules: dict[str, Any]) -> Attention | None:
    """Return the heads of the attention module that is the parent of a projection, or None.

    For a projection with a fused name, such as ``qkv_proj``, all modules above the projection are searched.
    """
    above = projection.path
    while above:
        above = above.rpartition(".")[0]
        found = Attention.of(modules[above]) if above in modules else None
        if found is not None or not OF_ATTENTION.search(projection.name):
            return found
    return None


def _size_of_heads(projection: _Projection, attention: Attention) -> int | None:
    """Return the number of features of one head, or None.

    The number is read from attributes, unless they contradict the input features of the layer after attention.
    """
    heads = attention.heads[1]
    widths = list(projection.taken)
    if attention.size is not None and (not widths or heads * attention.size in widths):
        return attention.size
    width = widths[0] if widths else projection.inputs
    return None if width % heads else width // heads


def _has_all_heads(projection: _Projection, attention: Attention, size: int) -> bool:
    """Return whether the output features are those of all query, key and value heads together."""
    if projection.alone:
        return False
    if projection.features in projection.taken and not FUSED.match(projection.name):
        return False  # the next layer takes all of them
    return projection.features == (attention.heads[1] + 2 * attention.key_value_heads[1]) * size


def _check_parts(projection: _Projection, attention: Attention, size: int, mesh: DeviceMesh) -> None:
    """Raise ValueError if a matrix of a packed weight has heads that the ranks cannot share."""
    for part in projection.style.parts(projection.module, mesh.platform, projection.path) or ():
        for name, count in (attention.heads, attention.key_value_heads):
            if part == count * size:
                check_heads(count, (part,), mesh, projection.path, source=f" ({name})")
                break


def _check_attention(projection: _Projection, attention: Attention, size: int, mesh: DeviceMesh) -> None:
    """Raise ValueError unless the plan shards a packed weight of query, key and value by complete heads."""
    heads, key_value, style = attention.heads[1], attention.key_value_heads[1], projection.style
    source = f" ({attention.heads[0]})"
    whole = [heads * size, key_value * size, key_value * size]
    parts = style.parts(projection.module, mesh.platform, projection.path)
    if parts is not None and sorted(parts) == sorted(whole):
        check_heads(tuple(n // size for n in parts), parts, mesh, projection.path, source=source)
    elif style.packed in (1, (projection.features,)):
        # Query, key and value alternate, in one group for each key and value head.
        source = f" ({attention.key_value_heads[0]})"
        check_heads(key_value, (projection.features,), mesh, projection.path, source=source)
    else:
        raise ValueError(
            f"{projection.path!r} has {projection.features} output features, which are {heads} query, {key_value} key "
            f"and {key_value} value heads of {size}{source}. {style!r} shards dimension {_dim(projection, mesh)} of "
            f"its weight into {'consecutive features' if parts is None else f'parts of {parts}'} for the "
            f"{mesh.size()} ranks of {mesh}, which mixes queries, keys and values. Write "
            f"ColwiseParallel(heads=({heads}, {key_value}, {key_value})), or packed=({whole[0]}, {whole[1]}, "
            f"{whole[2]}). Add use_local_output=False if the code splits the output by sizes of the full tensor. Write "
            "packed=1 if query, key and value alternate head by head"
        )


def _check_multiples(projection: _Projection, taken: dict[int, str], mesh: DeviceMesh) -> None:
    """Raise ValueError if the next layer takes a half or a third of the features, which indicates a packed weight."""
    if projection.features in projection.taken:
        return
    for size, path in taken.items():
        for times, word, what in (
            (2, "twice", "two matrices in one (gate and up, keys and values)"),
            (3, "three times", "three matrices in one (queries, keys and values)"),
        ):
            if times * size == projection.features:
                taker = f"; and give the layer that takes the parts, such as {path!r}, RowwiseParallel()"
                row = "" if projection.taken else taker
                raise ValueError(
                    f"{projection.path!r} has {projection.features} output features, which is {word} the {size} input "
                    f"features of {path!r}. So its weight holds {what}, one after the other or alternating, but "
                    f"{projection.style!r} gives each of the {mesh.size()} ranks of {mesh} consecutive features "
                    f"(dimension {_dim(projection, mesh)} of the weight). Write ColwiseParallel(packed={times}) if the "
                    "code splits the output by chunk or split, with heads= for parts of other sizes. Add "
                    "use_local_output=False if it splits by sizes of the full tensor. Write packed=1 if the parts "
                    f"alternate, head by head or feature by feature{row}"
                )


def _check_latent(projection: _Projection, latent: Latent, mesh: DeviceMesh) -> None:
    """Raise ValueError if the plan cuts heads of latent keys and values, or if a gradient would stay partial."""
    path, style = projection.path, projection.style
    left, row = latent.features - projection.inputs, next(iter(projection.taken.values()))
    if style._is_packed and style.heads is None:
        raise ValueError(
            f"{path!r} takes {projection.inputs} of the {latent.features} features of {latent.path!r}, as in latent "
            "attention, where keys and values alternate head by head in the output. But "
            f"{style!r} splits the output into parts of {style.parts(projection.module, mesh.platform, path)} "
            "features, which are sharded one by one. Leave packed= out. If all keys come before all values, pass "
            "their numbers of heads with heads=(keys, values)"
        )
    if not latent._says_how_it_is_read:
        raise ValueError(
            f"{latent.path!r} returns {latent.features} features, and {path!r} takes {projection.inputs} of them. The "
            f"other {left} features are read by code before {row!r}, which has this rank's heads only. So each of the "
            f"{mesh.size()} ranks of {mesh} computes a partial gradient of them. Use "
            f"NoParallel(partial_features={left}) for {latent.path!r}, which sums this gradient over the ranks. Use "
            "partial_features=0 if the gradient is the same on all ranks"
        )


def _dim(projection: _Projection, mesh: DeviceMesh) -> int:
    return mesh.platform.kind_of(projection.module).out_dim
