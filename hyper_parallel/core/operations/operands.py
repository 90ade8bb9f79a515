"""Questions of dispatch about the operands of an operation."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.platform.contract.interception import name_of

#: The DTensor classes of the platforms in use.
DTENSOR_CLASSES: set[type] = set()
_SCALARS = frozenset({int, float, bool, complex, type(None), str})


def operand_key(x: Any) -> Any:
    """Return the facts that a plan depends on: the layout of a DTensor or the shape of a plain tensor. Other
    operands give None."""
    if type(x) in _SCALARS:
        return None
    try:
        return x._layout
    except AttributeError:
        pass
    try:
        shape = getattr(x, "shape", None)
    except RuntimeError:
        shape = ()  # a nested tensor has none: see `refuse_foreign`
    return None if shape is None else tuple(shape)


def common_mesh(layouts: tuple, func: Any) -> DeviceMesh | None:
    """The mesh of the operands, None when none is distributed.

    Raises:
        ValueError: when they are on different meshes.
    """
    mesh = None
    for layout in layouts:
        if isinstance(layout, Layout):
            if mesh is not None and layout.mesh is not mesh:
                raise ValueError(
                    f"{name_of(func)} got tensors on different meshes, {mesh} and {layout.mesh}: bring them to one "
                    "mesh (full_tensor, then distribute_tensor)"
                )
            mesh = layout.mesh
    return mesh


def mixed_error(func: Any, layouts: tuple, plain: int) -> ValueError:
    """The error for a plain tensor, operand ``plain``, that meets a distributed one."""
    other = next(i for i, layout in enumerate(layouts) if isinstance(layout, Layout))
    return ValueError(  # no TypeError: frameworks turn one in a dunder into "unsupported operand"
        f"{name_of(func)} got a plain tensor (operand {plain}, shape {layouts[plain]}) and a DTensor (operand {other}, "
        f"global shape {tuple(layouts[other].shape)}, placements {list(layouts[other].placements)}): make the plain "
        "one a DTensor with DTensor.from_local or distribute_tensor, or work on to_local(), or, when it is the same on "
        "all ranks, use `with implicit_replication():`"
    )


def refuse_foreign(x: Any, platform: Any, what: str) -> None:
    """Raise TypeError when ``x`` is a tensor that DTensors cannot be made of or meet; ``what`` names who got it."""
    foreign = platform.foreign_tensor(x)
    if foreign is not None:
        raise TypeError(f"{what} got {foreign}")
