"""Attention heads: the projections that can be sharded by heads, and the sizes that the models' code reads."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.layouts.placement_types import Replicate, Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel.checks.attention import Attention
from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle
from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
from hyper_parallel.core.tensor_parallel.styles.head_norm import HeadNormParallel
from hyper_parallel.core.tensor_parallel.styles.rowwise import RowwiseParallel
from hyper_parallel.integrations.huggingface.latent import LatentKeyParallel
from hyper_parallel.integrations.huggingface.local import LocalParametersParallel

__all__ = ["fit_heads"]

#: Attribute: number of query heads for each key and value head. The code repeats keys and values so many times.
_GROUPS = "num_key_value_groups"
#: Attribute: features of the query, and of the key. GPT-2 splits the output of its fused projection by it.
_SPLIT = "split_size"


def fit_heads(
    styles: dict[str, ParallelStyle], modules: dict[str, Any], mesh: DeviceMesh, *, gather_heads: bool
) -> list[tuple[Any, str, int]]:
    """Change the styles of attention projections to fit the number of heads.

    Args:
        styles: styles by path; changed in place.
        modules: all modules of the model, by path.
        mesh: 1-D mesh.
        gather_heads: whether each rank computes an attention in full, if the ranks cannot share its heads.

    Returns:
        (module, attribute, value) for the sizes that the modules' code must read to compute with local heads.

    Raises:
        ValueError: if ranks cannot share the heads and ``gather_heads`` is False. Also for a module with fewer key and
            value heads than ranks whose code is unknown.
    """
    local_sizes: list[tuple[Any, str, int]] = []
    for path, module in modules.items():
        projections = _projections(path, styles, modules, mesh)
        attention = Attention.of(module) if projections else None
        if attention is None:
            continue
        heads, key_value, ranks = attention.heads[1], attention.key_value_heads[1], mesh.size()
        if heads % ranks == 0 and key_value % ranks == 0:
            local_sizes += _own_sizes(module, attention, ranks)
            if hasattr(module, _SPLIT):
                local_sizes.append((module, _SPLIT, getattr(module, _SPLIT) // ranks))
        elif heads % ranks == 0 and ranks % key_value == 0:
            if getattr(module, _GROUPS, None) != heads // key_value:
                raise ValueError(
                    f"{path!r} has {key_value} key and value heads for {ranks} ranks. Ranks can share a head only if "
                    f"{type(module).__name__} has the attribute {_GROUPS}={heads // key_value}, which becomes "
                    f"{heads // ranks} on each rank: use gather_heads=True, or fewer ranks"
                )
            for below, features in projections.items():
                if attention.of_projection(below.rpartition(".")[2], features) == attention.key_value_heads:
                    styles[below] = ColwiseParallel(heads=key_value, replicate_heads=True)
            local_sizes += _own_sizes(module, attention, ranks)
            local_sizes.append((module, _GROUPS, heads // ranks))
        elif gather_heads:
            _gather(path, styles)
        else:
            both = f"{heads} heads" if key_value == heads else f"{heads} heads and {key_value} key and value heads"
            fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (key_value % n == 0 or n % key_value == 0)]
            raise ValueError(
                f"{path!r} has {both}, which do not divide over the {ranks} ranks of {mesh}. Use a mesh of "
                f"{', '.join(map(str, fitting))} ranks, or gather_heads=True, which computes full attention on every "
                "rank"
            )
    return local_sizes


def _projections(
    path: str, styles: dict[str, ParallelStyle], modules: dict[str, Any], mesh: DeviceMesh
) -> dict[str, int]:
    """Return output features, by path, of the projections directly below ``path`` that are sharded by heads."""
    found = {}
    for below, style in styles.items():
        if not below or below.rpartition(".")[0] != path or not mesh.platform.is_linear_module(modules[below]):
            continue
        if isinstance(style, ColwiseParallel) and style.output_layouts == (Shard(-1),) and style.use_local_output:
            found[below] = style.features(modules[below], mesh.platform)
    return found


def _own_sizes(module: Any, attention: Attention, ranks: int) -> list[tuple[Any, str, int]]:
    """Return the module's attributes for numbers of heads, with the local numbers. Code such as OPT's reshapes features
    to the number of heads, and infers the length of the sequence. So the global number would give wrong results without
    an error."""
    numbers = dict((attention.key_value_heads, attention.heads))
    return [(module, name, max(number // ranks, 1)) for name, number in numbers.items() if name in vars(module)]


def _gather(path: str, styles: dict[str, ParallelStyle]) -> None:
    """Gather the outputs of the projections below ``path``, so that every rank computes the attention between them in
    full.

    The row-wise projection is in the same module or, as in BERT, in a sibling module.
    """
    rows = [below for below, style in styles.items() if below and isinstance(style, RowwiseParallel)]
    beside = [below for below in rows if below.rpartition(".")[0] == path]
    for below in beside or [below for below in rows if below.startswith(f"{path.rpartition('.')[0]}.")]:
        styles[below] = RowwiseParallel(input_layouts=Replicate())
    for below, style in list(styles.items()):
        if below.rpartition(".")[0] != path:
            continue
        if isinstance(style, ColwiseParallel):
            styles[below] = ColwiseParallel(output_layouts=Replicate())
        elif isinstance(style, (HeadNormParallel, LatentKeyParallel)):
            del styles[below]
    if isinstance(styles.get(path), LocalParametersParallel):
        del styles[path]  # parameters of heads, which are replicated now
