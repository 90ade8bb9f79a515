"""What of MindSpore's cells and optimizers belongs into a checkpoint, under torch's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, mint, nn
from mindspore.experimental.optim import Optimizer as ExperimentalOptimizer

from hyper_parallel.platform.contract import OptimizerState
from hyper_parallel.platform.mindspore.tensor import NoDispatch

__all__ = ["StateVerbs"]

_NAMES = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128"
_FLOAT8 = "float8_e4m3fn float8_e5m2"
_BATCH_NORM = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}
#: Class of cells -> its names of what has another name in torch.
_CELL_NAMES: dict[type, dict[str, str]] = {
    nn.Embedding: {"embedding_table": "weight"},
    nn.EmbeddingLookup: {"embedding_table": "weight"},
    nn.LayerNorm: {"gamma": "weight", "beta": "bias"},
    nn.GroupNorm: {"gamma": "weight", "beta": "bias"},
    nn.BatchNorm1d: _BATCH_NORM,
    nn.BatchNorm2d: _BATCH_NORM,
    nn.BatchNorm3d: _BATCH_NORM,
}
#: Attributes of optimizers that hold a tensor for each parameter, and what torch calls it.
_MOMENTS = {
    "moment1": "exp_avg",
    "moments1": "exp_avg",
    "moment2": "exp_avg_sq",
    "moments2": "exp_avg_sq",
    "moments": "momentum_buffer",
}
#: Of single classes, where an attribute of that name means something else elsewhere.
_MOMENTS_OF = {"SGD": {"accum": "momentum_buffer"}, "Adagrad": {"accum": "sum"}, "Adadelta": {"accum": "square_avg"}}
#: Attributes that count steps, and what they hold before the first one, on classes where that is not 0.
_COUNTERS = ("state_step", "step_t", "global_step")
_FIRST_COUNT: dict[type, int] = {mint.optim.AdamW: -1, mint.optim.Adam: -1}
#: Options of optimizers of the older kind, which are attributes of the cell.
_RATES = ("learning_rate",)


class StateVerbs:
    """The group "checkpoints" of the contract."""

    dtypes: Mapping[str, Any] = {
        name: getattr(ms, "bool_" if name == "bool" else name)
        for name in f"{_NAMES} {_FLOAT8}".split()
        if hasattr(ms, "bool_" if name == "bool" else name)
    }

    def saved_tensors(self, module: Any) -> Iterator[tuple[str, Tensor]]:
        for path, cell in module.cells_and_names():
            names = next((_CELL_NAMES[cls] for cls in type(cell).__mro__ if cls in _CELL_NAMES), {})
            temporary = getattr(cell, "_non_persistent_buffers_set", ())
            held = [(n, b) for n, b in cell._buffers.items() if n not in temporary]
            for name, x in [*cell._params.items(), *held]:
                if x is not None:
                    name = names.get(name, name)
                    yield f"{path}.{name}" if path else name, x

    keeps_meta = False

    def give_memory(self, x: Any) -> None:
        x.init_data()

    def is_optimizer(self, x: Any) -> bool:
        return isinstance(x, (nn.Optimizer, ExperimentalOptimizer))  # those of mint.optim are of the latter

    def optimizer_state(self, optimizer: Any) -> OptimizerState:
        parameters = [list(group) for group in _groups(optimizer)]
        flat = [p for group in parameters for p in group]
        state: list[dict[str, Any]] = [{} for _ in flat]
        for name, tensors in _per_parameter(optimizer, len(flat)).items():
            for row, x in zip(state, tensors, strict=True):
                row[name] = x
        for name, x in _shared(optimizer).items():
            for row in state:
                row[name] = x
        return OptimizerState(parameters, _options(optimizer), state)

    def set_optimizer_state(self, optimizer: Any, state: OptimizerState) -> None:
        _set_options(optimizer, state.options)
        if state.state:
            _set_shared(optimizer, state.state[0])


def _groups(optimizer: Any) -> Sequence[Sequence[Any]]:
    groups = getattr(optimizer, "param_groups", None)
    if groups is not None:
        return [group["params"] for group in groups]
    return [optimizer.parameters]


def _per_parameter(optimizer: Any, count: int) -> dict[str, Sequence[Any]]:
    """Torch's name -> a tensor for each parameter."""
    own = _MOMENTS_OF.get(type(optimizer).__name__, {})
    found: dict[str, Sequence[Any]] = {}
    for attribute, value in vars(optimizer).items():
        if attribute in ("parameters", "_parameters", "params") or not isinstance(value, (tuple, list)):
            continue
        if len(value) == count and all(isinstance(x, Parameter) for x in value):
            if count and value[0] is optimizer.parameters[0]:
                continue
            found[own.get(attribute) or _MOMENTS.get(attribute, attribute)] = value
    return found


def _shared(optimizer: Any) -> dict[str, float]:
    """The numbers that all parameters share: how many steps there were, and what is kept beside that."""
    found: dict[str, float] = {}
    for attribute, value in optimizer._params.items():
        if value is None or value.size != 1 or attribute in _RATES or attribute.startswith("learning_rate"):
            continue
        number = float(_one(value))
        if attribute in _COUNTERS:
            found["step"] = number - _FIRST_COUNT.get(type(optimizer), 0)
        elif attribute.endswith("_power"):
            found[attribute] = number
    return found


def _one(value: Any) -> Any:
    with NoDispatch():
        return value.asnumpy().reshape(-1)[0]


def _put(held: Any, number: float) -> None:
    """Write a number where it is: a compiled step would not see another memory (`set_data`)."""
    with NoDispatch():
        held.copy_(ms.ops.full(tuple(held.shape), number, dtype=held.dtype))


def _set_shared(optimizer: Any, row: dict[str, Any]) -> None:
    step = row.get("step")
    betas = {"beta1_power": "beta1", "beta2_power": "beta2"}
    for attribute, value in optimizer._params.items():
        if value is None or value.size != 1:
            continue
        number = None
        if attribute in _COUNTERS and step is not None:
            number = step + _FIRST_COUNT.get(type(optimizer), 0)
        elif attribute in row:
            number = row[attribute]
        elif attribute in betas and step is not None:
            number = float(_one(getattr(optimizer, betas[attribute]))) ** step  # torch works it out of the step
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
                group[name] = value
