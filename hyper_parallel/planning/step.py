"""One training step of one rank in a world of any size, on a copy of a model without data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from hyper_parallel.core.communication.recorder import LISTENERS, CollectiveEvent, attributed_backwards
from hyper_parallel.core.dtensor.tensor import DTensor, bind_platform
from hyper_parallel.core.mesh.device_mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.plain_code.api import check_plain_code
from hyper_parallel.core.plain_code.following import Following
from hyper_parallel.core.tensor_parallel.api import parallelize_module
from hyper_parallel.core.tensor_parallel.checks.paths import Paths
from hyper_parallel.core.tensor_parallel.checks.plan import LISTED, did_you_mean
from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle
from hyper_parallel.core.tensor_parallel.styles.context import ContextParallel
from hyper_parallel.core.trees import map_tensors, tensors_in
from hyper_parallel.debug.collective import Collective
from hyper_parallel.debug.module_scopes import ModuleScopes
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.contract.modules import APPLIED
from hyper_parallel.platform.dry import dry_world

__all__ = ["DryStep", "DryStepError", "apply_plan", "data_mesh", "mesh_of", "unmatched_keys"]

#: Forms in which a mesh can be specified.
MeshLike = DeviceMesh | int | Sequence[int] | Mapping[str, int]


class DryStepError(RuntimeError):
    """Error for a model that cannot run on tensors without data, or fails under its plan. The ``__cause__`` is the
    framework's error."""


def mesh_of(mesh: MeshLike) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return shape and names of a mesh, from a `DeviceMesh`, a number of ranks, its shape, or sizes by name.

    Raises:
        TypeError, ValueError: for any other object, and for sizes below 1.

    Example:
        >>> mesh_of({"dp": 64, "tp": 8}), mesh_of(8), mesh_of((2, 4))
        (((64, 8), ('dp', 'tp')), ((8,), ('tp',)), ((2, 4), ('dp', 'tp')))
    """
    if isinstance(mesh, DeviceMesh):
        return mesh.shape, mesh.mesh_dim_names or _usual_names(mesh.ndim)
    if isinstance(mesh, Mapping):
        shape, names = tuple(mesh.values()), tuple(mesh)
    else:
        shape = (mesh,) if isinstance(mesh, (int, np.integer)) else tuple(mesh)
        names = _usual_names(len(shape))
    if not shape or any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1 for n in shape):
        raise ValueError(
            "a mesh is a DeviceMesh, a number of ranks, a tuple of sizes, or sizes by name such as {'dp': 64, 'tp': "
            f"8}}. Sizes are at least 1, got {mesh!r}"
        )
    return tuple(int(n) for n in shape), names


def _usual_names(ndim: int) -> tuple[str, ...]:
    names = {1: ("tp",), 2: ("dp", "tp")}
    return names.get(ndim) or tuple(f"dim{i}" for i in range(ndim))


def apply_plan(model: Any, mesh: DeviceMesh, plan: Any) -> Any:
    """Apply a plan to ``model`` and return the model. A plan for `parallelize_module` is applied on the dimension
    ``"tp"`` of a mesh with several dimensions. The plan's `ContextParallel` styles are applied on the dimension
    ``"cp"``. A plan that is a function is called with model and mesh. With None as plan, nothing changes.

    Raises:
        ValueError: for a plan for `parallelize_module` on a mesh of several dimensions without ``"tp"``.
    """
    if plan is None:
        return model
    if callable(plan) and not isinstance(plan, ParallelStyle):
        changed = plan(model, mesh)
        return model if changed is None else changed
    names = mesh.mesh_dim_names or ()
    of_sequences: dict[str, ParallelStyle | str] = {}
    if "cp" in names and isinstance(plan, Mapping):
        of_sequences = {path: style for path, style in plan.items() if isinstance(style, ContextParallel)}
        plan = {path: style for path, style in plan.items() if path not in of_sequences}
    if of_sequences:
        if plan:
            model = apply_plan(model, mesh, plan)
        return parallelize_module(model, mesh["cp"], of_sequences)
    if mesh.ndim > 1 and "tp" not in names:
        raise ValueError(
            f'a plan of styles needs a mesh dimension "tp", got {mesh.mesh_dim_names}: name the dimension "tp", or '
            "pass a function plan(model, mesh) that applies the styles"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the plan's .* matches no module")
        return parallelize_module(model, mesh if mesh.ndim == 1 else mesh["tp"], plan)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of all ranks with different tokens: dimension ``"dp"``, joined with ``"cp"`` if that exists."""
    names = tuple(name for name in ("dp", "cp") if name in (mesh.mesh_dim_names or ()) and mesh[name].size() > 1)
    return mesh["dp", "cp"]._flatten("dp_cp") if len(names) == 2 else mesh[names[0] if names else "dp"]


def unmatched_keys(plan: Any, paths: Sequence[str]) -> dict[str, str]:
    """Return the keys of a plan that match no module, each with a suggestion of similar paths. Only the first few have
    a suggestion."""
    if not isinstance(plan, Mapping):
        return {}
    known = Paths(paths)
    keys = [key for key in plan if isinstance(key, str) and not known.matching(key)]
    near = {key: did_you_mean(key, paths).removeprefix("; ") for key in keys[:LISTED]}
    return {key: near.get(key, "") for key in keys}


class DryStep:
    """A model under its plan on one rank of a simulated mesh, and a training step of it.

    Args:
        model: model of the selected framework, without a plan, on any device; it is copied and not changed.
        mesh: a `DeviceMesh`, a number of ranks, a shape, or sizes by name.
        plan: plan for `apply_plan`.
        rank: the simulated rank.
        change: function that is called as ``change(model, mesh)`` after the plan was applied.

    Attributes:
        platform: the dry platform.
        mesh: the `DeviceMesh`.
        model: copy of the model, under the plan.
        unmatched: result of `unmatched_keys`.
        setup: the collectives of applying the plan.
        plain_code: the report of the last `run` with ``prove``, else None.

    Raises:
        TypeError: for a model of another framework. ValueError: for a model that has a plan already, and for all that
            the plan's functions refuse.
    """

    def __init__(
        self,
        model: Any,
        mesh: MeshLike,
        plan: Any,
        rank: int = 0,
        change: Callable[[Any, DeviceMesh], None] | None = None,
    ) -> None:
        shape, names = mesh_of(mesh)
        platform = get_platform()
        if not isinstance(model, platform.Module):
            raise TypeError(
                f"the model must be a {platform.Module.__name__} of the platform {platform.name!r}, got "
                f"{type(model).__name__}: pass such a module, or choose another platform with HYPER_PARALLEL_PLATFORM"
            )
        modules = dict(platform.named_modules(model))
        for path, module in modules.items():
            if getattr(module, APPLIED, ()) or any(
                isinstance(p, DTensor) for _, p in platform.named_parameters(module)
            ):
                raise ValueError(
                    f"{path or type(module).__name__!r} is parallelised already: pass the model before "
                    "parallelize_module, and the plan. To inspect a parallelised model, call describe(model)"
                )
        self.unmatched = unmatched_keys(plan, list(modules))
        self.setup: list[Collective] = []
        self.plain_code: Following | None = None
        self._size, self.rank = math.prod(shape), rank
        with dry_world(self._size, rank) as self.platform, self.platform.without_data():
            self._world = self.platform.world()  # its meshes are known while it lives
            bind_platform(self.platform)
            self.mesh = init_device_mesh(None, shape, mesh_dim_names=names)
            self.model = self.platform.copy_without_data(model)
            with _Listening(self.setup):
                self.model = apply_plan(self.model, self.mesh, plan)
                if change is not None:
                    change(self.model, self.mesh)

    def parameters(self) -> list[Any]:
        """Return the parameters of the model. Of tied parameters only the first is included."""
        found: dict[int, Any] = {}
        for _, module in self.platform.named_modules(self.model):
            found.update({id(p): p for _, p in self.platform.named_parameters(module)})
        return list(found.values())

    def optimizer_bytes(self, optimizer: str) -> int | None:
        """Return this rank's bytes of optimizer state, for the framework's optimizer of that name; None if unknown."""
        trained = [p for p in self.parameters() if p.requires_grad]
        with dry_world(self._size, self.rank), self.platform.without_data():
            found: int | None = self.platform.optimizer_bytes(trained, optimizer)
        return found

    def run(
        self,
        *inputs: Any,
        loss: Callable[[Any], Any] | None = None,
        backward: bool = True,
        tell: Callable[[str, Any, Any], None] | None = None,
        after_forward: Callable[[], None] | None = None,
        prove: bool = False,
        **kwargs: Any,
    ) -> list[Collective]:
        """Call the model, and differentiate; return the collectives of this rank.

        Args:
            inputs, kwargs: arguments of this rank's call of the model; their values are ignored.
            loss: function ``loss(output)`` that returns a scalar; by default the sum of all elements of the local
                output.
            backward: whether to differentiate.
            tell: function that is called as ``tell(path, args, output)`` after each forward of a module.
            after_forward: function that is called between forward and backward.
            prove: whether to follow plain code. If so, `plain_code` is the report afterwards.

        Raises:
            DryStepError: for an error of the framework.
            TypeError, ValueError: for unsupported uses of the library.
        """
        found: list[Collective] = []
        platform = self.platform

        def call() -> Any:
            output = self.model(*args, **kwargs)
            value = (loss or self._total)(output)
            if after_forward is not None:
                after_forward()
            return value

        with ExitStack() as stack:
            stack.enter_context(dry_world(self._size, self.rank))
            stack.enter_context(platform.without_data())
            args, kwargs = map_tensors((inputs, kwargs), platform.to_device, platform, lambda x: x)
            stack.enter_context(ModuleScopes(self.model, platform, tell))
            stack.enter_context(attributed_backwards())
            stack.enter_context(_Listening(found))
            if prove:
                self.plain_code = stack.enter_context(check_plain_code(self.model))
            try:
                if backward:
                    self.gradients = platform.differentiate(call, self.parameters())
                else:
                    with platform.no_grad():
                        call()
            except (RuntimeError, NotImplementedError) as error:
                raise DryStepError(
                    f"the model does not run with tensors that have no data: {str(error)[:400]}. Create tensors on "
                    "the device of existing tensors (device=x.device), do not read values (item(), if x > 0), and use "
                    "operations that support the meta device"
                ) from error
        return found

    def _total(self, output: Any) -> Any:
        tensors = [x for x in tensors_in(output, self.platform) if self.platform.is_floating_point(x)]
        if not tensors:
            raise ValueError(
                f"the model returned a {type(output).__name__} without floating point tensors: pass loss=..., a "
                "function of the output"
            )
        total = None
        for x in tensors:
            value = (x.to_local() if isinstance(x, DTensor) else x).sum()
            total = value if total is None else total + value
        return total


class _Listening:
    """Context manager that adds the collectives issued inside to ``found``."""

    def __init__(self, found: list[Collective]) -> None:
        self._found = found

    def __enter__(self) -> None:
        LISTENERS.append(self._listen)

    def __exit__(self, *exc_info: object) -> None:
        LISTENERS.remove(self._listen)

    def _listen(self, event: CollectiveEvent) -> None:
        if event.bytes:
            self._found.append(Collective.of(event))
