"""The output head: gathered or sharded logits, and a weight shared with the embedding."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.layouts.placement_types import Replicate, Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle
from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
from hyper_parallel.core.tensor_parallel.styles.rowwise import RowwiseParallel

__all__ = ["fit_head"]


def fit_head(
    model: Any, styles: dict[str, ParallelStyle], modules: dict[str, Any], mesh: DeviceMesh, *, gather_logits: bool
) -> None:
    """Set matching styles of embedding and head; ``styles`` is changed in place.

    Raises:
        ValueError: if the logits shall stay sharded and the model has no column-wise head over the vocabulary.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    head = getattr(head, "base_layer", head)  # with adapters
    path = next((path for path, module in modules.items() if module is head), None)
    _complete_ties(path, styles, modules, mesh)
    if gather_logits:
        return
    style = None if path is None else styles.get(path)
    if path is None or not isinstance(style, ColwiseParallel):
        raise ValueError(
            "gather_logits=False needs a plan with a column-wise head, sharded over the vocabulary, but "
            f"{type(model).__name__} has {'no head' if path is None else f'{path!r} with the style {style!r}'}"
        )
    styles[path] = ColwiseParallel(
        input_layouts=style.input_layouts[0], output_layouts=Shard(-1), use_local_output=False
    )


def _complete_ties(
    head: str | None, styles: dict[str, ParallelStyle], modules: dict[str, Any], mesh: DeviceMesh
) -> None:
    """Complete the styles of an embedding and a head that share a weight. If the plan shards only one of the two, the
    other gets a style too."""
    platform = mesh.platform
    holders: dict[int, list[str]] = {}
    for path, module in modules.items():
        for _, parameter in platform.named_parameters(module):
            holders.setdefault(id(parameter), []).append(path)
    for paths in holders.values():
        planned = [path for path in paths if path in styles]
        if not planned:
            continue
        for path in paths:
            if path in styles:
                continue
            if platform.is_embedding_module(modules[path]):
                if platform.is_embedding_module(modules[planned[0]]):
                    styles[path] = styles[planned[0]]
                elif isinstance(styles[planned[0]], ColwiseParallel):
                    styles[path] = RowwiseParallel(input_layouts=Replicate())
            elif path == head and isinstance(styles[planned[0]], RowwiseParallel):
                styles[path] = ColwiseParallel(output_layouts=Replicate())
