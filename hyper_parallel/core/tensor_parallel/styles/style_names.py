"""Styles by name, as the plans of Hugging Face's models (``base_model_tp_plan``) spell them."""

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
    # Each pair is one style under its name before and since transformers 5.
    "colwise_rep": _colwise_gathered,
    "colwise_gather_output": _colwise_gathered,
    "rowwise_rep": _rowwise_whole_input,
    "rowwise_split_input": _rowwise_whole_input,
    "embedding_rowwise": _rowwise_whole_input,
    "embedding_colwise": _colwise_gathered,
    # Weights as plain local tensors, there; here parameters are distributed tensors always.
    "local_colwise": ColwiseParallel,
    "local_rowwise": RowwiseParallel,
    "local_packed_rowwise": lambda: RowwiseParallel(packed=2),
    "sequence_parallel": SequenceParallel,
    "replicate": NoParallel,
    "replicated": NoParallel,
    "replicated_with_grad_allreduce": HeadNormParallel,
}


def style_by_name(name: str, where: str) -> ParallelStyle:
    """A new style.

    Args:
        name: ``"colwise"``, ``"rowwise"``, ...: see `style_names`.
        where: the plan's key, for the message.

    Raises:
        ValueError: for an unknown name; the nearest ones are named.
    """
    make = _STYLES.get(name)
    if make is None:
        near = difflib.get_close_matches(name, _STYLES, n=3, cutoff=0.4)
        hint = f"the nearest are {', '.join(map(repr, near))}" if near else f"there are {', '.join(_STYLES)}"
        raise ValueError(f"the plan gives {where!r} the style {name!r}, which is not the name of one; {hint}")
    return make()


def style_names() -> tuple[str, ...]:
    """All names that a plan may use.

    Example:
        >>> "colwise_rep" in style_names()
        True
    """
    return tuple(_STYLES)


def register_style(name: str, factory: Callable[[], ParallelStyle]) -> None:
    """Let plans name a style of your own.

    Args:
        name: the name; one that exists is replaced.
        factory: a class or a function without arguments; it is called, and gives a style, for each module that a plan
            gives the name.

    Raises:
        TypeError: when ``name`` is no string or ``factory`` cannot be called.

    Example:
        >>> from hyper_parallel import Shard, ColwiseParallel, register_style
        >>> register_style("colwise_sequence", lambda: ColwiseParallel(input_layouts=Shard(1)))

    Source: ``transformers.integrations.tensor_parallel.ParallelInterface.register``.
    """
    if not isinstance(name, str) or not callable(factory):
        raise TypeError(f"register_style takes a name and a function that makes a style, got {name!r} and {factory!r}")
    _STYLES[name] = factory
