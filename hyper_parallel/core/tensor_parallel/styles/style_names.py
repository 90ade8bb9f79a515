"""Names of styles in plans, as in the plans of Hugging Face's models (``base_model_tp_plan``)."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from hyper_parallel.core.layouts.placement_types import Replicate
from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle
from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
from hyper_parallel.core.tensor_parallel.styles.head_norm import HeadNormParallel
from hyper_parallel.core.tensor_parallel.styles.replicated import NoParallel
from hyper_parallel.core.tensor_parallel.styles.rowwise import RowwiseParallel
from hyper_parallel.core.tensor_parallel.styles.sequence import SequenceParallel


def _colwise_gathered() -> ParallelStyle:
    return ColwiseParallel(output_layouts=Replicate())


def _rowwise_whole_input() -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate())


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "packed_colwise": lambda: ColwiseParallel(packed=2),
    "packed_rowwise": lambda: RowwiseParallel(packed=2),
    # transformers 5 renamed these two styles; both names are known.
    "colwise_rep": _colwise_gathered,
    "colwise_gather_output": _colwise_gathered,
    "rowwise_rep": _rowwise_whole_input,
    "rowwise_split_input": _rowwise_whole_input,
    "embedding_rowwise": _rowwise_whole_input,
    "embedding_colwise": _colwise_gathered,
    # In transformers these have plain local weights; here parameters are always DTensors.
    "local_colwise": ColwiseParallel,
    "local_rowwise": RowwiseParallel,
    "local_packed_rowwise": lambda: RowwiseParallel(packed=2),
    "sequence_parallel": SequenceParallel,
    "replicate": NoParallel,
    "replicated": NoParallel,
    "replicated_with_grad_allreduce": HeadNormParallel,
}


def style_by_name(name: str, where: str) -> ParallelStyle:
    """Return a new style by its name.

    Args:
        name: one of `style_names`, such as ``"colwise"`` or ``"rowwise"``.
        where: key of the plan, for the message.

    Raises:
        ValueError: for an unknown name; the message lists the nearest known names.
    """
    make = _STYLES.get(name)
    if make is None:
        near = difflib.get_close_matches(name, _STYLES, n=3, cutoff=0.4)
        hint = f"the nearest are {', '.join(map(repr, near))}" if near else f"the names are {', '.join(_STYLES)}"
        raise ValueError(f"the plan has {name!r} for {where!r}, which is not the name of a style: {hint}")
    return make()


def style_names() -> tuple[str, ...]:
    """Return all names of styles that a plan may use.

    Example:
        >>> "colwise_rep" in style_names()
        True
    """
    return tuple(_STYLES)


def register_style(name: str, factory: Callable[[], ParallelStyle]) -> None:
    """Register a name for a user-defined style, for use in plans.

    Args:
        name: the name. An existing name is replaced.
        factory: a class or function that takes no arguments and returns a style. It is called for each key of a plan
            with this name.

    Raises:
        TypeError: if ``name`` is not a string or ``factory`` is not callable.

    Example:
        >>> from hyper_parallel import Shard, ColwiseParallel, register_style
        >>> register_style("colwise_sequence", lambda: ColwiseParallel(input_layouts=Shard(1)))

    Source: ``transformers.integrations.tensor_parallel.ParallelInterface.register``.
    """
    if not isinstance(name, str) or not callable(factory):
        raise TypeError(
            f"register_style takes a name and a function that returns a style, got {name!r} and {factory!r}"
        )
    _STYLES[name] = factory
