"""Wrong uses of the functions that look ahead: each is an error with the remedy, and leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel import ColwiseParallel, RowwiseParallel, check_plan, describe, explain, visualize_plan
from hyper_parallel.planning import DryStepError, dry_run, machine_of, search
from hyper_parallel.planning.layers import cut_to
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.dry import dry_world

X = torch.ones(2, 4)
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


class Reads(nn.Module):
    """A model that looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.layer(x) if x.sum() > 0 else x


class Words(nn.Module):
    """A model that gives no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return "words"


def over() -> Any:
    with dry_world(2) as platform:
        pass
    return platform.world_size()


def group_of_the_framework() -> Any:
    with dry_world(2) as platform:
        return platform.native_group("no group")


#: name -> the call, the type of the error, and its text
WRONG: dict[str, tuple[Callable[[nn.Module], Any], type[Exception], str]] = {
    "no model": (lambda m: explain("model", 2, PLAN, X), TypeError, "must be a Module of the platform .*, got str"),
    "no mesh": (
        lambda m: explain(m, "tp=2", PLAN, X),
        ValueError,
        "a mesh is a DeviceMesh, a number of ranks, a tuple of sizes",
    ),
    "no ranks": (lambda m: explain(m, 0, PLAN, X), ValueError, "Sizes are at least 1"),
    "another rank": (lambda m: explain(m, 2, PLAN, X, rank=2), ValueError, "a world of 2 rank.s. has no rank 2"),
    "no tp": (lambda m: explain(m, {"a": 2, "b": 2}, PLAN, X), ValueError, 'name the dimension "tp"'),
    "a list as plan": (lambda m: explain(m, 2, [ColwiseParallel()], X), TypeError, "a style, its name, or a dict"),
    "no style": (lambda m: explain(m, 2, {"0": "wise"}, X), ValueError, "'wise'"),
    "two styles": (lambda m: explain(m, 2, {"0": "colwise", "?": "rowwise"}, X), ValueError, "two styles"),
    "an input too many": (lambda m: explain(m, 2, PLAN, X, X), TypeError, "positional argument"),
    "an input too wide": (lambda m: explain(m, 2, PLAN, torch.ones(2, 5)), DryStepError, "does not run with tensors"),
    "values are read": (lambda m: explain(Reads(), 2, None, X), DryStepError, "do not read values"),
    "no numbers": (lambda m: explain(Words(), 2, None, X), ValueError, "without floating point tensors: pass loss="),
    "no machine": (lambda m: dry_run(m, 2, PLAN, X, machine="H1"), ValueError, "register_machine"),
    "no machine by name": (lambda m: machine_of("TPU"), ValueError, "no machine is called 'TPU'"),
    "no parallelism": (lambda m: dry_run(m, 2, PLAN, X, data_parallel="ddp"), ValueError, "'fully_shard', 'replicate'"),
    "no layers": (lambda m: dry_run(m, 2, PLAN, X, recompute=True), ValueError, "no list of equal layers"),
    "no such layers": (lambda m: dry_run(m, 2, PLAN, X, recompute="a.*"), ValueError, "'a.*' matches no module"),
    "no plans": (lambda m: search(m, 4, {}, X), ValueError, "at least one plan"),
    "no divisor": (lambda m: search(m, 4, {"p": PLAN}, X, tensor_parallel=[3]), ValueError, "does not divide 4 ranks"),
    "no list": (lambda m: cut_to(m, "0", 1, get_platform()), TypeError, "its list of layers cannot be shortened"),
    "check_plan of no model": (lambda m: check_plan("m", 2, PLAN, X), TypeError, "a function that makes one, got str"),
    "check_plan of no mesh": (lambda m: check_plan(m, 0, PLAN, X), ValueError, "Sizes are at least 1"),
    "check_plan of a lambda": (lambda m: check_plan(lambda: m, 2, PLAN, X), TypeError, "at the top level of a file"),
    "describe": (lambda m: describe("model"), TypeError, "describe takes a Module"),
    "visualize_plan": (lambda m: visualize_plan(3), TypeError, "describe takes a Module"),
    "a dry run that is over": (lambda m: over(), RuntimeError, "the dry run has ended"),
    "groups": (
        lambda m: group_of_the_framework(),
        RuntimeError,
        "no process groups for the framework's own collectives: use methods",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use(name: str) -> None:
    call, kind, sentence = WRONG[name]
    model = mlp()
    before = repr(model), [id(p) for p in model.parameters()]
    with pytest.raises(kind, match=sentence):
        call(model)
    assert (repr(model), [id(p) for p in model.parameters()]) == before


def test_what_comes_after_a_wrong_use_is_right() -> None:
    """Nothing of a dry run that failed stays behind."""
    with pytest.raises(DryStepError):
        explain(mlp(), 2, PLAN, torch.ones(2, 5))
    found = explain(mlp(), 2, PLAN, X)
    assert [(c.module, c.direction, c.kind) for c in found.collectives] == [("2", "forward", "all_reduce")]
