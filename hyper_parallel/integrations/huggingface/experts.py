"""Stacked experts that compute with plain local tensors: a shard of every expert on each rank, or some full experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.layouts.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.core.mesh.arrays import rows_by_dims
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel.styles.base import ModuleStyle, ParallelStyle
from hyper_parallel.core.tensor_parallel.styles.experts import ExpertParallel
from hyper_parallel.integrations.huggingface.local import read_local_parameters
from hyper_parallel.platform import get_platform

__all__ = [
    "BiasedExpertsParallel",
    "ExpertsParallel",
    "IdentityExpertsParallel",
    "WholeExpertsParallel",
    "slice_over",
    "with_own_tokens",
]


class ExpertsParallel(ModuleStyle):
    """Run experts whose weights are sharded inside each expert. Every rank computes a partial output.

    The module's own forward runs, on this rank's shards of the weights and on plain inputs. So it may use operations
    that no sharding rule describes. Examples are choosing tokens by the router's indices, and calling a grouped kernel.
    There is one all-reduce in forward, and one in backward for each input that requires a gradient.

    Args:
        placements: placement of each parameter of the module, by name. All must be sharded such that the module's
            output is a sum over the ranks: gate and up column-wise, down row-wise.

    Raises:
        ValueError: when applied, for a module with further parameters, because every rank would add them to its
            summand.

    Source: ``MoeExpertsParallel`` and ``AllReduceParallel`` of Hugging Face transformers.
    """

    _mixins: tuple[type, ...] = ()
    #: Replicated parameters, of which each rank adds its share.
    shared: tuple[str, ...] = ()

    def __init__(self, placements: dict[str, Placement]) -> None:
        self.placements = dict(placements)

    def check(self, module: Any, device_mesh: DeviceMesh, where: str) -> None:
        super().check(module, device_mesh, where)
        for path, submodule in device_mesh.platform.named_modules(module):
            for name, _ in device_mesh.platform.named_parameters(submodule):
                placement = None if path else self.placements.get(name)
                if placement is None or (placement is Replicate() and name not in self.shared):
                    raise ValueError(
                        f"the plan shards the experts {where!r} but not their parameter "
                        f"{f'{path}.{name}' if path else name!r}: every rank would add this parameter to its partial "
                        f"result. Add a style for this parameter, or remove {where!r} and its parameters from the plan"
                    )

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        # It comes before the style saves the class's forward, which runs between its conversions.
        read_local_parameters(module, *self._mixins)
        return super()._apply(module, device_mesh)

    def prepare_inputs(self, module: Any, args: tuple, kwargs: dict, mesh: DeviceMesh) -> tuple[tuple, dict]:
        return tuple(_read(x, mesh) for x in args), {key: _read(x, mesh) for key, x in kwargs.items()}

    def prepare_outputs(self, module: Any, output: Any, mesh: DeviceMesh) -> Any:
        return DTensor.from_local(output, mesh, (Partial(),)).redistribute(placements=(Replicate(),)).to_local()


class _SharedBias:
    """Mixin of a module's class: each rank adds its share of the replicated ``down_proj_bias``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module's own class, with the bias divided by the number of ranks.

        Each rank computes the full gradient of the parameter, because every rank's partial output has the full
        cotangent.
        """
        own = vars(self)
        bias = own["down_proj_bias"]
        share = (bias / own["_ranks"]).detach()
        own["down_proj_bias"] = share + (bias - bias.detach())
        return super().forward(*args, **kwargs)  # type: ignore[misc]


class BiasedExpertsParallel(ExpertsParallel):
    """`ExpertsParallel` for experts with a bias after the row-wise projection, ``down_proj_bias``, as in gpt-oss.

    Args:
        placements: as for `ExpertsParallel`. ``down_proj_bias`` is replicated: each rank adds its share of it.
    """

    _mixins = (_SharedBias,)
    shared = ("down_proj_bias",)

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        vars(module)["_ranks"] = device_mesh.size()
        return super()._apply(module, device_mesh)


class _Connected:
    """Mixin of a module's class: a rank without a token for its experts takes part in backward like all ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module's own class, and let the output always depend on inputs and parameters."""
        y = super().forward(*args, **kwargs)  # type: ignore[misc]
        if not y.requires_grad and get_platform().backward_is_recorded():
            parameters = [getattr(self, name) for name, _ in self.named_parameters(recurse=False)]  # type: ignore[attr-defined]
            for x in (*args, *kwargs.values(), *parameters):
                if getattr(x, "requires_grad", False):
                    y = y + x[:0].sum()
        return y


class WholeExpertsParallel(ExpertsParallel):
    """Place some full experts on each rank, which computes their part of the output for all tokens.

    The tokens are equal on every rank, so no tokens are sent. Routes to experts of other ranks are masked, and one
    all-reduce adds the outputs. In backward there is one all-reduce for each input that requires a gradient.

    Args:
        placements: placement of each parameter of the module, by name: all ``Shard(0)``.

    Raises:
        ValueError: when applied, for a module that does not count its experts in ``num_experts``, a number of experts
            that the number of ranks does not divide, and a parameter that is not sharded by expert; when called, for
            inputs other than hidden states, the experts' indices and their weights.

    Source: ``AllReduceEP`` of Hugging Face transformers.
    """

    _mixins = (_Connected,)

    def check(self, module: Any, device_mesh: DeviceMesh, where: str) -> None:
        super().check(module, device_mesh, where)
        count, ranks = getattr(module, "num_experts", None), device_mesh.size()
        shapes = {name: tuple(p.shape) for name, p in device_mesh.platform.named_parameters(module)}
        for name, placement in self.placements.items():
            if placement is not Shard(0) or shapes[name][0] != count:
                raise ValueError(
                    f"the plan shards {where!r} by expert, but places the parameter {name!r} of shape {shapes[name]} "
                    f"as {placement!r}, for num_experts={count}. Each parameter must be (experts, ...) with the style "
                    "'grouped_gemm'. To shard inside each expert, use 'moe_tp_experts', with 'packed_colwise' and "
                    "'rowwise' for its parameters"
                )
        if not isinstance(count, int) or count % ranks:
            raise ValueError(
                f"{where!r} has {count} experts, which do not divide over the {ranks} ranks of {device_mesh}: use a "
                "mesh whose size divides the number of experts, or shard inside each expert (expert_parallel=False)"
            )

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        super()._apply(module, device_mesh)
        module.num_experts //= device_mesh.size()
        module._is_expert_parallel = True  # the model's kernels skip routes to the expert with number num_experts
        return module

    def prepare_inputs(self, module: Any, args: tuple, kwargs: dict, mesh: DeviceMesh) -> tuple[tuple, dict]:
        args, kwargs = super().prepare_inputs(module, args, kwargs, mesh)
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        indices = [key for key, x in given.items() if _is_index(x, mesh)]
        shape = tuple(given[indices[0]].shape) if len(indices) == 1 else None
        weights = [key for key, x in given.items() if key not in indices and tuple(getattr(x, "shape", ())) == shape]
        if len(weights) != 1:
            raise ValueError(
                f"{type(module).__name__} was called with unsupported arguments: expert parallelism needs hidden "
                "states, indices of experts, and weights of the same shape as the indices. Otherwise shard inside "
                "each expert (expert_parallel=False)"
            )
        index, weight = given[indices[0]], given[weights[0]]
        own = index // module.num_experts == mesh.get_local_rank()
        # Routes to experts of other ranks get the number after the last expert, whose output is ignored.
        given[indices[0]] = (index % module.num_experts) * own + module.num_experts * ~own
        given[weights[0]] = weight * own
        return tuple(given[i] for i in range(len(args))), {key: given[key] for key in kwargs}

    def with_own_tokens(self, top_k: int, **arguments: Any) -> ExpertParallel:
        """Return the corresponding style for ranks with different tokens, which sends tokens between the ranks.

        Args:
            top_k: number of experts of a token, for styles that cannot infer it.
            **arguments: arguments of `ExpertParallel`.
        """
        return ExpertParallel(**arguments)


def _is_index(x: Any, mesh: DeviceMesh) -> bool:
    return mesh.platform.is_tensor(x) and not mesh.platform.is_floating_point(x)


class IdentityExpertsParallel(ModuleStyle):
    """Style of experts that return their input, in a module where the ranks sum the outputs of experts.

    Each rank returns the input divided by the number of ranks.

    Source: ``MoeIdentityParallel`` of Hugging Face transformers.
    """

    input_layouts = output_layouts = (None,)

    def prepare_inputs(self, module: Any, args: tuple, kwargs: dict, mesh: DeviceMesh) -> tuple[tuple, dict]:
        return (args[0] / mesh.size(), *args[1:]), kwargs


def with_own_tokens(
    styles: dict[str, ParallelStyle],
    inside: Mapping[str, ParallelStyle],
    mesh: DeviceMesh,
    over: DeviceMesh,
    top_k: int,
) -> dict[str, ParallelStyle]:
    """Remove the styles of full experts from ``styles``.

    Return the corresponding styles for ranks with different tokens.

    Args:
        styles: styles by path, of the plan for full experts; changed in place.
        inside: styles by path, of the plan that shards inside each expert.
        mesh: mesh of tensor parallelism.
        over: 1-D mesh of the ranks that share the experts.
        top_k: number of experts of a token.

    Raises:
        ValueError: if there are no full experts; for a mesh of more dimensions, or of another root; and if the mesh
            dimension of tensor parallelism has no name.
    """
    whole = {path: style for path, style in styles.items() if isinstance(style, WholeExpertsParallel)}
    if not whole:
        raise ValueError(
            f"expert_parallel={over} was passed, but the plan has no expert parallelism: add the experts with "
            "plan={...}, as 'ep_dispatch_experts', and their parameters as 'grouped_gemm'"
        )
    root = over.get_root_mesh()
    name = None if mesh.mesh_dim_names is None else mesh.mesh_dim_names[0]
    if over.ndim != 1 or not over.shares_root(mesh) or name is None or root[name] is not mesh:
        raise ValueError(
            f"expert_parallel={over} is not a 1-D slice, by name, of the root mesh of {mesh}: pass another dimension, "
            'mesh["dp"], or a flattened dimension, mesh["dp", "tp"]._flatten("ep")'
        )
    arguments: dict[str, Any] = {"input_layout": Replicate(), "tp_dim": name}
    found: dict[str, ParallelStyle] = {}
    for path, style in whole.items():
        del styles[path]
        cut = inside.get(path)
        if over.spans(mesh):
            found[path] = style.with_own_tokens(top_k, **arguments)
        elif mesh.size() > 1 and isinstance(cut, ExpertsParallel) and not cut.shared:
            found[path] = style.with_own_tokens(top_k, **arguments, inside=cut.placements)
        else:
            found[path] = style.with_own_tokens(top_k)
    return found


def slice_over(over: DeviceMesh, mesh: DeviceMesh) -> DeviceMesh:
    """Return the slice of ``mesh``'s root that has the same groups of ranks as ``over``, or ``over`` itself.

    transformers makes two meshes of the same ranks: one for dense layers, and another for experts.
    """
    root = mesh.get_root_mesh()
    names = root.mesh_dim_names
    if over.ndim != 1 or over.get_root_mesh() is root or names is None:
        return over
    wanted = set(map(tuple, over.rows()))
    dims = next((dims for dims, rows in rows_by_dims(root.ranks) if rows == wanted), None)
    if dims is None:
        return over
    found = root[tuple(names[dim] for dim in dims)]
    return found if len(dims) == 1 else found._flatten()


def _read(x: Any, mesh: DeviceMesh) -> Any:
    """Return a replicated input as a local tensor, whose cotangent is partial."""
    platform = mesh.platform
    if not platform.is_tensor(x) or not platform.is_floating_point(x):
        return x
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, (Replicate(),))
    return x.redistribute(placements=(Replicate(),)).to_local(grad_placements=(Partial(),))
