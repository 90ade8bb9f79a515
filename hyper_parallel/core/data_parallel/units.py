"""Modules that are units, and modules that belong to a unit of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.data_parallel.plan import Plan
from hyper_parallel.core.data_parallel.unit import Unit
from hyper_parallel.core.tensor_parallel.program.planned_parameters import UNIT
from hyper_parallel.core.weak_table import WeakTable

__all__ = ["is_unit", "make_unit", "shows_whole_parameters", "unit_of"]

#: module -> its `Unit`. A copy of a module has the same plan, and makes its own unit.
_UNITS = WeakTable()
#: Attribute of a module in a unit of several: the `_Modules` of these.
_GROUP = "_fully_sharded_group"


class _Modules:
    """The modules of one unit. A copy of one of them has a copy of this, with copies of all."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self.modules = list(modules)


def make_unit(modules: Sequence[Any], plan: Plan) -> None:
    """Make ``modules`` a unit."""
    group = _Modules(modules)
    for module in modules:
        object.__setattr__(module, UNIT, plan)
        if len(modules) > 1:
            object.__setattr__(module, _GROUP, group)


def is_unit(module: Any) -> bool:
    """Return whether `fully_shard` was applied to ``module``, or to a module that it is a copy of."""
    return hasattr(module, UNIT)


def unit_of(module: Any) -> Unit:
    """Return the unit of a module to which `fully_shard` was applied, made when it is first asked for."""
    unit = _UNITS.get(module)
    if unit is None:
        group = vars(module).get(_GROUP)
        modules = [module] if group is None else group.modules
        unit = Unit(getattr(module, UNIT), modules)
        for one in modules:
            _UNITS.set(one, unit)
    return unit


def shows_whole_parameters(module: Any) -> bool:
    """Return whether modules find whole parameters now where a unit has shards: inside of its forward."""
    unit = _UNITS.get(module) if is_unit(module) else None
    return unit is not None and unit.parameters.places.holds_others
