"""`check_plan` accepts right plans, and names the first module whose output differs under a wrong plan."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest

from hyper_parallel import ColwiseParallel, ModuleStyle, Replicate, RowwiseParallel, Shard, fully_shard, get_platform
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import floats
from hyper_parallel.testing.conformance.checks import needs_gradients
from hyper_parallel.testing.plan_check import PlanCheck, compare_on_ranks, verdict_of
from hyper_parallel.testing.spmd import on_mesh


def mlp() -> Any:
    adapter = get_adapter()
    return adapter.load(adapter.Mlp(12, 24), np.random.default_rng(3))


class Halved(ModuleStyle):
    """A wrong style: it halves the input of its module."""

    input_layouts = (Shard(-1),)
    desired_input_layouts = (Replicate(),)
    output_layouts = (Replicate(),)

    def prepare_input(self, module: Any, x: Any, i: int, what: str, mesh: Any) -> Any:
        return super().prepare_input(module, x * 0.5, i, what, mesh)


def with_shards(model: Any, mesh: Any) -> None:
    fully_shard(model, mesh=mesh)


PLANS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "right": (mlp, {"up": ColwiseParallel(), "down": RowwiseParallel()}, (4, 12)),
    "data": (mlp, with_shards, (4, 12)),
    "wrong": (mlp, {"up": ColwiseParallel(), "down": Halved()}, (4, 12)),
}


@on_mesh(names=("tp",))  # which all ranks of the pool make: `compare_on_ranks` finds it again
def compared(mesh: Any, name: str) -> Any:
    model, plan, shape = PLANS[name]
    return compare_on_ranks((mesh.size(),), ("tp",), pickle.dumps((model, plan, (floats(*shape),), {}, None, True)))


def test_right_plans(pool: Any) -> None:
    needs_gradients()
    if get_platform().device_type != "cpu":
        pytest.skip("check_plan computes on the CPU")
    for name in ("right", "data"):
        for differences, modules, order, counts, plain_code, not_followed in pool.run(2, compared, name):
            assert not plain_code and not not_followed
            assert max(differences.values()) < 1e-5 and len(differences) == 6
            assert max(modules.values()) < 1e-5 and order[-1] == "" and counts
    assert {"up", "down"} <= set(order)


def test_a_wrong_plan(pool: Any) -> None:
    needs_gradients()
    if get_platform().device_type != "cpu":
        pytest.skip("check_plan computes on the CPU")
    checked = verdict_of(pool.run(2, compared, "wrong"), 1e-4)
    assert checked.wrong["output"] > 1e-2 and checked.communicates
    assert checked.first_module == "down" and "up" in checked.not_compared
    assert "differs: down (not compared, since each rank gives a part: up" in str(checked)
    right = verdict_of(pool.run(2, compared, "right"), 1e-4)
    assert right and right.first_module is None and not right.not_compared


def test_what_is_said() -> None:
    right = PlanCheck(2, {"output": 1e-7, "loss": 0.0, "gradient of up.weight": 2e-6}, 1e-4, None)
    assert (
        right and "right: output, loss and 1 gradients on 2 ranks" in str(right) and '"right": true' in right.to_json()
    )
    wrong = PlanCheck(2, {"output": 0.5, "loss": 0.0, "gradient of up.weight": math.inf}, 1e-4, "up")
    assert not wrong and list(wrong.wrong) == ["output", "gradient of up.weight"]
    assert "the first module that differs: up" in str(wrong) and "inf" in str(wrong)
    assert "look at the gradients" in str(PlanCheck(2, {"output": 0.5}, 1e-4, None))
