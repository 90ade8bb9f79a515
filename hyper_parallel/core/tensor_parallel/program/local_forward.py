"""The shorter way of a module with a single input, of which all is known when its style is applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.layouts.placement_types import Placement


@dataclass(frozen=True)
class LocalForward:
    """Functions that a module runs in place of its forward, depending on the class of its only input.

    Both give NotImplemented, having done nothing, for an input that they do not know. They do so too for a module whose
    parameters are not those of the plan any more. Others were put in their place, or are computed (a parametrization).

    Attributes:
        plain: ``plain(module, x)`` for a plain tensor, None where the style must look at it.
        distributed: ``distributed(module, x)`` for a DTensor.
        given: the placement that ``plain`` assumes of a plain tensor, where the ranks must compare theirs. They compare
            shards by their sizes, and replicated tensors by their values.
    """

    plain: Callable[[Any, Any], Any] | None
    distributed: Callable[[Any, Any], Any]
    given: Placement | None = None
