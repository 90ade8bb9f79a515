"""Calls that are remembered: the facts that make two calls the same one, and that the second is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import DTensor, Replicate, init_device_mesh
from hyper_parallel.core.operations.dispatch import CALLS
from tests.torch.support import close, randn


def distributed(x: torch.Tensor) -> Any:
    return DTensor.from_local(x, init_device_mesh(None, (1,)), [Replicate()])


#: A call with a number, which must not be taken for the call with another one.
NUMBERS: dict[str, Callable[[Any, Any, float], Any]] = {
    "layer_norm, last": lambda x, w, n: F.layer_norm(x, (6,), w, w, n),
    "layer_norm, by name": lambda x, w, n: F.layer_norm(x, (6,), w, w, eps=n),
    "rms_norm, last": lambda x, w, n: F.rms_norm(x, (6,), w, n),
    "addmm": lambda x, w, n: torch.addmm(x, x, torch.ones_like(x)[:, :1] * w, alpha=n) if x.shape[0] == 6 else x * n,
    "leaky_relu": lambda x, w, n: F.leaky_relu(x, n),
    "clamp": lambda x, w, n: x.clamp(-n, n),
    "add": lambda x, w, n: torch.add(x, w, alpha=n),
    "div": lambda x, w, n: torch.div(x, n),
    "softmax of a product": lambda x, w, n: (x * n).softmax(-1),
    "cross_entropy": lambda x, w, n: F.cross_entropy(x, torch.zeros_like(x)[:, 0].long(), label_smoothing=n / 8),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_count(name: str) -> None:
    x, w = randn(4, 6), randn(6, seed=1)
    for number in (0.25, 0.25, 2.0, 0.25, 1e-5):
        got = NUMBERS[name](distributed(x), distributed(w), number)
        close(got, NUMBERS[name](x, w, number), f"{name} with {number}")


@pytest.mark.parametrize(
    "call", [lambda x: x + x, lambda x: x.transpose(0, 1), lambda x: x.relu(), lambda x: torch.cat((x, x))]
)
def test_the_second_call_is_found(call: Callable[[Any], Any]) -> None:
    for calls in CALLS.values():
        calls.clear()
    call(distributed(randn(4, 6)))
    (found,) = [run for calls in CALLS.values() for run in calls.values()]
    assert callable(found)
    call(distributed(randn(4, 6)))
    assert [run for calls in CALLS.values() for run in calls.values()] == [found]
