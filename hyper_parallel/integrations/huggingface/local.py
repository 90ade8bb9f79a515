"""Modules whose forward computes with this rank's shards of their parameters, as plain tensors."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.api import distribute_parameter
from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.layouts.placement_types import Placement
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel.styles.base import ModuleStyle, mark_applied

__all__ = ["LocalParametersParallel", "read_local_parameters"]


class LocalParametersParallel(ModuleStyle):
    """Shard the parameters that a module itself holds; its forward, inputs and outputs do not change.

    It is for parameters between sharded features, such as one number for each attention head. Submodules have separate
    styles, or none.

    Args:
        placements: placement of each parameter that the module itself holds, by name.

    Raises:
        ValueError: when applied, for a parameter that is not named. It would be combined with shards of other
            parameters, and its gradient would be a summand on every rank.

    Source: ``LocalParamsParallel`` of Hugging Face transformers.
    """

    def __init__(self, placements: dict[str, Placement]) -> None:
        self.placements = dict(placements)

    def check(self, module: Any, device_mesh: DeviceMesh, where: str) -> None:
        super().check(module, device_mesh, where)
        own = [name for name, _ in device_mesh.platform.named_parameters(module)]
        if forgotten := [name for name in own if name not in self.placements]:
            raise ValueError(
                f"the plan has the style 'local_params' for {where!r}, but no styles for its parameters "
                f"{', '.join(map(repr, forgotten))}. Add styles for these parameters. For a parameter with one "
                "number for each head, the style is 'colwise'"
            )

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        for name, placement in self.placements.items():
            distribute_parameter(module, name, device_mesh, (placement,), src_data_rank=self.src_data_rank)
        read_local_parameters(module)
        mark_applied(module, self, device_mesh)
        return module


def read_local_parameters(module: Any, *mixins: type) -> None:
    """Let the forward of a module read this rank's shard of each parameter that the module itself holds. The forwards
    of the classes ``mixins`` read shards too.

    The module gets a new class, not a new forward on the object. So a copy of the object uses its own parameters.
    """
    cls = type(module)
    module.__class__ = type(cls.__name__, (_LocalParameters, *mixins, cls), {"__module__": cls.__module__})


class _LocalParameters:
    """Mixin of a module's class whose forward reads this rank's shard of each parameter as a plain tensor."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module's own class with this rank's shard of each parameter."""
        # An attribute in the object's dictionary takes precedence over a parameter, which modules store elsewhere.
        own = vars(self)
        parameters = self.named_parameters(recurse=False)  # type: ignore[attr-defined]
        local = {name: p.to_local() for name, p in parameters if isinstance(p, DTensor)}
        own.update(local)
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            for name in local:
                own.pop(name, None)
