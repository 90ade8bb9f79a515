"""`ExpertsParallel`: stacked experts that compute with plain local tensors."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.placement_types import Partial, Placement, Replicate
from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.tensor_parallel.base import ModuleStyle

__all__ = ["ExpertsParallel"]


class ExpertsParallel(ModuleStyle):
    """Run experts whose weights are sharded inside each expert: every rank computes a summand of the output.

    Forward is the module's own, on this rank's part of the weights and on plain inputs, so that it may do what no
    sharding rule describes: choose tokens by the router's indices, call a grouped kernel. One all-reduce in forward,
    one in backward for each input that needs a gradient.

    Args:
        placements: placement of each parameter of the module, by name; all must be sharded such that the module's
            output is a sum over the ranks, as gate and up by columns and down by rows.

    Raises:
        ValueError: when applied, for a module with further parameters: what every rank adds would count several times.

    Source: ``MoeExpertsParallel`` of Hugging Face transformers.
    """

    def __init__(self, placements: dict[str, Placement]) -> None:
        self.placements = dict(placements)

    def check(self, module: Any, device_mesh: DeviceMesh, where: str) -> None:
        super().check(module, device_mesh, where)
        for path, submodule in device_mesh.platform.named_modules(module):
            for name, _ in device_mesh.platform.named_parameters(submodule):
                placement = None if path else self.placements.get(name)
                if placement is None or placement is Replicate():
                    raise ValueError(
                        f"the plan shards the experts {where!r} and not their parameter "
                        f"{f'{path}.{name}' if path else name!r}, which every rank would add: name it, or take "
                        f"{where!r} and its parameters out of the plan"
                    )

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        cls = type(module)
        # A class of its own, not a new forward on the object: a copy of the object must run on its own parameters.
        # Before the style takes the forward of the class as the one that it runs between its conversions.
        module.__class__ = type(cls.__name__, (_LocalParameters, cls), {"__module__": cls.__module__})
        return super()._apply(module, device_mesh)

    def prepare_inputs(self, module: Any, args: tuple, kwargs: dict, mesh: DeviceMesh) -> tuple[tuple, dict]:
        return tuple(_read(x, mesh) for x in args), {key: _read(x, mesh) for key, x in kwargs.items()}

    def prepare_outputs(self, module: Any, output: Any, mesh: DeviceMesh) -> Any:
        return DTensor.from_local(output, mesh, (Partial(),)).redistribute(placements=(Replicate(),)).to_local()


def _read(x: Any, mesh: DeviceMesh) -> Any:
    """A replicated input, whose gradient each rank computes a part of."""
    platform = mesh.platform
    if not platform.is_tensor(x) or not platform.is_floating_point(x):
        return x
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, (Replicate(),))
    return x.redistribute(placements=(Replicate(),)).to_local(grad_placements=(Partial(),))


class _LocalParameters:
    """Mixed into a module's class: forward sees this rank's part of each parameter as a plain tensor."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the class below."""
        # An attribute in the object's own dictionary comes before the parameters, which modules keep elsewhere.
        own = vars(self)
        local = {name: p.to_local() for name, p in self.named_parameters(recurse=False)}  # type: ignore[attr-defined]
        own.update(local)
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            for name in local:
                own.pop(name, None)
