"""Check that a module still has the parameters that its style distributed.

Other code may replace a parameter after `parallelize_module`: a state dict that is assigned, or a library that wraps
models. The module's forward would then use a full plain tensor as this rank's shard. So all forwards call `are_planned`
of the contract. If a parameter was replaced, fast forwards leave the call to the general forward, which uses
`parameter_check`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.platform.contract.programs import are_planned

#: Attribute of a module that is a unit of data parallelism.
UNIT = "_hyper_parallel_unit"
_PATH = "_hyper_parallel_path"
_LAYOUTS = "_hyper_parallel_layouts"


def name_module(module: Any, path: str) -> None:
    """Store the path of ``module`` in the plan on the module, for messages."""
    object.__setattr__(module, _PATH, path)


def path_of(module: Any) -> str:
    """Return the path of a module that a plan names; otherwise the name of its class."""
    return getattr(module, _PATH, "") or type(module).__name__


def module_label(module: Any) -> str:
    """Return the name of a module for messages: its class, and its path if a plan names it."""
    path = getattr(module, _PATH, "")
    return f"{type(module).__name__} {path!r}" if path else type(module).__name__


def layouts_of(own: Mapping[str, Any]) -> dict[str, Layout | None]:
    """Return the layout of each parameter in a module's table, or None for a parameter that is not distributed."""
    return {name: getattr(p, "_layout", None) for name, p in own.items()}


def remember_layouts(module: Any, mesh: DeviceMesh) -> None:
    """Store the present layouts of the direct parameters on ``module``, for `planned_layouts`."""
    object.__setattr__(module, _LAYOUTS, layouts_of(mesh.platform.own_parameters(module)))


def planned_layouts(module: Any) -> Mapping[str, Layout | None]:
    """Return the layouts that the parameters of ``module`` had when its style was applied; empty without a style."""
    return getattr(module, _LAYOUTS, {})


def parameter_check(module: Any, mesh: DeviceMesh) -> Callable[[Any], None]:
    """Return ``check(module)``, which compares a module's parameters with the present layouts.

    ``check`` accepts ``module`` or a copy of it, and includes submodules. ``check`` raises ValueError for a parameter
    that is plain, on another mesh or in other placements. All ranks with such a parameter raise before any
    communication.
    """
    own_parameters = mesh.platform.own_parameters
    below = []
    for path, submodule in mesh.platform.named_modules(module):
        held = layouts_of(own_parameters(submodule))
        # Parameters that a style left plain may change freely.
        known = [(name, layout) for name, layout in held.items() if layout is not None]
        if known:
            below.append((path, attrgetter(path) if path else None, known))

    def check(module: Any) -> None:
        for path, find, known in below:
            submodule = module if find is None else find(module)
            own = own_parameters(submodule)
            if are_planned(own, known, DTensor):
                continue
            for name, layout in known:
                _check_parameter(own.get(name), f"{path}.{name}" if path else name, layout, module)

    return check


def _check_parameter(p: Any, name: str, planned: Layout, module: Any) -> None:
    """Raise ValueError if the present parameter ``p`` has another mesh or other placements than ``planned``. None, for
    a removed parameter, is accepted."""
    layout = getattr(p, "_layout", None)
    mesh, placements = planned.mesh, list(planned.placements)
    if p is None or (layout is not None and layout.mesh is mesh and layout.placements == planned.placements):
        return  # the planned one, or one of another shape
    what = f"parameter {name!r} of {module_label(module)}"
    if layout is not None:
        where = "" if layout.mesh is mesh else f" on {layout.mesh}"
        raise ValueError(
            f"{what} is placed {list(layout.placements)}{where}, but its style placed it {placements} on {mesh}: "
            f"assign a value with the placement of the style, made with value.redistribute(placements={placements}) "
            f"or distribute_tensor(value.full_tensor(), mesh, {placements})"
        )
    foreign = mesh.platform.foreign_tensor(p)
    raise ValueError(
        f"{what} is {foreign or 'a plain tensor'}, but its style had made it a DTensor of shape "
        f"{tuple(planned.shape)} placed {placements}: the parameter was replaced afterwards. Copy values into the "
        "existing parameter, as load_state_dict does with assign=False. Or assign a parameter made of "
        f"distribute_tensor(value, mesh, {placements}). Under fully_shard the parameter exists only while the unit "
        "runs: call the unit, or its unshard()"
    )
