"""Torch's names of the parameters of MindSpore's cells and of the state of its optimizers: data alone.

A name that is missing here is the same in both frameworks. A parameter has the same order of dimensions in both
frameworks: also (out, in) for linear layers. In MindSpore, kernels of 1-D convolutions have an additional dimension of
size 1.
"""

from __future__ import annotations

from typing import NamedTuple

from mindspore import mint, nn

__all__ = [
    "CELLS",
    "COUNTERS",
    "FIRST_COUNT",
    "FIRST_STEP",
    "MOMENTUM",
    "NUMBERS",
    "SINGLETON_DIMS",
    "STATE",
    "STATE_OF",
    "UNCOUNTED",
    "Moment",
]

_NORM = {"gamma": "weight", "beta": "bias"}
_BATCH_NORM = {**_NORM, "moving_mean": "running_mean", "moving_variance": "running_var"}
#: Class of cells -> its names of parameters and buffers -> torch's names.
CELLS: dict[type, dict[str, str]] = {
    nn.Embedding: {"embedding_table": "weight"},
    nn.EmbeddingLookup: {"embedding_table": "weight"},
    nn.LayerNorm: _NORM,
    nn.GroupNorm: _NORM,
    nn.BatchNorm1d: _BATCH_NORM,
    nn.BatchNorm2d: _BATCH_NORM,
    nn.BatchNorm3d: _BATCH_NORM,
}
#: Value of `StateRole.singleton_dims`: kernels are (out, in, 1, width), in torch (out, in, width).
SINGLETON_DIMS: dict[type, dict[str, int]] = {nn.Conv1d: {"weight": 2}, nn.Conv1dTranspose: {"weight": 2}}


class Moment(NamedTuple):
    """A tensor, or a number, that an optimizer stores for each parameter.

    Attributes:
        name: torch's name.
        option: option of the optimizer. If it is false, torch has no such state, and MindSpore does not use it.
    """

    name: str
    option: str | None = None


#: Attribute of optimizers -> torch's name for it.
STATE: dict[str, Moment] = {
    "moment1": Moment("exp_avg"),
    "moments1": Moment("exp_avg"),
    "moment2": Moment("exp_avg_sq"),
    "moments2": Moment("exp_avg_sq"),
    "max_exp_avg_sq": Moment("max_exp_avg_sq", "amsgrad"),
    "moments": Moment("momentum_buffer"),
    "momentum_buf": Moment("momentum_buffer", "momentum"),
    "moment": Moment("momentum_buffer", "momentum"),
    "mean_square": Moment("square_avg"),
    "mean_grad": Moment("grad_avg", "centered"),
    "ms": Moment("square_avg"),
    "mg": Moment("grad_avg", "centered"),
}
#: Class of optimizer -> attribute -> torch's name, where it differs from `STATE`.
STATE_OF: dict[str, dict[str, Moment]] = {
    "SGD": {"accum": Moment("momentum_buffer", "momentum")},
    "Adagrad": {"accum": Moment("sum")},
    "Adadelta": {"accum": Moment("square_avg"), "accum_update": Moment("acc_delta")},
    "AdaMax": {"moment2": Moment("exp_inf")},
}
#: Attributes with a number for each parameter, which torch stores as a 0-d tensor.
NUMBERS = ("mu", "eta", "mu_product")
#: Attribute of SGD that is 1 until a first step has set its momentum. Torch has no momentum until then.
FIRST_STEP = "stat"
#: Attributes that are the momentum of SGD, which the first step sets. `FIRST_STEP` or the counter shows whether it did.
MOMENTUM = ("accum", "momentum_buf")
#: Attributes that count steps; torch has one counter for each parameter, "step".
COUNTERS = ("state_step", "step_t", "global_step")
#: Initial values of counters that are not 0.
FIRST_COUNT: dict[type, int] = {mint.optim.AdamW: -1}
#: Names of classes that count no steps. Torch's classes do, and nothing depends on that.
UNCOUNTED = ("RMSprop", "Adadelta")
