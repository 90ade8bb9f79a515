"""State dicts of models and optimizers, sharded or whole, on both frameworks, under the names of
``torch.distributed.checkpoint.state_dict``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hyper_parallel.checkpoint.nest import layout_of
from hyper_parallel.checkpoint.ranks import all_ranks
from hyper_parallel.core.dtensor.api import distribute_tensor
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.placement_types import Replicate
from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.platform import OptimizerState, Platform, get_platform

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
]


@dataclass
class StateDictOptions:
    """What the functions of this module give and take.

    Attributes:
        full_state_dict: whole plain tensors in place of DTensors.
        cpu_offload: in the memory of the host. With ``full_state_dict`` the first rank alone gets them, others an empty
            dict.
        strict: whether every tensor of the model must be given, and nothing else.
        broadcast_from_rank0: the first rank alone has the whole tensors and gives them to all; needs
            ``full_state_dict``.
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    strict: bool = True
    broadcast_from_rank0: bool = False


def get_model_state_dict(model: Any, *, options: StateDictOptions | None = None) -> dict[str, Any]:
    """Parameters and persistent buffers of a model by torch's names. What is tied is there under each name.

    Args:
        model: parallelised, fully sharded or neither.
        options: with ``full_state_dict`` all ranks must call it.

    Example:
        >>> import torch
        >>> from hyper_parallel.checkpoint.state_dict import get_model_state_dict
        >>> sorted(get_model_state_dict(torch.nn.Linear(4, 6)))
        ['bias', 'weight']

    Mirrors ``torch.distributed.checkpoint.state_dict.get_model_state_dict``.
    """
    platform = get_platform()
    return _given(dict(platform.saved_tensors(model)), options or StateDictOptions(), platform)


def get_optimizer_state_dict(model: Any, optimizer: Any, *, options: StateDictOptions | None = None) -> dict[str, Any]:
    """``{"state": {name of a parameter: its state}, "param_groups": [options and names]}`` of an optimizer.

    Args:
        model: whose parameters it steps; the names are those of `get_model_state_dict`.
        optimizer: of the framework.
        options: as there.

    Raises:
        ValueError: where a parameter of the optimizer is none of the model.

    Example:
        >>> import torch
        >>> from hyper_parallel.checkpoint.state_dict import get_optimizer_state_dict
        >>> model = torch.nn.Linear(4, 6)
        >>> get_optimizer_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.5))["param_groups"][0]["params"]
        ['weight', 'bias']

    Mirrors ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``; counters are numbers.
    """
    platform, options = get_platform(), options or StateDictOptions()
    now = platform.optimizer_state(optimizer)
    names = _names(model, now, platform)
    rows = iter(now.state)
    state = {name: next(rows) for group in names for name in group}
    flat = {(name, key): x for name, row in state.items() for key, x in row.items()}
    kept = _given(flat, options, platform)
    if flat and not kept:
        return {}
    found: dict[str, Any] = {name: {} for name in state}
    for (name, key), x in kept.items():
        found[name][key] = x
    groups = [{**own, "params": group} for own, group in zip(now.options, names, strict=True)]
    return {"state": found, "param_groups": groups}


def set_model_state_dict(model: Any, state: Mapping[str, Any], *, options: StateDictOptions | None = None) -> None:
    """Give parameters and buffers the values of a state dict; they stay the same objects, placed as before.

    Args:
        model: as in `get_model_state_dict`.
        state: whole plain tensors, or DTensors on the meshes of the model's, of any placements. With
            ``broadcast_from_rank0`` what other ranks give is not looked at.
        options: see there; all ranks must call it alike.

    Raises:
        ValueError: where names or shapes do not fit, or a DTensor is on another mesh; nothing has been changed then.

    Example:
        >>> import torch
        >>> from hyper_parallel.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
        >>> model, other = torch.nn.Linear(4, 6), torch.nn.Linear(4, 6)
        >>> set_model_state_dict(other, get_model_state_dict(model))
        >>> torch.equal(other.weight, model.weight)
        True

    Mirrors ``torch.distributed.checkpoint.state_dict.set_model_state_dict``.
    """
    platform, options = get_platform(), options or StateDictOptions()
    held = dict(platform.saved_tensors(model))
    source = _Source(state, options, platform)
    missing, unexpected = sorted(held.keys() - source.shapes.keys()), sorted(source.shapes.keys() - held.keys())
    first = {id(x): name for name, x in reversed(held.items())}
    missing = [n for n in missing if not any(m in source.shapes for m, x in held.items() if x is held[n])]
    wrong = [
        f"{name} has shape {tuple(held[name].shape)}, given is {source.shapes[name]}"
        for name in held
        if name in source.shapes and source.shapes[name] != tuple(held[name].shape)
    ]
    for name, x in state.items():
        if isinstance(x, DTensor) and name in held and not options.broadcast_from_rank0:
            mesh = getattr(held[name], "device_mesh", x.device_mesh)
            if mesh is not x.device_mesh:
                wrong.append(f"{name} is on {mesh}, given is a DTensor on {x.device_mesh}")
    if wrong or (options.strict and (missing or unexpected)):
        raise ValueError(f"the state dict does not fit: missing {missing}, unexpected {unexpected}, {wrong}")
    for name in source.shapes:
        if name in held and (first[id(held[name])] == name or first[id(held[name])] not in source.shapes):
            source.fill(held[name], name)
        elif options.broadcast_from_rank0:
            source.skip(name)


def set_optimizer_state_dict(
    model: Any, optimizer: Any, state: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> None:
    """Let an optimizer, which may not have stepped, go on with what `get_optimizer_state_dict` gave.

    Args:
        model: whose parameters it steps.
        optimizer: of the framework.
        state: see there; tensors as in `set_model_state_dict`.
        options: as there.

    Raises:
        ValueError: where a parameter has no state there, or of another shape.

    Example:
        >>> import torch
        >>> from hyper_parallel.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
        >>> model = torch.nn.Linear(4, 6)
        >>> first, second = (torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.5, 0.1))
        >>> set_optimizer_state_dict(model, second, get_optimizer_state_dict(model, first))
        >>> second.param_groups[0]["lr"]
        0.5

    Mirrors ``torch.distributed.checkpoint.state_dict.set_optimizer_state_dict``.
    """
    platform, options = get_platform(), options or StateDictOptions()
    now = platform.optimizer_state(optimizer)
    names = _names(model, now, platform)
    flat = {f"{name}.{key}": x for name, row in state.get("state", {}).items() for key, x in row.items()}
    groups = state.get("param_groups", [])
    if options.broadcast_from_rank0:
        groups = all_ranks(platform, None).gather(groups)[0]
    source = _Source(flat, options, platform)
    of_name = {name: group for group in groups for name in group["params"]}
    lacking = [name for group in names for name in group if name not in of_name]
    if lacking:
        raise ValueError(f"the state dict of the optimizer has nothing of {lacking}, it has {sorted(of_name)}")
    rows, new_rows, filled = iter(now.state), [], set()
    for group, parameters in zip(names, now.parameters, strict=True):
        for name, p in zip(group, parameters, strict=True):
            row, new = next(rows), {}
            for path in (path for path in source.shapes if path.rpartition(".")[0] == name):
                key, shape = path.rpartition(".")[2], source.shapes[path]
                filled.add(path)
                if shape is None or (shape == () and not platform.is_tensor(row.get(key))):
                    new[key] = source.number(path)
                    continue
                x = row.get(key)
                if x is None:
                    layout = layout_of(p) if shape == tuple(p.shape) else None
                    dtype = platform.dtypes[source.dtypes[path]]
                    x = platform.factory("empty", shape if layout is None else layout.local_shape, None, dtype)
                    x = x if layout is None else platform.wrap(x, layout)
                elif shape != tuple(x.shape):
                    raise ValueError(f"{path} has shape {tuple(x.shape)}, given is {shape}")
                source.fill(x, path)
                new[key] = x
            new_rows.append({**row, **new})
    for path in source.shapes:
        if path not in filled and options.broadcast_from_rank0:
            source.skip(path)
    own = [{k: v for k, v in of_name[group[0]].items() if k != "params"} if group else {} for group in names]
    platform.set_optimizer_state(optimizer, OptimizerState(now.parameters, own, new_rows))


def _names(model: Any, state: OptimizerState, platform: Platform) -> list[list[str]]:
    names: dict[int, str] = {}
    for name, x in platform.saved_tensors(model):
        names.setdefault(id(x), name)
    lost = [i for i, p in enumerate(p for group in state.parameters for p in group) if id(p) not in names]
    if lost:
        raise ValueError(f"the optimizer's parameters {lost}, counted over its groups, are none of the model")
    return [[names[id(p)] for p in group] for group in state.parameters]


def _given(tensors: dict[Any, Any], options: StateDictOptions, platform: Platform) -> dict[Any, Any]:
    """What is given out of tensors and numbers."""
    keep = not (options.full_state_dict and options.cpu_offload) or platform.world() is None or platform.rank() == 0
    found, known = {}, {}
    for name, x in tensors.items():
        if platform.is_tensor(x) and id(x) not in known:
            known[id(x)] = _converted(x, options, platform, keep)
        if keep:
            found[name] = known[id(x)] if platform.is_tensor(x) else x
    return found


def _converted(x: Any, options: StateDictOptions, platform: Platform, keep: bool) -> Any:
    layout = layout_of(x)
    with platform.no_grad():
        if options.full_state_dict and layout is not None:
            x, layout = x.full_tensor(), None
        if not keep:
            return None
        with platform.no_dispatch():
            local = platform.detach(x)
            local = platform.to_host(local, False) if options.cpu_offload else local
        return local if layout is None else platform.wrap(local, layout)


class _Source:
    """Tensors and numbers that are given: by each rank, or by the first one.

    Attributes:
        shapes: by name; None of a number.
        dtypes: by name, of tensors.
    """

    def __init__(self, state: Mapping[str, Any], options: StateDictOptions, platform: Platform) -> None:
        if options.broadcast_from_rank0 and not options.full_state_dict:
            raise ValueError("broadcast_from_rank0=True takes whole tensors: set full_state_dict=True too")
        self._state, self._platform = state, platform
        self._ranks = all_ranks(platform, None)
        self._broadcasts = options.broadcast_from_rank0 and len(self._ranks.members) > 1
        facts = [[name, *self._fact(x)] for name, x in state.items()]
        if self._broadcasts:
            facts = self._ranks.gather(facts)[0]
        self.shapes = {name: None if shape is None else tuple(shape) for name, shape, _, _ in facts}
        self.dtypes = {name: dtype for name, _, dtype, _ in facts}
        self._numbers = {name: number for name, _, _, number in facts}

    def _fact(self, x: Any) -> Iterator[Any]:
        if not self._platform.is_tensor(x):
            return iter((None, "", x))
        dtype = next(name for name, d in self._platform.dtypes.items() if d == x.dtype)
        return iter(([*x.shape], dtype, float(x) if not x.shape else None))

    def number(self, name: str) -> Any:
        """A number."""
        return self._numbers[name]

    def _value(self, name: str) -> Any:
        platform = self._platform
        if not self._broadcasts:
            return self._state[name]
        first = self._ranks.rank == self._ranks.members[0]
        shape, dtype = self.shapes[name], platform.dtypes[self.dtypes[name]]
        x = platform.to_device(self._state[name]) if first else platform.factory("empty", shape or (), None, dtype)
        world = DeviceMesh(None, range(len(self._ranks.members)))
        return distribute_tensor(x, world, [Replicate()], src_data_rank=0).to_local()

    def skip(self, name: str) -> None:
        """Leave a tensor out, which the first rank sends all the same."""
        if self.shapes[name] is not None:
            self._value(name)

    def fill(self, held: Any, name: str) -> None:
        """Write the tensor of that name, or this rank's part of it."""
        platform, layout = self._platform, layout_of(held)
        with platform.no_grad():
            x = self._value(name)
            if isinstance(x, DTensor) and layout is None:
                x = x.full_tensor()
            elif isinstance(x, DTensor):
                if x.device_mesh is not layout.mesh:
                    raise ValueError(f"{name!r} is on {layout.mesh}, given is a DTensor on {x.device_mesh}")
                x = x.redistribute(placements=layout.placements).to_local()
            elif layout is not None:
                x = distribute_tensor(
                    platform.to_device(x), layout.mesh, layout.placements, src_data_rank=None
                ).to_local()
            with platform.no_dispatch():
                platform.write(held, platform.to_dtype(x, held.dtype))
        platform.clear_cache(held)
