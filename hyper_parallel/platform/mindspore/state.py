"""State of MindSpore's cells and optimizers that a checkpoint saves, under torch's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn
from mindspore.experimental.optim import Optimizer as ExperimentalOptimizer

from hyper_parallel.platform.contract import OptimizerState
from hyper_parallel.platform.mindspore.tensors.tensor import InterceptedTensor, NoDispatch
from hyper_parallel.platform.mindspore.torch_names import (
    CELLS,
    COUNTERS,
    FIRST_COUNT,
    FIRST_STEP,
    MOMENTUM,
    NUMBERS,
    SINGLETON_DIMS,
    STATE,
    STATE_OF,
    UNCOUNTED,
    Moment,
)

__all__ = ["StateVerbs"]

_NAMES = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128"
_FLOAT8 = "float8_e4m3fn float8_e5m2"
_BATCH_NORM = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}


class StateVerbs:
    """MindSpore's implementation of `StateRole`."""

    dtypes: Mapping[str, Any] = {
        name: getattr(ms, "bool_" if name == "bool" else name)
        for name in f"{_NAMES} {_FLOAT8}".split()
        if hasattr(ms, "bool_" if name == "bool" else name)
    }

    def saved_tensors(self, module: Any) -> Iterator[tuple[str, Tensor]]:
        for path, cell in module.cells_and_names():
            names = next((CELLS[cls] for cls in type(cell).__mro__ if cls in CELLS), {})
            temporary = getattr(cell, "_non_persistent_buffers_set", ())
            held = [(n, b) for n, b in cell._buffers.items() if n not in temporary]
            for name, x in [*cell._params.items(), *held]:
                if x is not None:
                    name = names.get(name, name)
                    yield f"{path}.{name}" if path else name, x

    singleton_dims: Mapping[type, Mapping[str, int]] = SINGLETON_DIMS
    keeps_meta = False

    def give_memory(self, x: Any) -> None:
        x.init_data()

    def is_optimizer(self, x: Any) -> bool:
        return isinstance(x, (nn.Optimizer, ExperimentalOptimizer))  # optimizers of mint.optim are of the latter class

    def optimizer_state(self, optimizer: Any) -> OptimizerState:
        groups = _groups(optimizer)
        parameters = [list(group) for group, _ in groups]
        options = [own for group, own in groups for _ in group]
        state: list[dict[str, Any]] = [{} for _ in options]
        for attribute, tensors in _per_parameter(optimizer, len(options)).items():
            moment = _moment(optimizer, attribute)
            if attribute == FIRST_STEP:
                continue
            for row, x, own in zip(state, tensors, options, strict=True):
                if moment.option is None or own.get(moment.option):
                    row[moment.name] = float(_one(x)) if attribute in NUMBERS else x
        for name, number in _shared(optimizer).items():
            for row in state:
                row[name] = number
        return OptimizerState(parameters, _options(optimizer), state)

    def set_optimizer_state(self, optimizer: Any, state: OptimizerState) -> None:
        _set_options(optimizer, state.options)
        held = _per_parameter(optimizer, len(state.state))
        for attribute in NUMBERS:
            for x, row in zip(held.get(attribute, ()), state.state, strict=False):
                if attribute in row:
                    _put(x, row[attribute])
        shared = dict(state.state[0]) if state.state else {}
        if type(optimizer).__name__ == "SGD":
            # A nonzero momentum shows that a step was made.
            momentum = [x for attribute in MOMENTUM for x in held.get(attribute, ())]
            stepped = any(bool(x.size and x.asnumpy().any()) for x in map(_local, momentum))
            for x in held.get(FIRST_STEP, ()):
                _put(x, 0.0 if stepped else 1.0)
            if stepped and shared.get("step") == 0:
                shared["step"] = 1.0
        _set_shared(optimizer, shared)


def _groups(optimizer: Any) -> list[tuple[Sequence[Any], dict[str, Any]]]:
    """Return the parameters and the options of each parameter group."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is not None:
        return [(group["params"], group) for group in groups]
    options = {"momentum": _option_of(optimizer, "momentum"), "centered": getattr(optimizer, "centered", False)}
    return [(optimizer.parameters, {**options, "amsgrad": getattr(optimizer, "use_amsgrad", False)})]


def _option_of(optimizer: Any, name: str) -> Any:
    value = getattr(optimizer, name, None)
    return float(_one(value)) if isinstance(value, Tensor) and value.size == 1 else value


def _moment(optimizer: Any, attribute: str) -> Moment:
    own = STATE_OF.get(type(optimizer).__name__, {})
    return own.get(attribute) or STATE.get(attribute) or Moment(attribute)


def _per_parameter(optimizer: Any, count: int) -> dict[str, Sequence[Any]]:
    """Return the state tensors by attribute name, in a list with a tensor for each parameter."""
    found: dict[str, Sequence[Any]] = {}
    for attribute, value in vars(optimizer).items():
        if attribute in ("parameters", "_parameters", "params") or not isinstance(value, (tuple, list)):
            continue
        kept = len(value) == count and all(isinstance(x, Parameter) for x in value)
        if kept and not (count and value[0] is optimizer.parameters[0]):
            found[attribute] = value
    return found


def _local(x: Any) -> Any:
    return x.to_local() if isinstance(x, InterceptedTensor) else x


def _shared(optimizer: Any) -> dict[str, float]:
    """Return the numbers that all parameters share: the number of steps, and other numbers of the optimizer."""
    found: dict[str, float] = {}
    if type(optimizer).__name__ in UNCOUNTED:
        found["step"] = 0.0
    for attribute, value in optimizer._params.items():
        # A parameter of the model may have one element, which another rank holds.
        if value is None or value.size != 1 or isinstance(value, InterceptedTensor):
            continue
        if attribute in COUNTERS:
            found["step"] = float(_one(value)) - FIRST_COUNT.get(type(optimizer), 0)
        elif attribute.endswith("_power"):
            found[attribute] = float(_one(value))
    return found


def _one(value: Any) -> Any:
    with NoDispatch():
        return value.asnumpy().reshape(-1)[0]


def _put(held: Any, number: float) -> None:
    """Write a number in place. A compiled step would not see the new memory that `set_data` gives."""
    with NoDispatch():
        held.copy_(ms.ops.full(tuple(held.shape), number, dtype=held.dtype))


def _set_shared(optimizer: Any, row: dict[str, Any]) -> None:
    step = row.get("step")
    betas = {"beta1_power": "beta1", "beta2_power": "beta2"}
    for attribute, value in optimizer._params.items():
        if value is None or value.size != 1:
            continue
        number = None
        if attribute in COUNTERS and step is not None:
            number = step + FIRST_COUNT.get(type(optimizer), 0)
        elif attribute in row:
            number = row[attribute]
        elif attribute in betas and step is not None:
            number = float(_one(getattr(optimizer, betas[attribute]))) ** step  # torch computes it from the step
        if number is not None:
            _put(value, number)


def _options(optimizer: Any) -> list[dict[str, Any]]:
    groups = getattr(optimizer, "param_groups", None)
    if groups is not None:
        return [
            {name: _plain(x) for name, x in group.items() if name != "params" and _is_option(x)} for group in groups
        ]
    rate = getattr(optimizer, "learning_rate", None)
    return [{"lr": float(_one(rate))} if isinstance(rate, Tensor) and rate.size == 1 else {}]


def _is_option(x: Any) -> bool:
    if isinstance(x, (tuple, list)):
        return all(map(_is_option, x))
    return x is None or isinstance(x, (bool, int, float, str)) or (isinstance(x, Tensor) and x.size == 1)


def _plain(x: Any) -> Any:
    if isinstance(x, (tuple, list)):
        return tuple(map(_plain, x))
    return float(_one(x)) if isinstance(x, Tensor) else x


def _set_options(optimizer: Any, options: Sequence[dict[str, Any]]) -> None:
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        rate = getattr(optimizer, "learning_rate", None)
        if isinstance(rate, Parameter) and rate.size == 1 and options and "lr" in options[0]:
            _put(rate, options[0]["lr"])
        return
    for group, saved in zip(groups, options, strict=True):
        for name, value in saved.items():
            held = group.get(name)
            if isinstance(held, Tensor):
                _put(held, value)
            elif name in group and name != "params" and _is_option(held):
                group[name] = _like(held, value)


def _like(held: Any, value: Any) -> Any:
    """Convert a number to the type of the existing number. A compiled step distinguishes 0 from 0.0, and torch does
    not."""
    if isinstance(held, (tuple, list)) and isinstance(value, (tuple, list)) and len(held) == len(value):
        return type(held)(map(_like, held, value))
    return float(value) if isinstance(held, float) and type(value) is int else value
