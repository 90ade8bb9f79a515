"""Recurrent layers and cells: samples are independent; a cell may also have sharded hidden units."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.torch.basics.tensor import dispatch, handles, is_dtensor
from hyper_parallel.platform.torch.op_table import UnboundCallError
from hyper_parallel.platform.torch.op_table.binding import Bound, find

__all__: list[str] = []


# ---------------------------------------------------------------------------------------------------- layers
def _bind_layer(func: Any, args: tuple, kwargs: dict) -> Bound:
    """Bind (input, states, weights, has_biases, layers, dropout, training, bidirectional, batch_first)."""
    if kwargs or len(args) != 9 or not isinstance(args[2], (tuple, list)):
        raise UnboundCallError  # a packed sequence, whose samples differ in length
    x, states, weights, _, layers, dropout, training, both_ways, batch_first = args
    if dropout and training and layers > 1:
        raise UnboundCallError  # the noise between layers is drawn inside
    states = tuple(states) if isinstance(states, (tuple, list)) else (states,)
    own = "n.." if batch_first else ".n."
    hidden = [".n."] * len(states)
    signature = f"{','.join([own, *hidden, *('.' * w.dim() for w in weights)])}->{','.join([own, *hidden])}"
    features = states[0].shape[-1] * (2 if both_ways else 1)
    shapes = ((*x.shape[:2], features), *(tuple(h.shape) for h in states))
    return (x, *states, *weights), (signature, shapes, 0, len(states), *args[3:])


def _call_layer(func: Any, operands: tuple, static_args: tuple) -> Any:
    count, *rest = static_args[3:]
    states: Any = operands[1 : 1 + count]
    return func(operands[0], states if count > 1 else states[0], list(operands[1 + count :]), *rest)


_LAYER = NativeOp("labelled", _bind_layer, _call_layer)


@handles(*find("lstm gru rnn_tanh rnn_relu", torch))
def layer(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run all time steps in one call, on each rank for its samples."""
    return dispatch(_LAYER, func, args, kwargs)


# ---------------------------------------------------------------------------------------------------- cells
def _bind_cell(func: Any, args: tuple, kwargs: dict) -> Bound:
    x, states, *weights = args
    states = tuple(states) if isinstance(states, (tuple, list)) else (states,)
    signature = f"n.{',n.' * len(states)},..,..,.,.->{','.join(['n.'] * len(states))}"
    shapes = tuple(tuple(h.shape) for h in states)
    return (x, *states, *weights, *(None,) * (4 - len(weights))), (signature, shapes, 0, len(states))


def _call_cell(func: Any, operands: tuple, static_args: tuple) -> Any:
    count = static_args[3]
    states: Any = operands[1 : 1 + count]
    return func(operands[0], states if count > 1 else states[0], *operands[1 + count :])


_CELL = NativeOp("labelled", _bind_cell, _call_cell)


@handles(*find("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", torch))
def cell(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run one time step.

    With unsharded weights, torch's kernel runs on this rank's samples. With sharded weights, matrix products and
    element-wise operations run.
    """
    if kwargs:
        raise UnboundCallError
    x, states, *weights = args
    if not any(is_dtensor(w) and not w._layout.replicated for w in weights):
        return dispatch(_CELL, func, args, {})
    w_x, w_h, b_x, b_h = (*weights, None, None)[:4]
    h = states[0] if isinstance(states, (tuple, list)) else states
    from_x, from_h = F.linear(x, w_x, b_x), F.linear(h, w_h, b_h)
    if func is torch.lstm_cell:
        return _lstm(from_x + from_h, states[1])
    if func is torch.gru_cell:
        return _gru(from_x, from_h, h)
    return torch.tanh(from_x + from_h) if func is torch.rnn_tanh_cell else torch.relu(from_x + from_h)


def _lstm(gates: Any, c: Any) -> tuple[Any, Any]:
    """Return hidden and cell state.

    If the four gates are packed in sharded weights, each rank has the same hidden units of all gates.
    """
    enter, forget, new, leave = gates.chunk(4, dim=1)
    c = torch.sigmoid(forget) * c + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(leave) * torch.tanh(c), c


def _gru(from_x: Any, from_h: Any, h: Any) -> Any:
    (x_reset, x_keep, x_new), (h_reset, h_keep, h_new) = from_x.chunk(3, dim=1), from_h.chunk(3, dim=1)
    new = torch.tanh(x_new + torch.sigmoid(x_reset + h_reset) * h_new)
    return (h - new) * torch.sigmoid(x_keep + h_keep) + new
