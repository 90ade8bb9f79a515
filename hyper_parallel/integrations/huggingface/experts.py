"""Stacked experts that compute with plain local tensors: a part of every expert on each rank, or whole experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.layouts.placement_types import Partial, Placement, Replicate, Shard
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
    "with_own_tokens",
]


class ExpertsParallel(ModuleStyle):
    """Run experts whose weights are sharded inside each expert: every rank computes a summand of the output.

    Forward is the module's own, on this rank's part of the weights and on plain inputs. So it may do things that no
    sharding rule describes. Examples are choosing tokens by the router's indices, and calling a grouped kernel. One
    all-reduce in forward, one in backward for each input that needs a gradient.

    Args:
        placements: placement of each parameter of the module, by name; all must be sharded such that the module's
            output is a sum over the ranks, as gate and up by columns and down by rows.

    Raises:
        ValueError: when applied, for a module with further parameters: a summand of every rank would count several
            times.

    Source: ``MoeExpertsParallel`` and ``AllReduceParallel`` of Hugging Face transformers.
    """

    _mixins: tuple[type, ...] = ()
    #: Parameters that are replicated, of which each rank adds its share.
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
                        f"the plan shards the experts {where!r} and not their parameter "
                        f"{f'{path}.{name}' if path else name!r}, which every rank would add: name it, or take "
                        f"{where!r} and its parameters out of the plan"
                    )

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        # Before the style takes the forward of the class as the one that it runs between its conversions.
        read_local_parameters(module, *self._mixins)
        return super()._apply(module, device_mesh)

    def prepare_inputs(self, module: Any, args: tuple, kwargs: dict, mesh: DeviceMesh) -> tuple[tuple, dict]:
        return tuple(_read(x, mesh) for x in args), {key: _read(x, mesh) for key, x in kwargs.items()}

    def prepare_outputs(self, module: Any, output: Any, mesh: DeviceMesh) -> Any:
        return DTensor.from_local(output, mesh, (Partial(),)).redistribute(placements=(Replicate(),)).to_local()


class _SharedBias:
    """Mixin of a module's class: each rank adds its share of ``down_proj_bias``, which all ranks have."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the next class's forward with a bias whose sum over the ranks is the parameter.

        The gradient that a rank computes is the parameter's own: every summand of the output has the whole cotangent.
        """
        own = vars(self)
        bias = own["down_proj_bias"]
        share = (bias / own["_ranks"]).detach()
        own["down_proj_bias"] = share + (bias - bias.detach())
        return super().forward(*args, **kwargs)  # type: ignore[misc]


class BiasedExpertsParallel(ExpertsParallel):
    """`ExpertsParallel` for experts with a bias behind the projection by rows, ``down_proj_bias``: those of gpt-oss.

    Args:
        placements: as there. ``down_proj_bias`` is replicated: each rank adds its share of it.
    """

    _mixins = (_SharedBias,)
    shared = ("down_proj_bias",)

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        vars(module)["_ranks"] = device_mesh.size()
        return super()._apply(module, device_mesh)


class _Connected:
    """Mixin of a module's class: without a token for its experts, a rank takes part in backward as the others do."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the class below, whose output depends on inputs and parameters always."""
        y = super().forward(*args, **kwargs)  # type: ignore[misc]
        if not y.requires_grad and get_platform().backward_is_recorded():
            parameters = [getattr(self, name) for name, _ in self.named_parameters(recurse=False)]  # type: ignore[attr-defined]
            for x in (*args, *kwargs.values(), *parameters):
                if getattr(x, "requires_grad", False):
                    y = y + x[:0].sum()
        return y


class WholeExpertsParallel(ExpertsParallel):
    """Give each rank some of the experts in whole: it computes their part of the output for all tokens.

    The tokens are the same on every rank, so none is sent: the routes to experts of other ranks are masked, and one
    all-reduce adds the outputs of the ranks' experts. In backward, one for each input that needs a gradient.

    Args:
        placements: placement of each parameter of the module, by name: all ``Shard(0)``.

    Raises:
        ValueError: when applied, for a module that does not count its experts in ``num_experts``, experts that the
            ranks do not divide, and a parameter that is not sharded by expert; when called, for other inputs than
            hidden states, the experts' indices and their weights.

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
                    f"the plan shards {where!r} by expert, and the parameter {name!r} of shape {shapes[name]} as "
                    f"{placement!r} of num_experts={count}: each must be (experts, ...) and 'grouped_gemm', or shard "
                    "inside each expert: 'moe_tp_experts', with 'packed_colwise' and 'rowwise' for its parameters"
                )
        if not isinstance(count, int) or count % ranks:
            raise ValueError(
                f"{where!r} has {count} experts, which the {ranks} ranks of {device_mesh} cannot share: use a mesh "
                "whose size divides them, or shard inside each expert (expert_parallel=False)"
            )

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        super()._apply(module, device_mesh)
        module.num_experts //= device_mesh.size()
        module._is_expert_parallel = True  # the model's kernels leave out routes to an expert of number num_experts
        return module

    def prepare_inputs(self, module: Any, args: tuple, kwargs: dict, mesh: DeviceMesh) -> tuple[tuple, dict]:
        args, kwargs = super().prepare_inputs(module, args, kwargs, mesh)
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        indices = [key for key, x in given.items() if _is_index(x, mesh)]
        shape = tuple(given[indices[0]].shape) if len(indices) == 1 else None
        weights = [key for key, x in given.items() if key not in indices and tuple(getattr(x, "shape", ())) == shape]
        if len(weights) != 1:
            raise ValueError(
                f"{type(module).__name__} was called with arguments that expert parallelism does not know: it takes "
                "hidden states, indices of experts, and weights of the same shape as the indices. Shard inside each "
                "expert instead (expert_parallel=False)"
            )
        index, weight = given[indices[0]], given[weights[0]]
        own = index // module.num_experts == mesh.get_local_rank()
        # One beyond the last for those of other ranks, whose output counts nothing.
        given[indices[0]] = (index % module.num_experts) * own + module.num_experts * ~own
        given[weights[0]] = weight * own
        return tuple(given[i] for i in range(len(args))), {key: given[key] for key in kwargs}

    def with_own_tokens(self, top_k: int, **arguments: Any) -> ExpertParallel:
        """The style for ranks that send each other tokens.

        Args:
            top_k: number of experts of a token, for styles that cannot see it.
            **arguments: as of `ExpertParallel`.
        """
        return ExpertParallel(**arguments)


def _is_index(x: Any, mesh: DeviceMesh) -> bool:
    return mesh.platform.is_tensor(x) and not mesh.platform.is_floating_point(x)


class IdentityExpertsParallel(ModuleStyle):
    """The style of experts that return their input, inside of others whose outputs the ranks add: each gives its share.

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
    """Take the whole experts out of ``styles``, and return the styles by which they get tokens of all ranks.

    Args:
        styles: by path, of the plan for whole experts; changed in place.
        inside: by path, of the plan that cuts each expert.
        mesh: of tensor parallelism.
        over: 1-D mesh of the ranks that share the experts.
        top_k: number of experts of a token.

    Raises:
        ValueError: without whole experts; for a mesh of more dimensions, or of another root; and where the ranks of
            tensor parallelism cannot be told by name.
    """
    whole = {path: style for path, style in styles.items() if isinstance(style, WholeExpertsParallel)}
    if not whole:
        raise ValueError(
            f"expert_parallel={over} is given, and the plan has no whole experts: name them with plan={{...}}, as "
            "'ep_dispatch_experts' and their parameters as 'grouped_gemm'"
        )
    root = over.get_root_mesh()
    name = None if mesh.mesh_dim_names is None else mesh.mesh_dim_names[0]
    if over.ndim != 1 or not over.shares_root(mesh) or name is None or root[name] is not mesh:
        raise ValueError(
            f"expert_parallel={over} is no 1-D slice of the mesh that {mesh} was sliced from by name: give another "
            'dimension, mesh["dp"], or one that contains it, mesh["dp", "tp"]._flatten("ep")'
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


def _read(x: Any, mesh: DeviceMesh) -> Any:
    """Return a replicated input as a local tensor. Each rank computes a part of its gradient."""
    platform = mesh.platform
    if not platform.is_tensor(x) or not platform.is_floating_point(x):
        return x
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, (Replicate(),))
    return x.redistribute(placements=(Replicate(),)).to_local(grad_placements=(Partial(),))
