"""Tuples of parameters that cells store as attributes, such as the weights of recurrent layers.

A cell has each of these parameters in its table too. While a data-parallel unit runs, other tensors replace the
parameters in the table. Code that reads the tuple must get these tensors too.
"""

from __future__ import annotations

from functools import cache
from operator import is_
from typing import Any

from mindspore import ParameterTuple

__all__ = ["read_from_table"]

#: Attribute of a cell: attribute -> the tuple, and the names of its parameters in the cell's table.
_HELD = "_hp_parameter_tuples"


def read_from_table(cell: Any) -> None:
    """Replace attributes of a cell that are tuples of its parameters.

    The new attributes return the entries of the cell's table.
    """
    attributes = [name for name, value in vars(cell).items() if isinstance(value, ParameterTuple) and value]
    for name in attributes:
        names = _names_in_table(cell, vars(cell)[name])
        if names is not None:
            vars(cell).setdefault(_HELD, {})[name] = (vars(cell)[name], names)
            del vars(cell)[name]
    held = vars(cell).get(_HELD)
    if attributes and held:
        cls: Any = type(cell)
        cell.__class__ = _class_that_reads(cls, tuple(held))


def _names_in_table(cell: Any, parameters: Any) -> tuple[str, ...] | None:
    names = {id(p): name for name, p in cell._params.items()}
    found = [names.get(id(p)) for p in parameters]
    return None if None in found else tuple(map(str, found))


@cache
def _class_that_reads(cls: type, attributes: tuple[str, ...]) -> type:
    """Return a subclass with the same name whose attributes read the table."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "_of_style": True}
    return type(cls.__name__, (cls,), {**names, **{name: _reader(name) for name in attributes}})


def _reader(attribute: str) -> property:
    def read(cell: Any) -> Any:
        held, names = vars(cell)[_HELD][attribute]
        if names is None:
            return held
        found = tuple(cell._params[name] for name in names)
        return held if all(map(is_, held, found)) else found

    def write(cell: Any, value: Any) -> None:
        names = _names_in_table(cell, value) if isinstance(value, ParameterTuple) else None
        vars(cell)[_HELD][attribute] = (value, names)

    return property(read, write)
