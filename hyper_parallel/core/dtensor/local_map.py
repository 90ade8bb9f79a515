"""`local_map`, which applies a function of local tensors to DTensors. Mirrors
``torch.distributed.tensor.experimental.local_map``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from hyper_parallel.core.communication.errors import tell_of_failure
from hyper_parallel.core.communication.parts import layout_of_parts, shapes_of_ranks
from hyper_parallel.core.dtensor.tensor import DTensor, bind_platform
from hyper_parallel.core.layouts.layout import Layout, normalize_placements
from hyper_parallel.core.layouts.placement_types import Placement, Shard, own_placement, own_placements
from hyper_parallel.core.mesh.device_mesh import DeviceMesh, resolve_mesh
from hyper_parallel.platform import Platform

__all__ = ["local_map"]

Placements = Sequence[Placement] | None


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Placements | tuple[Placements, ...] = None,
    in_placements: tuple[Placements, ...] | None = None,
    in_grad_placements: tuple[Placements, ...] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Return ``func``, a function of plain local tensors, as a function that takes and returns DTensors.

    Called without a DTensor, it is ``func`` itself. Gradients follow `DTensor.to_local` and `DTensor.from_local`. If
    ranks use a replicated input differently, pass ``[Partial()]`` for it in ``in_grad_placements``.

    Args:
        func: the function; None to get a decorator.
        out_placements: placements of the result, one for each mesh dimension. For several results, a tuple of such
            sequences, with None for a result that is not a tensor. Leaves of nested tuples, lists and dicts are
            separate results.
        in_placements: for each leaf of the positional arguments, its required placements, or None if it is not a
            tensor. With None for all, arguments keep their placements.
        in_grad_placements: for each leaf, the placements of the local tensor's gradient, as in `DTensor.to_local`.
        device_mesh: mesh of the results; None for the mesh of the first DTensor.
        redistribute_inputs: whether to redistribute arguments with other placements, instead of raising.

    Returns:
        The function of DTensors. The global shape of a sharded result follows from the local shapes, which ranks
        exchange in one small all-gather per call. The sizes of its shards must be those of `distribute_tensor`.

    Raises:
        ValueError: when called: for an argument with other placements, and for a wrong number of placements. A
            `RankMismatchError` on all ranks, when local results are not shards of one tensor.
        TypeError: when called: for placements of a value that is not a tensor, and for a tensor without placements.

    Example:
        >>> import torch
        >>> from hyper_parallel import Replicate, Shard, distribute_tensor, init_device_mesh
        >>> from hyper_parallel.experimental import local_map
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> product = local_map(torch.mm, out_placements=[Shard(0)], in_placements=([Shard(0)], [Replicate()]))
        >>> x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
        >>> product(x, distribute_tensor(torch.ones(3, 2), mesh, None)).placements
        (Shard(dim=0),)

    Source: ``torch.distributed.tensor.experimental.local_map``.
    """
    if func is None:
        return lambda function: local_map(
            function,
            out_placements,
            in_placements,
            in_grad_placements,
            device_mesh,
            redistribute_inputs=redistribute_inputs,
        )
    name = getattr(func, "__name__", type(func).__name__)

    @wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        flat: list[Any] = []
        shape_of_args = _flatten(args, flat)
        for keyword, given in (("in_placements", in_placements), ("in_grad_placements", in_grad_placements)):
            if given is not None and len(given) != len(flat):
                raise ValueError(
                    f"local_map({name}): got {len(flat)} argument(s), but {keyword} has {len(given)} entries: pass "
                    "one entry for each argument"
                )
        mesh = device_mesh
        for x in flat:
            if isinstance(x, DTensor):
                mesh = x.device_mesh if mesh is None else mesh
        if not any(isinstance(x, DTensor) for x in flat):
            return func(*args, **kwargs)
        mesh = resolve_mesh(mesh, f"local_map({name})")
        local = [
            _local(
                x,
                None if in_placements is None else (in_placements[i],),
                None if in_grad_placements is None else in_grad_placements[i],
                redistribute_inputs,
                f"argument {i} of local_map({name})",
            )
            for i, x in enumerate(flat)
        ]
        results: list[Any] = []
        try:
            shape_of_results = _flatten(func(*_rebuild(shape_of_args, iter(local)), **kwargs), results)
        except Exception as error:
            tell_of_failure(error, f"local_map({name})", mesh)
            raise
        return _rebuild(shape_of_results, iter(_distributed(results, out_placements, mesh, f"local_map({name})")))

    return mapped


def _local(x: Any, wanted: tuple[Placements] | None, grad: Placements, redistribute: bool, what: str) -> Any:
    """Return an argument of ``func``: the local tensor of a DTensor, or the value itself."""
    if not isinstance(x, DTensor):
        return x
    if wanted is not None:
        if wanted[0] is None:
            raise TypeError(
                f"{what} is a DTensor placed {list(x.placements)}, but in_placements has None for it: name its "
                "placements"
            )
        target = normalize_placements(wanted[0], x.device_mesh, x._layout.ndim, what)
        if x.placements != target:
            if not redistribute:
                raise ValueError(
                    f"{what} is placed {list(x.placements)}, but in_placements has {list(target)}: redistribute the "
                    "argument, or pass redistribute_inputs=True"
                )
            x = x.redistribute(placements=target)
    return x.to_local(grad_placements=grad)


def _distributed(results: list[Any], out_placements: Any, mesh: DeviceMesh, name: str) -> list[Any]:
    """Return the results of ``func`` as DTensors."""
    platform = bind_platform(mesh.platform)
    single = not isinstance(out_placements, tuple) or any(
        isinstance(own_placement(p), Placement) for p in out_placements
    )
    given: list[Any] = [
        None if p is None else own_placements(p) for p in ((out_placements,) if single else out_placements)
    ]
    misfit = _misfit(results, given, platform, name)
    # Whether ranks exchange shapes must follow from facts that all ranks share, not from one rank's result.
    sharded = [i for i, own in enumerate(given) if type(own) is tuple and any(isinstance(p, Shard) for p in own)]
    layouts: dict[int, Layout] = {}
    if sharded and mesh.size() > 1 and mesh.get_coordinate() is not None:
        shapes = [None if misfit else tuple(platform.shape_of(results[i])) for i in sharded]
        parts = shapes_of_ranks(shapes, mesh)
        if misfit is None:
            for i, of_ranks in zip(sharded, parts, strict=True):
                layouts[i] = layout_of_parts(of_ranks, given[i], mesh, f"result {i} of {name}")
    if misfit is not None:
        raise misfit
    return [
        result
        if placements is None
        else DTensor._of_part(result, layouts[i])
        if i in layouts
        else DTensor.from_local(result, mesh, placements)
        for i, (result, placements) in enumerate(zip(results, given, strict=True))
    ]


def _misfit(results: list[Any], given: Sequence[Placements], platform: Platform, name: str) -> Exception | None:
    """Return the error for results that do not match the placements, or None."""
    if len(given) != len(results):
        return ValueError(
            f"{name} returned {len(results)} result(s), but out_placements has {len(given)} entries: pass one entry "
            "for each result"
        )
    for i, (result, placements) in enumerate(zip(results, given, strict=True)):
        if isinstance(result, DTensor):
            return TypeError(f"{name}: result {i} is a DTensor, but the function must return plain tensors")
        if platform.is_tensor(result) is (placements is None):
            return TypeError(
                f"{name}: result {i} is a {type(result).__name__}, but out_placements has {placements} for it: pass "
                "placements for tensors, and None for other results"
            )
    return None


def _flatten(value: Any, flat: list[Any]) -> Any:
    """Append the leaves of ``value`` to ``flat``. Return the structure from which `_rebuild` recreates ``value``."""
    if type(value) in (tuple, list):
        return type(value), [_flatten(item, flat) for item in value]
    if type(value) is dict:
        return dict, {key: _flatten(item, flat) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value), [_flatten(item, flat) for item in value]
    flat.append(value)
    return None


def _rebuild(structure: Any, items: Any) -> Any:
    if structure is None:
        return next(items)
    kind, parts = structure
    if kind is dict:
        return {key: _rebuild(part, items) for key, part in parts.items()}
    made = [_rebuild(part, items) for part in parts]
    return kind(*made) if hasattr(kind, "_fields") else kind(made)
