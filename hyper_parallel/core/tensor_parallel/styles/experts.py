"""`ExpertParallel`: whole experts on each rank, for tokens of which each rank has its own."""

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
from hyper_parallel.core.tensor_parallel.program.calls import followed, is_entered
from hyper_parallel.core.tensor_parallel.program.convert import Slots, as_single
from hyper_parallel.core.tensor_parallel.program.distributed_batches import SUMMED_OVER
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

#: Module -> the mesh over which gradients of its latest call are summed.
_SUMMED = WeakTable()


class ExpertParallel(ModuleStyle):
    """Give each rank some of the experts in whole, and send it the tokens of all ranks for these.

    For a module whose parameters have a leading dimension of experts. Each rank calls it with tokens of its own.
    ``(tokens (N, d), counts (E,))`` are tokens sorted by expert, and the number for each. ``(hidden states (T, d),
    indices (T, k), weights (T, k))`` has k experts for each token. There the module sums the k outputs by the weights.

    The module's own forward runs on this rank's experts, as plain tensors, with the tokens for them. With indices it
    gets one expert for each row, and weights of one.

    Exactly the routed tokens travel: one exchange there and one back, in forward and in backward, after one small
    all-gather of their numbers. Ranks may have any number of tokens, and of experts. A rank whose experts get no token
    computes one of zeros, so that it takes part in backward.

    Args:
        input_layout: how plain tokens of the ranks belong together. None: each rank has a batch and a loss of its own,
            and gradients of experts are averaged over the ranks of the mesh, as data parallelism averages all others.
            ``Shard(0)``: they are parts of one tensor with one loss, as in sequence parallelism, and gradients are
            sums. So they are of DTensors. ``Replicate()``: all ranks have the same tokens, with one loss. Each sends
            its part of them, and gets the results of all.
        tp_dim: name of the dimension of tensor parallelism in the mesh of the job. Then ``input_layout`` says how the
            tokens lie over its ranks alone, which have one loss. The mesh of the style has this dimension too.
        inside: placements of the parameters by which each expert is cut over ``tp_dim``, which is another dimension
            than those of the mesh of the style. The experts' outputs then are sums over its ranks.
        count_attribute: attribute of the module with the number of experts, where it has one. The forward sees the
            number on this rank.

    Raises:
        TypeError: when a layout is no placement. ValueError: for another layout, and arguments that do not go together;
            when applied, for parameters without a common first dimension, modules below with parameters, a dimension
            ``tp_dim`` that is missing or lies otherwise, and parameters that are not cut ``inside``. When the module is
            called, on all ranks before a token is sent: for an index outside, counts that do not sum to the number of
            tokens, other arguments.

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
                f"{name}(input_layout={self.input_layout!r}): tokens are each rank's own, None, or parts of one "
                "tensor, Shard(0), or the same on all ranks, Replicate()"
            )
        if tp_dim is not None and self.input_layout is None:
            raise ValueError(
                f"{name}(tp_dim={tp_dim!r}): say with input_layout how tokens lie over its ranks: Shard(0), as in "
                "sequence parallelism, or Replicate()"
            )
        self.inside = None if inside is None else {key: own_placement(placement) for key, placement in inside.items()}
        if self.inside is not None and (tp_dim is None or self.input_layout is not Replicate()):
            raise ValueError(
                f"{name}(inside=...): ranks that each have a part of an expert need the same tokens: give tp_dim and "
                "input_layout=Replicate(). For shards of a sequence leave inside out, and apply the style to a mesh "
                "that has the dimension too"
            )
        for key, placement in (self.inside or {}).items():
            if not isinstance(placement, Shard) or not placement.dim:
                raise ValueError(
                    f"{name}(inside=...) cuts each expert, (experts, ...), along another dimension than the first, and "
                    f"has {placement!r} for {key!r}"
                )
        self.tp_dim, self.count_attribute = tp_dim, count_attribute

    def parameter_placements(self, module: Any, mesh: DeviceMesh) -> Mapping[str, Placement]:
        return {name: Shard(0) for name, _ in mesh.platform.named_parameters(module)}

    def check(self, module: Any, device_mesh: DeviceMesh, where: str) -> None:
        platform = device_mesh.platform
        shapes = {name: tuple(p.shape) for name, p in platform.named_parameters(module)}
        if not shapes or () in shapes.values() or len({shape[0] for shape in shapes.values()}) != 1:
            raise ValueError(
                f"{self!r} on {where!r}: its parameters have the shapes {shapes}, and each must be (experts, ...): "
                "name the module that holds the stacked weights of the experts. For a list with one module for each "
                "expert, stack the weights: docs/experts.md has a class that does so"
            )
        for path, submodule in platform.named_modules(module):
            if path and (names := [name for name, _ in platform.named_parameters(submodule)]):
                raise ValueError(
                    f"{self!r} on {where!r}: the module {path!r} below has the parameter {names[0]!r}, which no expert "
                    "owns: name the module that holds the stacked weights of the experts alone"
                )
        super().check(module, device_mesh, where)
        tp = self._tp(device_mesh)
        if self.inside is None:
            return
        if set(self.inside) != set(shapes):
            raise ValueError(
                f"{self!r} on {where!r}: inside names {sorted(self.inside)}, and the parameters are {sorted(shapes)}: "
                "each must be cut, since the results of all ranks are added"
            )
        for name, placement in self.inside.items():
            (normal,) = normalize_placements((placement,), tp, len(shapes[name]), f"parameter {name!r} of {where!r}")
            cut: Any = get_layout(tp, (normal,), shapes[name]).placements[0]
            if 0 in shard_sizes(cut, shapes[name][cut.dim], tp.size()):
                raise ValueError(
                    f"{self!r} on {where!r}: {placement!r} leaves some of the {tp.size()} ranks of {tp} without a part "
                    f"of {name!r}, of shape {shapes[name]}: cut experts over fewer ranks"
                )

    def _tp(self, mesh: DeviceMesh) -> Any:
        """The mesh of tensor parallelism, None without that.

        Raises:
            ValueError: where there is none of that name, or experts lie in another way to it.
        """
        if self.tp_dim is None:
            return None
        root = mesh.get_root_mesh()
        if self.tp_dim not in (root.mesh_dim_names or ()):
            raise ValueError(f"{self!r} is applied to {mesh}, a part of {root}, which has no dimension {self.tp_dim!r}")
        tp = root[self.tp_dim]
        if self.inside is None and not mesh.spans(tp):
            raise ValueError(
                f"{self!r} is applied to {mesh}, which lacks {self.tp_dim!r}. For shards of a sequence apply it to "
                'both dimensions: mesh["dp", "tp"]._flatten("ep"). Where its ranks have the same tokens and whole '
                "experts, leave tp_dim and input_layout out. Or cut experts with inside"
            )
        if self.inside is not None and not mesh.is_beside(tp):
            raise ValueError(
                f"{self!r} is applied to {mesh}, which has the dimension {self.tp_dim!r}. Ranks along it hold "
                "different experts, and cannot also hold parts of one: leave inside out, or apply the style to other "
                "dimensions"
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
                f"{name} was given {sum(numbers)} tokens for the experts of this rank, and gave {shape}: it must give "
                "one tensor with a row for each token, in their order"
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
        """Make the arguments of this rank, the last of the list, from the given ones in a few steps. Count the losses
        of which gradients of experts are an average."""
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
                f"{name} is called with plain tokens inside of a batch of DTensors, which has one loss for all ranks: "
                "give it DTensors, or say ExpertParallel(input_layout=Shard(0))"
            )
        steps = [Inputs(args, kwargs, lambda y: y, mesh)] if batch is None else [batch]
        args, kwargs, *_ = steps[-1]
        if self.inside is None and batch is not None and not batch.mesh.is_beside(common):
            return steps, losses  # parts already
        if self.input_layout is Replicate() and (
            tensors := [x for x in (*args, *kwargs.values()) if mesh.platform.is_tensor(x)]
        ):
            compare_input(tensors[0], common, f"the input of {name}", module)
            if self.inside is not None:
                steps.append(whole_for_summands(args, kwargs, common))
            elif all(len(x.shape) for x in tensors):  # others are refused
                steps.append(parts_of_whole(args, kwargs, common, count))
        return steps, losses


def _summed_over(module: Any, again: bool) -> DeviceMesh | None:
    """The mesh over which gradients of this call are summed.

    A call that is computed again may run outside of the unit that knows the mesh. It then takes that of the first call.
    """
    known = SUMMED_OVER.get()
    mesh: DeviceMesh | None = _SUMMED.get(module) if again and known is None else known
    _SUMMED.set(module, mesh)
    return mesh


def has_its_gradients(module: Any, mesh: DeviceMesh, caller: str) -> bool:
    """Return whether a module of experts needs no reduction over a data-parallel mesh.

    Tokens of all ranks of that mesh come to its parameters.

    Args:
        module: any module.
        mesh: of data parallelism.
        caller: the function that is applied over it.

    Raises:
        ValueError: where tokens of some of the ranks alone come there.
    """
    if not any(isinstance(style, ExpertParallel) for style, _ in getattr(module, APPLIED, ())):
        return False
    held = next(p for _, p in mesh.platform.named_parameters(module))._layout.mesh
    if mesh.is_beside(held) or not mesh.shares_root(held):
        return False
    if not held.spans(mesh):
        raise ValueError(
            f"{caller}: the experts {module_label(module)} lie on {held}, a part of the ranks of {mesh}: apply "
            "fully_shard or replicate to them first, over the other dimensions of the mesh of the job"
        )
    return True


def _weighted(y: Any, call: ExpertCall, platform: Any) -> Any:
    """The sums of the outputs for each token, by the router's weights; in the dtype of the tokens."""
    _, *rest = platform.shape_of(y)
    weights, dtype = call.given[call.weights], y.dtype  # type: ignore[index]
    count = platform.shape_of(weights)[0]
    weighted = y.reshape((count, call.copies, *rest)) * weights.reshape((count, call.copies, *[1] * len(rest)))
    return platform.to_dtype(platform.sum_along(weighted, 1).reshape((count, *rest)), dtype)


def _local(p: Any, mesh: DeviceMesh, losses: int) -> Any:
    """A parameter as the forward reads it: this rank's experts, one of zeros where it has none.

    Args:
        p: the DTensor.
        mesh: of the style.
        losses: of how many losses of the ranks its gradient is the average.
    """
    platform = mesh.platform
    x = p.to_local(grad_placements=p.placements)
    if losses > 1:
        x = ConvertCotangent(platform, lambda g: g / losses)(x)
    shape = platform.shape_of(x)
    return x if shape[0] else platform.cat([x, platform.zeros((1, *shape[1:]), platform.detach(x))], 0)
