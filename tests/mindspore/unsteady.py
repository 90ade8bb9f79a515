"""``python -m tests.mindspore.unsteady ops.hfft``: call functions of MindSpore again and again, without any DTensor.

Prints "ops.hfft: result differs" when the results by the same operands are not always the same, likewise for gradients.
A process that ends by a signal shows as much.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import mindspore as ms
import numpy as np

from tests.mindspore import operators

#: Calls, of which some keep their results, because results depend on which memory is free.
CALLS = 60


def look_at(name: str) -> None:
    """Look for two calls that differ: of one kind, and of operands of two shapes that are given in turn."""
    seen: dict[str, int] = {"result": 0, "gradient": 0}
    for calls in (operators.calls(name, 1), operators.calls(name, 2)[::-1]):
        found: list[dict[str, set[Any]]] = [{"result": set(), "gradient": set()} for _ in calls]
        looks = [_look(call, **sets) for call, sets in zip(calls, found, strict=True)]
        for _ in range(CALLS):
            for look in looks:
                next(look)
        for what, count in seen.items():
            seen[what] = max(count, *(len(sets[what]) for sets in found))
    for what, count in seen.items():
        if count > 1:
            print(f"{name}: {what} differs, {count} were seen")


def _look(call: Any, result: set[Any], gradient: set[Any]) -> Iterator[None]:
    """Make the call again and again, and note its results."""
    (function,) = call.forms.values()
    weights: dict[Any, Any] = {}

    def weighted_sum(x: Any, *rest: Any) -> Any:
        y = function(x, *rest)
        if y.shape not in weights:
            weights[y.shape] = operators.tensor(1.0 + np.arange(y.size).reshape(y.shape) % 7, y)
        return (y * weights[y.shape]).sum()

    kept = []
    while True:
        x, *rest = (operators.copied(a) if operators.is_tensor(a) else a for a in call.args)
        kept.append(function(x, *rest))
        result.add(operators.array(kept[-1]).tobytes())
        if operators.requires_grad(x) and not kept[-1].is_complex():
            # With the other operands given by the function itself, and as its arguments.
            for given in ((), tuple(rest)):

                def loss(x: Any, *more: Any, others: tuple = tuple(rest)) -> Any:
                    return weighted_sum(x, *(more or others))

                try:
                    gradient.add(operators.array(ms.grad(loss, 0)(x, *given)).tobytes())
                except RuntimeError as error:
                    ms.common.api._pynative_executor.clear_res()
                    gradient.add(str(error))
        yield


if __name__ == "__main__":
    for function_name in sys.argv[1:]:
        look_at(function_name)
