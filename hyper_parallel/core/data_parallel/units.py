"""Which module is a unit."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.data_parallel.plan import Plan
from hyper_parallel.core.data_parallel.unit import Unit
from hyper_parallel.core.tensor_parallel.planned_parameters import UNIT
from hyper_parallel.core.weak_table import WeakTable

__all__ = ["is_unit", "make_unit", "shows_whole_parameters", "unit_of"]

#: module -> its `Unit`. A copy of a module, which has the plan, makes its own.
_UNITS = WeakTable()


def make_unit(module: Any, plan: Plan) -> None:
    """Make ``module`` a unit."""
    object.__setattr__(module, UNIT, plan)


def is_unit(module: Any) -> bool:
    """Whether `fully_shard` was applied to ``module``, or to what it is a copy of."""
    return hasattr(module, UNIT)


def unit_of(module: Any) -> Unit:
    """The unit of a module to which `fully_shard` was applied, made when it is first asked for."""
    unit = _UNITS.get(module)
    if unit is None:
        unit = Unit(getattr(module, UNIT), module)
        _UNITS.set(module, unit)
    return unit


def shows_whole_parameters(module: Any) -> bool:
    """Whether modules find whole parameters now where a unit has shards: inside of its forward, and after `unshard`."""
    unit = _UNITS.get(module) if is_unit(module) else None
    return unit is not None and unit.parameters.places.holds_others
