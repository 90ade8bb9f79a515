"""State dicts of models and optimizers, sharded or full, on both frameworks. Names are those of
``torch.distributed.checkpoint.state_dict``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from hyper_parallel.checkpoint.nest import layout_of
from hyper_parallel.checkpoint.ranks import all_ranks
from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.integrations.torch.state_dict_values import Source, StateDictOptions, given
from hyper_parallel.platform import OptimizerState, Platform, get_platform

__all__ = [
    "IncompatibleKeys",
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]


class IncompatibleKeys(NamedTuple):
    """Keys that did not match, with ``strict=False``.

    Attributes:
        missing_keys: keys of the model that the state dict lacks.
        unexpected_keys: keys of the state dict that the model lacks.

    Mirrors the result of ``torch.nn.Module.load_state_dict``.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def get_model_state_dict(
    model: Any, *, submodules: None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Return parameters and persistent buffers of a model by torch's names. A tied tensor appears under each of its
    names.

    Args:
        model: model with distributed, fully sharded or plain parameters.
        submodules: deprecated in torch; must be None.
        options: options. With ``full_state_dict`` all ranks must call the function.

    Raises:
        ValueError: for ``submodules``.

    Example:
        >>> import torch
        >>> from hyper_parallel.checkpoint.state_dict import get_model_state_dict
        >>> sorted(get_model_state_dict(torch.nn.Linear(4, 6)))
        ['bias', 'weight']

    Mirrors ``torch.distributed.checkpoint.state_dict.get_model_state_dict``.
    """
    platform, options = _asked(submodules, options)
    held = dict(platform.saved_tensors(model))
    if options.ignore_frozen_params:
        frozen = _frozen(model, platform)
        held = {name: x for name, x in held.items() if id(x) not in frozen}
    return given(held, options, platform)


def get_optimizer_state_dict(
    model: Any, optimizers: Any, *, submodules: None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Return the state of one or several optimizers: ``{"state": {parameter name: state}, "param_groups": [options and
    names]}``.

    Args:
        model: model whose parameters are optimized; names are the keys of `get_model_state_dict`.
        optimizers: an optimizer of the framework, or several.
        submodules: deprecated in torch; must be None.
        options: as in `get_model_state_dict`. With ``flatten_optimizer_state_dict`` the result is one flat dict.

    Raises:
        ValueError: if a parameter of the optimizer does not belong to the model.

    Example:
        >>> import torch
        >>> from hyper_parallel.checkpoint.state_dict import get_optimizer_state_dict
        >>> model = torch.nn.Linear(4, 6)
        >>> get_optimizer_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.5))["param_groups"][0]["params"]
        ['weight', 'bias']

    Mirrors ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``; counters are numbers.
    """
    platform, options = _asked(submodules, options)
    state: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in _each(optimizers, platform):
        now = platform.optimizer_state(optimizer)
        names, rows = _names(model, now, platform), iter(now.state)
        state |= {name: next(rows) for group in names for name in group}
        groups += [{**own, "params": group} for own, group in zip(now.options, names, strict=True)]
    flat = {(name, key): x for name, row in state.items() for key, x in row.items()}
    kept = given(flat, options, platform)
    if flat and not kept:
        return {}
    if options.flatten_optimizer_state_dict:
        found = {f"state.{name}.{key}": x for (name, key), x in kept.items()}
        for group in groups:
            found |= {f"param_groups.{n}.{k}": v for n in group["params"] for k, v in group.items() if k != "params"}
        return found
    by_name: dict[str, Any] = {name: {} for name in state}
    for (name, key), x in kept.items():
        by_name[name][key] = x
    return {"state": by_name, "param_groups": groups}


def get_state_dict(
    model: Any, optimizers: Any, *, submodules: None = None, options: StateDictOptions | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of `get_model_state_dict` and `get_optimizer_state_dict`.

    Args:
        model: as in these two functions.
        optimizers: as in `get_optimizer_state_dict`.
        submodules: deprecated in torch; must be None.
        options: as in these two functions.

    Example:
        >>> import torch
        >>> from hyper_parallel.checkpoint.state_dict import get_state_dict
        >>> model = torch.nn.Linear(4, 6)
        >>> of_model, of_optimizer = get_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.5))
        >>> sorted(of_model), sorted(of_optimizer)
        (['bias', 'weight'], ['param_groups', 'state'])

    Mirrors ``torch.distributed.checkpoint.state_dict.get_state_dict``.
    """
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options),
    )


def set_model_state_dict(
    model: Any, model_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> IncompatibleKeys:
    """Copy the values of a state dict into parameters and buffers, which stay the same objects with the same
    placements.

    Args:
        model: as in `get_model_state_dict`.
        model_state_dict: full plain tensors, or DTensors of any placements on the meshes of the model's tensors. With
            ``broadcast_from_rank0`` the state dicts of other ranks are ignored.
        options: options. All ranks must call the function with the same ones.

    Returns:
        The missing and the unexpected names; both empty unless ``strict=False``.

    Raises:
        ValueError: if names or shapes do not match, or a DTensor is on another mesh. Nothing has been changed then.

    Example:
        >>> import torch
        >>> from hyper_parallel.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
        >>> model, other = torch.nn.Linear(4, 6), torch.nn.Linear(4, 6)
        >>> set_model_state_dict(other, get_model_state_dict(model))
        IncompatibleKeys(missing_keys=[], unexpected_keys=[])
        >>> torch.equal(other.weight, model.weight)
        True

    Mirrors ``torch.distributed.checkpoint.state_dict.set_model_state_dict``.
    """
    platform, options = _asked(None, options)
    held = dict(platform.saved_tensors(model))
    source = Source(model_state_dict, options, platform)
    missing, unexpected = sorted(held.keys() - source.shapes.keys()), sorted(source.shapes.keys() - held.keys())
    first = {id(x): name for name, x in reversed(held.items())}
    given = {id(x) for name, x in held.items() if name in source.shapes}
    missing = [n for n in missing if id(held[n]) not in given]
    if options.ignore_frozen_params:
        frozen = _frozen(model, platform)
        missing = [n for n in missing if id(held[n]) not in frozen]
    wrong = [
        f"{name} has shape {tuple(held[name].shape)} in the model and {source.shapes[name]} in the state dict"
        for name in held
        if name in source.shapes and source.shapes[name] != tuple(held[name].shape)
    ]
    for name, x in model_state_dict.items():
        if isinstance(x, DTensor) and name in held and not options.broadcast_from_rank0:
            mesh = getattr(held[name], "device_mesh", x.device_mesh)
            if mesh is not x.device_mesh:
                wrong.append(f"{name} is on {mesh} in the model and on {x.device_mesh} in the state dict")
    if wrong or (options.strict and (missing or unexpected)):
        raise ValueError(f"the state dict does not fit: missing {missing}, unexpected {unexpected}, {wrong}")
    for name in source.shapes:
        if name in held and (first[id(held[name])] == name or first[id(held[name])] not in source.shapes):
            source.fill(held[name], name)
        elif options.broadcast_from_rank0:
            source.skip(name)
    return IncompatibleKeys(missing, unexpected)


def set_optimizer_state_dict(
    model: Any,
    optimizers: Any,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load the state of `get_optimizer_state_dict` into one or several optimizers, even if they have not stepped yet.

    Args:
        model: model whose parameters are optimized.
        optimizers: an optimizer of the framework, or several.
        optim_state_dict: result of `get_optimizer_state_dict`; tensors may be as in `set_model_state_dict`.
        options: as in `set_model_state_dict`.

    Raises:
        ValueError: if the state dict lacks a parameter, or has a tensor of another shape. Unless ``strict=False``, also
            if it lacks a tensor that the optimizer has now.

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
    platform, options = _asked(None, options)
    found = [(optimizer, platform.optimizer_state(optimizer)) for optimizer in _each(optimizers, platform)]
    names = [_names(model, now, platform) for _, now in found]
    called = [name for of_optimizer in names for group in of_optimizer for name in group]
    flat, of_name = _taken_apart(optim_state_dict, called, options.flatten_optimizer_state_dict)
    if options.broadcast_from_rank0:
        of_name = all_ranks(platform, None).gather(of_name)[0]
    source = Source(flat, options, platform)
    lacking = [name for name in called if name not in of_name]
    if lacking:
        raise ValueError(
            f"the state dict of the optimizer has no entry for {lacking}: its entries are {sorted(of_name)}"
        )
    if options.strict and (lacking := _lacking(found, names, source, platform)):
        raise ValueError(
            f"the state dict of the optimizer lacks {lacking}, which this optimizer has: the saved optimizer had not "
            "taken a step, or was of another class. Make a new optimizer, or pass strict=False, which leaves the "
            "missing states unchanged"
        )
    filled: set[str] = set()
    for (optimizer, now), its_names in zip(found, names, strict=True):
        rows, new_rows = iter(now.state), []
        for group, parameters in zip(its_names, now.parameters, strict=True):
            for name, p in zip(group, parameters, strict=True):
                new_rows.append(_row(name, p, next(rows), source, platform, filled))
        own = [of_name[group[0]] if group else {} for group in its_names]
        platform.set_optimizer_state(optimizer, OptimizerState(now.parameters, own, new_rows))
    for path in source.shapes:
        if path not in filled and options.broadcast_from_rank0:
            source.skip(path)


def set_state_dict(
    model: Any,
    optimizers: Any,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> IncompatibleKeys:
    """Call `set_model_state_dict` and `set_optimizer_state_dict`.

    Args:
        model: as in these two functions.
        optimizers: as in `set_optimizer_state_dict`.
        model_state_dict: as in `set_model_state_dict`.
        optim_state_dict: as in `set_optimizer_state_dict`.
        options: as in these two functions.

    Raises:
        ValueError: as the two functions raise.

    Example:
        >>> import torch
        >>> from hyper_parallel.checkpoint.state_dict import get_state_dict, set_state_dict
        >>> model = torch.nn.Linear(4, 6)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> of_model, of_optimizer = get_state_dict(model, optimizer)
        >>> set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
        IncompatibleKeys(missing_keys=[], unexpected_keys=[])

    Mirrors ``torch.distributed.checkpoint.state_dict.set_state_dict``.
    """
    result = set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return result


def _asked(submodules: Any, options: StateDictOptions | None) -> tuple[Platform, StateDictOptions]:
    if submodules is not None:
        raise ValueError("submodules=... is not supported: call the function with the submodule as the model")
    return get_platform(), options or StateDictOptions()


def _each(optimizers: Any, platform: Platform) -> list[Any]:
    if platform.is_optimizer(optimizers):
        return [optimizers]
    found = [*optimizers] if isinstance(optimizers, Iterable) else [optimizers]
    if wrong := [type(x).__name__ for x in found if not platform.is_optimizer(x)]:
        raise TypeError(f"optimizers must be optimizers of the framework, got {', '.join(wrong)}")
    return found


def _frozen(model: Any, platform: Platform) -> set[int]:
    """Return the ids of parameters that require no gradient."""
    return {
        id(p)
        for _, module in platform.named_modules(model)
        for _, p in platform.named_parameters(module)
        if not p.requires_grad
    }


def _taken_apart(
    state: Mapping[str, Any], names: list[str], flattened: bool
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return tensors and numbers of a state dict by ``name.key``, and each parameter's options by the parameter's
    name."""
    if not flattened:
        flat = {f"{name}.{key}": x for name, row in state.get("state", {}).items() for key, x in row.items()}
        groups = [({k: v for k, v in g.items() if k != "params"}, g["params"]) for g in state.get("param_groups", [])]
        return flat, {name: own for own, group in groups for name in group}
    flat = {}
    of_name: dict[str, dict[str, Any]] = {}
    for path, x in state.items():
        kind, _, place = path.partition(".")
        if kind == "state":
            flat[place] = x
        elif name := next((n for n in sorted(names, key=len, reverse=True) if place.startswith(f"{n}.")), None):
            of_name.setdefault(name, {})[place[len(name) + 1 :]] = x
    return flat, of_name


def _lacking(
    found: list[tuple[Any, OptimizerState]], names: list[list[list[str]]], source: Source, platform: Platform
) -> list[str]:
    """Return the names of optimizer state tensors that the state dict lacks."""
    lost = []
    for (_, now), its_names in zip(found, names, strict=True):
        rows = iter(now.state)
        for name in (name for group in its_names for name in group):
            row = next(rows)
            lost += [
                f"{name}.{k}" for k, x in row.items() if platform.is_tensor(x) and f"{name}.{k}" not in source.shapes
            ]
    return lost


def _row(
    name: str, p: Any, row: Mapping[str, Any], source: Source, platform: Platform, filled: set[str]
) -> dict[str, Any]:
    """Return the new optimizer state of the parameter called ``name``."""
    new: dict[str, Any] = {}
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
            raise ValueError(f"{path} has shape {tuple(x.shape)} in the optimizer and {shape} in the state dict")
        source.fill(x, path)
        new[key] = x
    return {**row, **new}


def _names(model: Any, state: OptimizerState, platform: Platform) -> list[list[str]]:
    names: dict[int, str] = {}
    for name, x in platform.saved_tensors(model):
        names.setdefault(id(x), name)
    lost = [i for i, p in enumerate(p for group in state.parameters for p in group) if id(p) not in names]
    if lost:
        raise ValueError(
            f"the optimizer's parameters {lost} (numbered across its groups) do not belong to the model: pass the "
            "model whose parameters the optimizer has"
        )
    return [[names[id(p)] for p in group] for group in state.parameters]
