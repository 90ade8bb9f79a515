"""The shorter way of a module with a single input, of which all is known when its style is applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.layouts.placement_types import Placement


@dataclass(frozen=True)
class LocalForward:
    """What a module runs in place of its forward, by what its only input is.

    Both give NotImplemented, having done nothing, for an input that they do not know, and for a module whose parameters
    are not those of the plan any more: something else was put in their place, or computes them (a parametrization).

    Attributes:
        plain: ``plain(module, x)`` for a plain tensor, None where the style must look at it.
        distributed: ``distributed(module, x)`` for a DTensor.
        given: what ``plain`` takes a plain tensor for, where the ranks must compare theirs: shards by their sizes, what
            is replicated by its values.
    """

    plain: Callable[[Any, Any], Any] | None
    distributed: Callable[[Any, Any], Any]
    given: Placement | None = None
