"""State-space mixers (Mamba, Mamba 2), whose inner channels are sharded over the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hyper_parallel.core.dtensor.api import distribute_parameter
from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.layouts.placement_types import Placement
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.plain_code.following import FOLLOWING
from hyper_parallel.core.tensor_parallel.program.local_forward import LocalForward
from hyper_parallel.core.tensor_parallel.styles.base import ModuleStyle, mark_applied
from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
from hyper_parallel.core.tensor_parallel.styles.rowwise import RowwiseParallel

__all__ = ["ColumnsOfHeads", "LocalMixer", "RowsReadByParts"]


class LocalMixer(ModuleStyle):
    """Run the forward of a mixer on this rank's channels, from its column-wise to its row-wise projection.

    Convolution and scan process each channel, or each head, independently. So the mixer's own code computes with this
    rank's shards of their parameters, without communication. Submodules with separate styles keep these styles.

    Args:
        placements: placement of each parameter that the mixer's code reads, by its name relative to the mixer.
        sizes: sizes of this rank, by the name of the attribute that the code reads.

    Raises:
        ValueError: when applied, for a parameter that the mixer itself holds and that is missing in ``placements``.

    Source: the sharded mixers of Mamba-2 (Dao and Gu 2024, section 8.1).
    """

    def __init__(self, placements: Mapping[str, Placement], sizes: Mapping[str, int]) -> None:
        self.by_name = dict(placements)
        self.sizes = dict(sizes)

    def check(self, module: Any, device_mesh: DeviceMesh, where: str) -> None:
        super().check(module, device_mesh, where)
        own = [name for name, _ in device_mesh.platform.named_parameters(module)]
        if forgotten := [name for name in own if name not in self.by_name]:
            raise ValueError(
                f"{where!r} has the parameters {', '.join(map(repr, forgotten))}, which the library's plan for it "
                "lacks: this release of transformers is not supported. Remove the mixer and its projections from the "
                f"plan, plan={{{where!r}: None}}"
            )

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        below = dict(device_mesh.platform.named_modules(module))
        for name, placement in self.by_name.items():
            path, _, parameter = name.rpartition(".")
            distribute_parameter(below[path], parameter, device_mesh, (placement,), src_data_rank=self.src_data_rank)
        for name, size in self.sizes.items():
            setattr(module, name, size)
        cls = type(module)
        module.__class__ = type(cls.__name__, (_LocalChannels, cls), {"__module__": cls.__module__})
        vars(module)["_local_names"] = tuple(self.by_name)
        mark_applied(module, self, device_mesh)
        return module


class _LocalChannels:
    """Mixin of a mixer's class whose forward reads this rank's shards of parameters, including submodules', as plain
    tensors."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the mixer's own class with this rank's shard of each parameter."""
        # An attribute in the object's dictionary takes precedence over a parameter, which modules store elsewhere.
        below = dict(self.named_modules())  # type: ignore[attr-defined]
        shown: list[tuple[dict[str, Any], str]] = []
        own = vars(self)
        training = own["training"]
        try:
            for name in own["_local_names"]:
                path, _, parameter = name.rpartition(".")
                value = getattr(below[path], parameter)
                if isinstance(value, DTensor):
                    vars(below[path])[parameter] = value.to_local()
                    shown.append((vars(below[path]), parameter))
            # In training the code of transformers calls one kernel for the whole mixer, including its projections. That
            # kernel would not add the summands of the ranks.
            own["training"] = False
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            own["training"] = training
            for names, parameter in shown:
                names.pop(parameter, None)


#: The reason for not following the code of a mixer.
_BY_HEADS = "a mixer by heads"


class ColumnsOfHeads(ColwiseParallel):
    """`ColwiseParallel` of a packed weight, where the code splits the output into groups of matrices.

    Sharding rules only support a split into single matrices. So `check_plain_code` does not follow the code of the
    mixer.
    """

    program = ColwiseParallel.program

    def prepare_output(self, module: Any, y: Any, i: int, what: str, mesh: DeviceMesh) -> Any:
        given = super().prepare_output(module, y, i, what, mesh)
        if FOLLOWING:
            FOLLOWING[-1].lose(given, _BY_HEADS, mesh)
        return given

    def local_forward(self, module: Any, forward: Any, mesh: DeviceMesh) -> LocalForward | None:
        local = super().local_forward(module, forward, mesh)
        return None if local is None else replace(local, gives=None, lost=_BY_HEADS)


class RowsReadByParts(RowwiseParallel):
    """`RowwiseParallel` whose replicated output is read by code that computes only some channels.

    So the cotangent of the output is partial, and backward has one more all-reduce.
    """

    partial_output_features = -1
