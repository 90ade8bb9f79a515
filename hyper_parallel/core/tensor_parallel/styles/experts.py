"""`ExpertParallel`: experts sharded over the ranks, which exchange the routed tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hyper_parallel.core.communication.parts import check_digests, digests_of, numbers_of_ranks
from hyper_parallel.core.communication.recorder import LISTENERS, run_in_module
from hyper_parallel.core.communication.routes import ROUTE_WATCHERS, Combine, Dispatch
from hyper_parallel.core.communication.transitions import ConvertCotangent
from hyper_parallel.core.dtensor.api import distribute_parameter
from hyper_parallel.core.layouts.chunking import chunk_sizes, shard_sizes
from hyper_parallel.core.layouts.layout import get_layout, normalize_placements
from hyper_parallel.core.layouts.placement_types import Placement, Replicate, Shard, own_placement
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.modes import SUMMED_OVER
from hyper_parallel.core.tensor_parallel.program.calls import followed, is_entered
from hyper_parallel.core.tensor_parallel.program.convert import Slots, as_single
from hyper_parallel.core.tensor_parallel.program.expert_calls import ExpertCall, agree_on_routes, read_call
from hyper_parallel.core.tensor_parallel.program.expert_inputs import (
    Inputs,
    parts_of_batch,
    parts_of_whole,
    whole_for_summands,
)
from hyper_parallel.core.tensor_parallel.program.planned_parameters import module_label, parameter_check, path_of
from hyper_parallel.core.tensor_parallel.program.same_inputs import compare_input
from hyper_parallel.core.tensor_parallel.styles.base import ModuleStyle
from hyper_parallel.core.weak_table import WeakTable
from hyper_parallel.platform.contract.modules import APPLIED

__all__ = ["ExpertParallel", "has_its_gradients"]

#: Module -> the mesh over which the gradients of its latest call are summed.
_SUMMED = WeakTable()


class ExpertParallel(ModuleStyle):
    """Shard stacked experts over the ranks, and send each token to the ranks that have its experts.

    Every parameter of the module must have a leading dimension of experts, which is sharded. A rank calls the module
    with its local tokens, in one of two forms. ``module(tokens (N, d), counts (E,))`` takes tokens sorted by expert,
    and the number of tokens of each expert. ``module(hidden states (T, d), indices (T, k), weights (T, k))`` takes k
    experts for each token. Its result is the sum of a token's k outputs, weighted by ``weights``.

    The module's forward runs on the local experts as plain tensors, with the tokens that were routed to them. In the
    second form it gets one expert for each row, and weights of one.

    Only routed tokens are sent. Forward has one small all-gather of token counts. Forward and backward have two
    all-to-alls each: tokens to experts, and results back. Ranks may have different numbers of tokens and experts. A
    rank without routed tokens computes a token of zeros, so that it takes part in backward.

    Args:
        input_layout: relation between the plain tokens of the ranks. None: each rank has its own batch and loss.
            Gradients of experts are then averaged over the ranks, as data parallelism averages other gradients.
            ``Shard(0)``: tokens are shards of one tensor with one loss, as in sequence parallelism. Gradients are then
            summed, as they always are for DTensor inputs. ``Replicate()``: all ranks have the same tokens and one loss.
            Each rank then sends its shard of the tokens, and gets the results of all tokens.
        tp_dim: name of the tensor-parallel dimension of the root mesh. ``input_layout`` then is the placement of tokens
            on this dimension alone, whose ranks share a loss. Without ``inside`` the style's mesh must include it.
        inside: placements that shard each expert's parameters over ``tp_dim`` as well. The style's mesh must then not
            include ``tp_dim``. The outputs of the experts are partial over its ranks, and are summed.
        count_attribute: attribute of the module with the number of experts, if there is one. During forward it is the
            number of local experts.

    Raises:
        TypeError: for a layout that is not a placement.
        ValueError: for an unknown layout, or arguments that contradict each other. When the style is applied: for
            parameters without a common first dimension, buffers, submodules with parameters, a mesh without ``tp_dim``
            or one that must not include it, and parameters that ``inside`` does not shard. When the module is called,
            on all ranks before tokens are sent: for an index out of range, counts that do not sum to the number of
            tokens, or arguments of neither form.

    Example:
        >>> from hyper_parallel import ExpertParallel
        >>> ExpertParallel()
        ExpertParallel(count_attribute='num_experts')

    Source: ``torchtitan.distributed.ExpertParallel``; GShard (Lepikhin et al. 2020).
    """

    input_layouts: Slots = (None,)
    output_layouts: Slots | None = None

    def __init__(
        self,
        *,
        input_layout: Placement | None = None,
        tp_dim: str | None = None,
        inside: Mapping[str, Placement] | None = None,
        count_attribute: str = "num_experts",
    ) -> None:
        name = type(self).__name__
        self.input_layout = as_single(input_layout, "input_layout", name)
        if self.input_layout not in (None, Shard(0), Replicate()):
            raise ValueError(
                f"{name}(input_layout={self.input_layout!r}): use None for different tokens on each rank, Shard(0) "
                "for shards of one tensor, Replicate() for the same tokens on all ranks"
            )
        if tp_dim is not None and self.input_layout is None:
            raise ValueError(
                f"{name}(tp_dim={tp_dim!r}): declare the placement of tokens over this dimension with input_layout: "
                "Shard(0), as in sequence parallelism, or Replicate()"
            )
        self.inside = None if inside is None else {key: own_placement(placement) for key, placement in inside.items()}
        if self.inside is not None and (tp_dim is None or self.input_layout is not Replicate()):
            raise ValueError(
                f"{name}(inside=...): ranks with shards of one expert need the same tokens: pass tp_dim and "
                "input_layout=Replicate(). For shards of a sequence, pass inside=None, and apply the style to a mesh "
                "that includes the dimension"
            )
        for key, placement in (self.inside or {}).items():
            if not isinstance(placement, Shard) or not placement.dim:
                raise ValueError(
                    f"{name}(inside=...) shards parameters (experts, ...) along a dimension other than the first, "
                    f"got {placement!r} for {key!r}"
                )
        self.tp_dim, self.count_attribute = tp_dim, count_attribute

    def parameter_placements(self, module: Any, mesh: DeviceMesh) -> Mapping[str, Placement]:
        return {name: Shard(0) for name, _ in mesh.platform.named_parameters(module)}

    def check(self, module: Any, device_mesh: DeviceMesh, where: str) -> None:
        platform = device_mesh.platform
        shapes = {name: tuple(p.shape) for name, p in platform.named_parameters(module)}
        if not shapes or () in shapes.values() or len({shape[0] for shape in shapes.values()}) != 1:
            raise ValueError(
                f"{self!r} on {where!r}: its parameters have the shapes {shapes}, but each must be (experts, ...): "
                "name the module with the stacked weights of the experts. For a list with one module for each expert, "
                "stack the weights: docs/experts.md has a class for this"
            )
        for path, submodule in platform.named_modules(module):
            if path and (names := [name for name, _ in platform.named_parameters(submodule)]):
                raise ValueError(
                    f"{self!r} on {where!r}: the module {path!r} below has the parameter {names[0]!r}, which is not a "
                    "weight of the experts: name the module that holds only the stacked weights of the experts"
                )
        if buffers := sorted(name for name, _ in platform.named_buffers(module)):
            raise ValueError(
                f"{self!r} on {where!r}: it has the buffers {buffers}, but its forward runs on plain tensors of this "
                "rank's experts alone. Make a buffer with a value for each expert a parameter (experts, ...) that "
                "requires no gradient, and move other buffers to the module that calls this one"
            )
        super().check(module, device_mesh, where)
        tp = self._tp(device_mesh)
        if self.inside is None:
            return
        if set(self.inside) != set(shapes):
            raise ValueError(
                f"{self!r} on {where!r}: inside names {sorted(self.inside)}, but the parameters are {sorted(shapes)}: "
                "name a placement for each parameter, because the results of all ranks are summed"
            )
        for name, placement in self.inside.items():
            (normal,) = normalize_placements((placement,), tp, len(shapes[name]), f"parameter {name!r} of {where!r}")
            cut: Any = get_layout(tp, (normal,), shapes[name]).placements[0]
            if 0 in shard_sizes(cut, shapes[name][cut.dim], tp.size()):
                raise ValueError(
                    f"{self!r} on {where!r}: {placement!r} leaves some of the {tp.size()} ranks of {tp} without "
                    f"elements of {name!r}, of shape {shapes[name]}: shard the experts over fewer ranks"
                )

    def _tp(self, mesh: DeviceMesh) -> Any:
        """Return the 1-D mesh of ``tp_dim``, or None if the style has no ``tp_dim``.

        Raises:
            ValueError: if the root mesh has no such dimension, or the style's mesh wrongly includes or lacks it.
        """
        if self.tp_dim is None:
            return None
        root = mesh.get_root_mesh()
        if self.tp_dim not in (root.mesh_dim_names or ()):
            raise ValueError(
                f"{self!r} is applied to a slice of {root}, which has no dimension {self.tp_dim!r}: pass the name of "
                "one of its dimensions as tp_dim"
            )
        tp = root[self.tp_dim]
        if self.inside is None and not mesh.spans(tp):
            raise ValueError(
                f"{self!r} is applied to {mesh}, which lacks {self.tp_dim!r}. For shards of a sequence, apply the "
                'style to both dimensions: mesh["dp", "tp"]._flatten("ep"). For the same tokens and full experts on '
                "these ranks, leave tp_dim and input_layout out. To shard each expert, use inside"
            )
        if self.inside is not None and not mesh.is_beside(tp):
            raise ValueError(
                f"{self!r} is applied to {mesh}, which has the dimension {self.tp_dim!r}. Ranks along this dimension "
                "hold different experts, and cannot also shard each expert: pass inside=None, or apply the style to "
                "other dimensions"
            )
        return tp

    def distribute(self, module: Any, mesh: DeviceMesh) -> None:
        if self.inside is None:
            super().distribute(module, mesh)
            return
        tp = self._tp(mesh)
        both: Any = mesh.slices.union([tp])
        for name, placement in self.inside.items():
            placements: list[Placement] = [placement, placement]
            placements[both.index_of(mesh, 0)] = Shard(0)
            distribute_parameter(module, name, both, placements, src_data_rank=self.src_data_rank)

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        if device_mesh.get_coordinate() is not None:
            self._compare_experts(module, device_mesh)
        return super()._apply(module, device_mesh)

    def _compare_experts(self, module: Any, device_mesh: DeviceMesh) -> None:
        shapes = {name: tuple(p.shape) for name, p in device_mesh.platform.named_parameters(module)}
        facts = {"the number of experts, or the names and shapes of their weights": shapes}
        name = module_label(module)
        told = numbers_of_ranks(digests_of(facts), device_mesh, f"the comparison of the experts of {name}")
        check_digests(told, facts, device_mesh, name, "make the same model on all ranks")

    def _new_forward(self, module: Any, forward: Callable[..., Any], mesh: DeviceMesh) -> Callable[..., Any]:
        if mesh.get_coordinate() is None:
            return super()._new_forward(module, forward, mesh)
        check = parameter_check(module, mesh)
        tp = self._tp(mesh)
        count = next(p.shape[0] for _, p in mesh.platform.named_parameters(module))

        def run(module: Any, *args: Any, **kwargs: Any) -> Any:
            if LISTENERS and is_entered(module):
                way = followed(run, module, own_samples=True)
                return run_in_module(path_of(module), way, module, *args, **kwargs)
            check(module)
            token = SUMMED_OVER.set(_summed_over(module, mesh.platform.in_backward()))
            try:
                return self._run(module, forward, args, kwargs, mesh, tp, count)
            finally:
                SUMMED_OVER.reset(token)

        return run

    def _run(
        self, module: Any, forward: Callable[..., Any], args: tuple, kwargs: dict, mesh: DeviceMesh, tp: Any, count: int
    ) -> Any:
        platform, name = mesh.platform, module_label(module)
        steps, losses = self._own_tokens(module, args, kwargs, mesh, tp, count, name)
        args, kwargs = steps[-1].args, steps[-1].kwargs
        call, sizes = read_call(args, kwargs, count, platform), chunk_sizes(count, mesh.size())
        routes = agree_on_routes(call, mesh, sizes, name)
        if ROUTE_WATCHERS and not platform.in_backward():
            for watch in ROUTE_WATCHERS:
                watch(path_of(module), routes)
        with platform.no_dispatch():
            x = Dispatch(routes, call.copies)(call.given[call.tokens])
            numbers, rows = routes.arriving.tolist() or [0], platform.shape_of(x)[0]
            if not rows:
                numbers[0] = 1
                x = platform.cat([x, platform.zeros((1, platform.shape_of(x)[1]), platform.detach(x))], 0)
            given = call.local_arguments(x, numbers, platform)
        own = platform.own_parameters(module)
        held = {key: p for key, p in own.items() if p is not None}
        seen, attributes = self.count_attribute, vars(module)
        counted = attributes.get(seen) == count
        with platform.no_dispatch():
            own.update({key: _local(p, mesh, losses) for key, p in held.items()})
        if counted:
            attributes[seen] = len(numbers)
        try:
            local_args = tuple(given[i] for i in range(len(args)))
            y = forward(module, *local_args, **{key: given[key] for key in kwargs})
        finally:
            own.update(held)
            if counted:
                attributes[seen] = count
        if not platform.is_tensor(y) or not len(y.shape) or y.shape[0] != sum(numbers):
            shape = tuple(y.shape) if platform.is_tensor(y) else type(y).__name__
            raise ValueError(
                f"{name} got {sum(numbers)} tokens for the experts of this rank, and returned {shape}: it must return "
                "one tensor with a row for each token, in the same order"
            )
        with platform.no_dispatch():
            y = Combine(routes)(y if rows else platform.narrow(y, 0, 0, 0))
            if call.weights is not None:
                y = _weighted(y, call, platform)
            for step in reversed(steps):
                y = step.back(y)
            return y

    def _own_tokens(
        self, module: Any, args: tuple, kwargs: dict, mesh: DeviceMesh, tp: Any, count: int, name: str
    ) -> tuple[list[Inputs], int]:
        """Return the conversions of the arguments, and the number of losses that gradients of experts are averaged
        over.

        The conversions apply one after the other. The last one gives this rank's plain arguments.
        """
        common = mesh if tp is None else tp
        batch = parts_of_batch(args, kwargs, mesh, tp, count, name)
        if batch is not None:
            losses = 1
        elif self.input_layout is None or self.inside is not None:
            losses = mesh.size()
        else:
            losses = mesh.size() // common.size()
        if batch is None and (self.input_layout is None or losses > 1) and SUMMED_OVER.get() is not None:
            raise ValueError(
                f"{name} is called with plain tokens in a model whose batch is a DTensor, with one loss for all "
                "ranks: pass DTensors, or use ExpertParallel(input_layout=Shard(0))"
            )
        steps = [Inputs(args, kwargs, lambda y: y, mesh)] if batch is None else [batch]
        args, kwargs, *_ = steps[-1]
        if self.inside is None and batch is not None and not batch.mesh.is_beside(common):
            return steps, losses  # the tokens are already different on each rank
        if self.input_layout is Replicate() and (
            tensors := [x for x in (*args, *kwargs.values()) if mesh.platform.is_tensor(x)]
        ):
            compare_input(tensors[0], common, f"the input of {name}", module)
            if self.inside is not None:
                steps.append(whole_for_summands(args, kwargs, common))
            elif all(len(x.shape) for x in tensors):  # `read_call` refuses tensors without dimensions
                steps.append(parts_of_whole(args, kwargs, common, count))
        return steps, losses


def _summed_over(module: Any, again: bool) -> DeviceMesh | None:
    """Return the mesh over which the gradients of this call are summed, or None.

    A recomputed call (``again``) may run outside of the unit that sets the mesh. It uses the mesh of the first call.
    """
    known = SUMMED_OVER.get()
    mesh: DeviceMesh | None = _SUMMED.get(module) if again and known is None else known
    _SUMMED.set(module, mesh)
    return mesh


def has_its_gradients(module: Any, mesh: DeviceMesh, caller: str) -> bool:
    """Return whether the gradients of an expert module need no reduction over a data-parallel mesh.

    They need none if the experts get the tokens of all ranks of that mesh.

    Args:
        module: any module.
        mesh: data-parallel mesh.
        caller: name of the function that is applied over ``mesh``, for the message.

    Raises:
        ValueError: if the experts get tokens of only some ranks of ``mesh``.
    """
    if not any(isinstance(style, ExpertParallel) for style, _ in getattr(module, APPLIED, ())):
        return False
    held = next(p for _, p in mesh.platform.named_parameters(module))._layout.mesh
    if mesh.is_beside(held) or not mesh.shares_root(held):
        return False
    if not held.spans(mesh):
        raise ValueError(
            f"{caller}: the experts {module_label(module)} are on {held}, which has only some ranks of {mesh}: apply "
            "fully_shard or replicate to the experts first, over the other dimensions of the mesh"
        )
    return True


def _weighted(y: Any, call: ExpertCall, platform: Any) -> Any:
    """Return the weighted sum of each token's expert outputs, in the dtype of ``y``."""
    _, *rest = platform.shape_of(y)
    weights, dtype = call.given[call.weights], y.dtype  # type: ignore[index]
    count = platform.shape_of(weights)[0]
    weighted = y.reshape((count, call.copies, *rest)) * weights.reshape((count, call.copies, *[1] * len(rest)))
    return platform.to_dtype(platform.sum_along(weighted, 1).reshape((count, *rest)), dtype)


def _local(p: Any, mesh: DeviceMesh, losses: int) -> Any:
    """Return the local experts of a parameter, or one expert of zeros if this rank has no experts.

    Args:
        p: the parameter, a DTensor.
        mesh: mesh of the style.
        losses: number of losses over which the gradient is averaged.
    """
    platform = mesh.platform
    x = p.to_local(grad_placements=p.placements)
    if losses > 1:
        x = ConvertCotangent(platform, lambda g: g / losses)(x)
    shape = platform.shape_of(x)
    return x if shape[0] else platform.cat([x, platform.zeros((1, *shape[1:]), platform.detach(x))], 0)
