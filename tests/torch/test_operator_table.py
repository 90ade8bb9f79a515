"""Every operator in torch's own database, distributed: none gives another number than one device, and none hangs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hyper_parallel import DTensor
from hyper_parallel.testing import spmd
from tests.support.operator_table import judge
from tests.support.operator_table.checks import as_good_as_the_page, operator_pool
from tests.support.operator_table.exchange import OperatorPool
from tests.support.operator_table.side import Call
from tests.torch import operators
from tests.torch.support import of_release

__all__ = ["operator_pool"]


#: Torch since -> how many operators of its database a rank can compute.
COMPUTED = {"2.13": 664, "2.14": 665}


def test_operators_are_as_the_page_says(operator_pool: OperatorPool) -> None:
    as_good_as_the_page(operator_pool, at_least=of_release(COMPUTED))


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 2


def _is_first(x: Any) -> bool:
    return isinstance(x, DTensor) and spmd.rank == 0


def _wrong_gradient(x: Any) -> Any:
    if isinstance(x, DTensor):
        return DTensor.from_local(_WrongGradient.apply(x.to_local()), x.device_mesh, x.placements, shape=x.shape)
    return x * 1.0


def _fails_on_one(x: Any) -> Any:
    if _is_first(x):
        raise KeyError("the others compute on")
    return x * 1.0


def _refused_by_some(x: Any) -> Any:
    if _is_first(x):
        return torch.zeros(5, 3, dtype=x.dtype)
    return x + torch.ones(3) if isinstance(x, DTensor) else x * 0.0


#: The judge's verdicts on forward and backward -> functions of one tensor.
JUDGED: dict[tuple[str, str], list[Callable[[Any], Any]]] = {
    ("own rule", "own rule"): [lambda x: x.exp(), lambda x: x.bfloat16()],
    ("gathered", "gathered"): [torch.ops.aten.pinverse.default],
    ("refused", ""): [lambda x: x + torch.ones(3) if isinstance(x, DTensor) else x + 1],
    ("own rule", "wrong"): [_wrong_gradient],
    ("wrong", ""): [
        lambda x: x * (2.0 if isinstance(x, DTensor) else 1.0),
        lambda x: x.float() if isinstance(x, DTensor) else x.long(),
        lambda x: x[:2] if isinstance(x, DTensor) else x,
        lambda x: (x, x) if isinstance(x, DTensor) else x,
        _refused_by_some,
    ],
    ("hanging", ""): [
        _fails_on_one,
        lambda x: x.sum(0).full_tensor() if _is_first(x) else x.sum().full_tensor() if isinstance(x, DTensor) else x,
    ],
}


def judged(wanted: tuple[str, str], number: int) -> None:
    """A job: the judge's verdict on an operator that has all the properties of that verdict."""
    x = torch.arange(15.0, dtype=torch.float64).reshape(5, 3).sin().requires_grad_()
    side = SimpleNamespace(**vars(operators))
    side.calls = lambda name, count: [Call((x,), {}, {"forward": JUDGED[wanted][number]})]
    meshes = [spmd.device_mesh(*shape) for shape in judge.MESHES[spmd.world_size]]
    found = judge._Operator(side, "made up", meshes, many=False).verdicts(1)["found"]
    verdicts = tuple(max(found.get(form, {}), key=judge.ORDER.index, default="") for form in ("forward", "backward"))
    assert verdicts == wanted, found


@pytest.mark.parametrize(("wanted", "number"), [(w, i) for w, found in JUDGED.items() for i in range(len(found))])
def test_the_verdicts(operator_pool: OperatorPool, wanted: tuple[str, str], number: int) -> None:
    operator_pool.run(operator_pool.size, judged, wanted, number)
