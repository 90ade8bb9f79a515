"""Filling the state of an optimizer from a checkpoint."""

from __future__ import annotations

from typing import Any

from hyper_parallel.checkpoint.nest import joined, layout_of
from hyper_parallel.checkpoint.values import decode
from hyper_parallel.platform import OptimizerState

__all__ = ["fill_optimizer"]


def fill_optimizer(filling: Any, optimizer: Any, saved: dict[str, Any], path: str) -> None:
    """Match the state of an optimizer, even one that has not stepped, with the checkpoint. ``filling`` is a
    `targets.Filling`."""
    platform = filling.platform
    now: OptimizerState = platform.optimizer_state(optimizer)
    groups = saved["groups"]
    if [len(group) for group in now.parameters] != [len(group["parameters"]) for group in groups]:
        filling.wrong(
            f"{path} has parameter groups of sizes {[len(group) for group in now.parameters]}, and the checkpoint has "
            f"groups of sizes {[len(group['parameters']) for group in groups]}"
        )
        return
    moments: dict[str, list[str]] = {}
    by_parameter = sorted({p for group in groups for p in group["parameters"]}, key=len, reverse=True)
    known = set(by_parameter)
    for name in filling.names_below(path):
        parameter, _, moment = name[len(path) + 1 if path else 0 :].rpartition(".")
        if parameter in known:
            moments.setdefault(parameter, []).append(moment)
    names, rows, count = filling.parameter_names, iter(now.state), 0
    state: list[dict[str, Any]] = []
    for group, stored_group in zip(now.parameters, groups, strict=True):
        for p, by_place in zip(group, stored_group["parameters"], strict=True):
            name = names.get(id(p), str(count))
            count += 1
            row, new = next(rows), {}
            # If the state has an optimizer without its module, the optimizer's parameters are named by numbers.
            source = name if name in known or (id(p) in names and not by_place.isdigit()) else by_place
            if source not in known:
                filling.lacks(joined(path, name))
                state.append(row)
                continue
            is_new = not any(map(platform.is_tensor, row.values())) and row.get("step", 0) == 0
            if is_new and source not in saved["numbers"] and source not in moments:
                state.append(row)  # neither optimizer has stepped
                continue
            numbers = {n: decode(value) for n, value in saved["numbers"].get(source, {}).items()}
            for moment in moments.get(source, ()):
                stored = filling.index.find(joined(path, f"{source}.{moment}"))
                here = joined(path, f"{name}.{moment}")
                if platform.is_tensor(row.get(moment)):
                    filling.fill(row[moment], stored or here, here, p)
                    new[moment] = row[moment]
                elif not row:
                    new[moment] = _first_moment(filling, p, stored or here, here)
                else:
                    filling.asked(stored or here)
                    filling.wrong(
                        f"the checkpoint has the state {here}, which {type(optimizer).__name__} does not have"
                    )
            for moment, value in row.items():
                if moment not in new and platform.is_tensor(value):
                    filling.lacks(joined(path, f"{name}.{moment}"))
                    new[moment] = value
                elif moment not in new:
                    new[moment] = numbers.get(moment, value)
            state.append({**numbers, **new})
    options = [decode(group["options"]) for group in groups]
    filling.at_end(lambda: platform.set_optimizer_state(optimizer, OptimizerState(now.parameters, options, state)))


def _first_moment(filling: Any, p: Any, stored: str, name: str) -> Any:
    """Return a new tensor to fill, placed like its parameter, for an optimizer that has not stepped yet."""
    there, layout = filling.index.tensors[stored], layout_of(p)
    shape = there.shape
    if layout is not None and (shape == layout.shape or filling.singleton(p, tuple(layout.shape), there) is not None):
        return filling.new_tensor(stored, layout, p)
    if layout is not None and len(shape):
        filling.wrong(
            f"{name} has shape {shape}, and its parameter has shape {tuple(layout.shape)}: the placement of this "
            "state is unknown before the first step. Let the optimizer take one step before loading"
        )
        return None
    return filling.new_tensor(stored, None, p)
