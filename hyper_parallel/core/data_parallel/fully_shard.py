"""`fully_shard`: one module as one unit. Mirrors ``torch.distributed.fsdp.fully_shard``.

A call of the module gathers its parameters, and its forward reads the whole ones as plain tensors. Their storage is
freed after the forward, and filled again when the first cotangent comes back to what the forward returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from hyper_parallel.core.data_parallel.flat_buffer import Call, FlatBuffer
from hyper_parallel.core.dtensor.api import distribute_parameter
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh, resolve_mesh
from hyper_parallel.core.dtensor.operations.operands import refuse_foreign
from hyper_parallel.core.dtensor.placement_types import Shard
from hyper_parallel.core.dtensor.tensor import DTensor, bind_platform
from hyper_parallel.core.weak import WeakTable

__all__ = ["buffers_of", "fully_shard"]

#: module -> its `_Unit`, made when it is first called. A copy of a module makes its own.
_UNITS = WeakTable()


def fully_shard(module: Any, *, mesh: DeviceMesh | None = None) -> Any:
    """Shard the parameters of a module, its children's included, over the ranks of a mesh (ZeRO-3).

    The parameters become DTensors placed ``[Shard(0)]``. Each rank calls the module with plain tensors, its own part of
    the batch, and has a loss of its own. Gradients are averaged over the ranks, and placed as the parameters. Each rank
    shards the values that it has: they must be the same on all ranks.

    Gradients come back through what the module returns and nothing else: through an auxiliary loss that its forward
    sets as an attribute, or an activation that a hook inside has kept, backward would read memory that is freed.
    Activation checkpointing goes around the module, not inside: what runs again in backward finds shards there.

    Args:
        module: module of the selected platform; changed in place.
        mesh: 1-D mesh; None is the one entered with ``with mesh:``.

    Returns:
        ``module``.

    Raises:
        TypeError: for a module of another framework; when it is called, for a result that is no tensor, nor tensors in
            tuples, lists and dicts.
        ValueError: on all ranks, before anything is changed, for a mesh that is not 1-D and a parameter that is a
            DTensor already, because it is tensor parallel or belongs to another unit, nested or tied, that has no
            dimension, or has no values. When it is called, before communication, for inputs that are DTensors, a
            parameter that is frozen, and one that something has put in the place of another.
        RuntimeError: when it is called inside what a compiler traces; for gradients of gradients; for a parameter that
            was changed between forward and backward.

    Source: ``torch.distributed.fsdp.fully_shard``; Rajbhandari et al. 2020.
    """
    mesh = resolve_mesh(mesh, "fully_shard")
    platform = bind_platform(mesh.platform)
    if not isinstance(module, platform.Module):
        raise TypeError(
            f"fully_shard takes a {platform.Module.__name__} of the platform {platform.name!r}, got "
            f"{type(module).__name__}"
        )
    if mesh.ndim != 1:
        raise ValueError(f"fully_shard needs a 1-D mesh, got one of shape {mesh.shape}: pass mesh['dp']")
    mesh.require_member("fully_shard")
    modules = platform.named_modules(module)
    held = [(path, submodule, *named) for path, submodule in modules for named in platform.named_parameters(submodule)]
    for path, _, name, p in held:
        what = f"fully_shard: parameter {_join(path, name)!r} of {type(module).__name__}"
        if isinstance(p, DTensor):
            raise ValueError(
                f"{what} is placed {list(p.placements)} on {p.device_mesh} already: it is tensor parallel, or belongs "
                "to another unit, nested or tied. Apply fully_shard once, to the module that holds all modules that "
                "share the parameter, and without parallelize_module"
            )
        refuse_foreign(p, platform, what)
        if not platform.shape_of(p):
            raise ValueError(f"{what} has no dimension to shard: give it the shape (1,)")
        if not platform.has_values(p):
            raise ValueError(f"{what} has no values: initialise the model on this rank's device first")
    for _, submodule, name, _ in held:
        distribute_parameter(submodule, name, mesh, [Shard(0)], src_data_rank=None)
    if held:
        slots = [(path, name, _layout_of(platform.own_parameters(at)[name])) for path, at, name, _ in held]
        platform.replace_forward(module, lambda forward: _sharded(forward, mesh, slots))
    return module


def buffers_of(module: Any) -> list[FlatBuffer]:
    """The flat buffers of a unit, one a dtype; none before its first call."""
    unit = _UNITS.get(module)
    return [] if unit is None else unit.buffers


def _sharded(
    forward: Callable[..., Any], mesh: DeviceMesh, slots: Sequence[tuple[str, str, Any]]
) -> Callable[..., Any]:
    """``forward(module, ...)`` with whole parameters in place of ``slots``: (path of a module, name, layout)."""
    platform = mesh.platform
    find = {path: attrgetter(path) if path else lambda module: module for path, _, _ in slots}

    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        what = f"{type(module).__name__} under fully_shard"
        if platform.is_compiling():
            raise RuntimeError(f"{what} is being compiled, which is not supported: compile the modules inside of it")
        for x in (*args, *kwargs.values()):
            _refuse_distributed(x, f"{what} was called with")
        places = []
        for path, name, layout in slots:
            holder = find[path](module)
            p: Any = platform.own_parameters(holder).get(name)
            if _layout_of(p) is not layout:
                raise ValueError(
                    f"{what}: something has taken the place of its parameter {_join(path, name)!r}. Copy values into "
                    "the parameter that is there instead"
                )
            if not p.requires_grad:
                raise ValueError(f"{what}: its parameter {_join(path, name)!r} is frozen: let it be trained")
            places.append((holder, name, p))
        unit, dtypes = _UNITS.get(module), [p.dtype for _, _, p in places]
        if unit is None or unit.dtypes != dtypes:
            unit = _Unit(platform, [p for _, _, p in places], dtypes)
            _UNITS.set(module, unit)
        return unit.run(places, lambda: forward(module, *args, **kwargs), what)

    return run


class _Unit:
    """What the calls of one module share."""

    def __init__(self, platform: Any, parameters: Sequence[Any], dtypes: list[Any]) -> None:
        self.platform, self.dtypes = platform, dtypes
        self.buffers = [FlatBuffer(same) for same in _by_dtype(parameters)]
        self._opened = platform.joint_function(self._opened_forward, self._opened_backward)

    def run(self, places: Sequence[tuple[Any, str, Any]], forward: Callable[[], Any], what: str) -> Any:
        """``forward()`` with whole parameters in ``places``: (module, name, parameter)."""
        platform = self.platform
        whole: dict[int, Any] = {}
        try:
            with platform.no_dispatch():
                shards = dict(zip(self.buffers, _by_dtype([p for _, _, p in places]), strict=True))
                call = Call(shards, platform.requires_grad(places[0][2]))
                for buffer, parameters in call.shards.items():
                    whole.update(zip(map(id, parameters), buffer.views(call, *parameters), strict=True))
            for holder, name, p in places:
                object.__setattr__(holder, name, whole[id(p)])  # see `ModuleRole.own_parameters`
            try:
                output = forward()
            finally:
                for holder, name, _ in places:
                    object.__delattr__(holder, name)
            return self._returned(output, call, what)
        finally:
            for buffer in self.buffers:
                buffer.free()

    def _returned(self, output: Any, call: Call, what: str) -> Any:
        """``output``, whose cotangents open the buffers before they reach what the forward has computed."""
        platform = self.platform
        found: list[Any] = []

        def collect(x: Any) -> Any:
            _refuse_distributed(x, f"{what} returns")
            if any(buffer.holds(x) for buffer in self.buffers):
                x = platform.clone(x)
            if platform.requires_grad(x):
                found.append(x)
            return x

        # Tensors of one dtype go through one function: then it does not matter which of them the loss needs.
        output = _map_tensors(output, collect, platform, what)
        new: dict[int, Any] = {}
        with platform.no_dispatch():
            for same in _by_dtype(found):
                new.update(zip(map(id, same), self._opened(call, *same), strict=True))
        return _map_tensors(output, lambda x: new.get(id(x), x), platform, what)

    def _opened_forward(self, ctx: Any, call: Call, *xs: Any) -> Sequence[Any]:
        ctx.call = call
        return [self.platform.detach(x) for x in xs]

    def _opened_backward(self, ctx: Any, *cotangents: Any) -> Sequence[Any]:
        for buffer in self.buffers:
            buffer.open(ctx.call)
        return cotangents


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _layout_of(p: Any) -> Any:
    return getattr(p, "_layout", None)


def _by_dtype(xs: Sequence[Any]) -> list[list[Any]]:
    """The tensors, each once, in lists of one dtype."""
    lists: dict[Any, dict[int, Any]] = {}
    for x in xs:
        lists.setdefault(x.dtype, {})[id(x)] = x
    return [list(same.values()) for same in lists.values()]


def _refuse_distributed(x: Any, where: str) -> None:
    """Raise ValueError for a DTensor: the batch is distributed then, and all ranks have one loss, of which gradients
    are sums. One that is deeper in the inputs meets whole plain parameters, which is refused too."""
    if isinstance(x, DTensor):
        raise ValueError(
            f"{where} a DTensor of shape {tuple(x._layout.shape)} placed {list(x.placements)}: give and compute plain "
            "tensors, this rank's part of the batch, as in x.to_local()"
        )


def _map_tensors(tree: Any, convert: Callable[[Any], Any], platform: Any, what: str) -> Any:
    """``tree`` of tuples, lists and dicts with ``convert(x)`` in place of each tensor. Raises TypeError for what could
    hold a tensor otherwise."""
    if platform.is_tensor(tree):
        return convert(tree)
    if type(tree) in (tuple, list):
        return type(tree)([_map_tensors(item, convert, platform, what) for item in tree])
    if type(tree) is dict:
        return {key: _map_tensors(value, convert, platform, what) for key, value in tree.items()}
    if not isinstance(tree, (type(None), bool, int, float, str)):
        raise TypeError(f"{what} returns a {type(tree).__name__}: return tensors, or tuples, lists and dicts of them")
    return tree
