"""The solver reads rules as the brute-force check does: its choice gives the right result."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hyper_parallel.core.layouts.layout import Layout, get_layout
from hyper_parallel.core.layouts.placement_types import PackedShard, Partial, Placement, Replicate, Shard, StridedShard
from hyper_parallel.core.operations.strategy import Strategy, solve
from hyper_parallel.core.rules import OPERATIONS
from hyper_parallel.testing.extent import everything
from tests.unit.rules_cases import CASES
from tests.unit.rules_harness import Case, expected_results, mesh_of_rank, run, same

MESHES = ((2,), (3,), (2, 2))
#: Layouts drawn for each case and mesh.
TRIES = 6 if everything() else 3


@dataclass(frozen=True)
class Solved:
    """A strategy as a way to run."""

    mesh: tuple[int, ...]
    strategy: Strategy

    def placements(self, kind: str, i: int) -> tuple[Placement, ...]:
        layout = getattr(self.strategy, kind)[i]
        return (Replicate(),) * len(self.mesh) if layout is None else layout.placements


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_the_solver_chooses_is_right(case: Case) -> None:
    sharding, expected = case.sharding(), expected_results(case)
    pinned = 0 if case.op.endswith("_") else None
    chance = random.Random(str(case))
    found = 0
    for mesh_shape in MESHES:
        mesh = mesh_of_rank(mesh_shape, 0)
        for _ in range(TRIES):
            layouts = tuple(_any_layout(x, mesh, chance) if isinstance(x, np.ndarray) else None for x in case.operands)
            strategy = solve(sharding, layouts, mesh, pinned)
            on_last_rank = _on_rank(math.prod(mesh_shape) - 1, mesh_shape, sharding, layouts, pinned)
            assert on_last_rank == (strategy and _placements(strategy)), "ranks choose otherwise"
            if strategy is None:
                assert pinned is not None
                continue
            found += 1
            if pinned is not None:
                assert strategy.operands[0] is layouts[0] is strategy.results[0]
            for y, wanted in zip(run(case, sharding, Solved(mesh_shape, strategy)), expected, strict=True):
                same(y, wanted, f"{case}: {layouts} -> {strategy}")
    assert found


def _on_rank(rank: int, mesh_shape: tuple[int, ...], sharding: Any, layouts: tuple, pinned: int | None) -> list | None:
    """The solver's choice on another rank."""
    mesh = mesh_of_rank(mesh_shape, rank)
    there = tuple(layout and get_layout(mesh, layout.placements, layout.shape) for layout in layouts)
    strategy = solve(sharding, there, mesh, pinned)
    return None if strategy is None else _placements(strategy)


def _placements(strategy: Strategy) -> list:
    operands = [None if layout is None else layout.placements for layout in strategy.operands]
    return [operands, strategy.partial_grad_dims, [layout.placements for layout in strategy.results]]


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0)], ids=str)
def test_a_rank_with_everything_chooses_as_the_others(sizes: tuple[int, int]) -> None:
    """One row over two ranks: the first has the whole tensor, but all make the same choice."""
    sharding = OPERATIONS["embedding"].rule(((4,), (1, 2)), (None,))
    assert sharding is not None
    mesh = mesh_of_rank((2,), 0)
    layouts = (get_layout(mesh, (Replicate(),), (4,)), get_layout(mesh, (PackedShard(0, sizes),), (1, 2)))
    found = [_on_rank(rank, (2,), sharding, layouts, None) for rank in (0, 1)]
    assert found[0] == found[1]


def _any_layout(x: np.ndarray, mesh: Any, chance: random.Random) -> Layout:
    kinds: list[Placement] = [Replicate(), *(Shard(d) for d in range(x.ndim))]
    if x.dtype.kind == "f":
        kinds.append(Partial())
    placements = [chance.choice(kinds) for _ in mesh.shape]
    cut = placements[-1]
    if len(placements) > 1 and isinstance(cut, Shard) and chance.random() < 0.5:
        placements[0] = StridedShard(cut.dim, mesh.shape[1])  # the second mesh dimension has cut first
        if x.shape[cut.dim] > 1 and chance.random() < 0.3:
            placements[1] = PackedShard(cut.dim, (1, x.shape[cut.dim] - 1))
    return get_layout(mesh, tuple(placements), x.shape)


def test_packed_shards_stay_where_the_native_operation_runs() -> None:
    """A native operation's replacement may ask where a shard begins, and gets the tensor whole."""
    mesh = mesh_of_rank((2,), 0)
    rule, packed = OPERATIONS["amax"].rule, get_layout(mesh, (PackedShard(0, (4, 2)),), (6, 5))
    for dims, stays in (((1,), True), ((0,), False)):
        sharding = rule(((6, 5),), (dims, False))
        assert sharding is not None
        strategy = solve(sharding, (packed,), mesh)
        assert strategy is not None
        assert (strategy.operands[0] is packed) is stays


S0, NESTED = Shard(0), PackedShard(0, (5, 3))
FIRST_LAST = (StridedShard(0, 2), S0)


@pytest.mark.parametrize(
    ("op", "operands", "wanted", "result"),
    [
        # An operation that acts on each element keeps any order of cuts, of one operand and of operands that agree.
        ("pointwise", [FIRST_LAST], [FIRST_LAST], FIRST_LAST),
        ("pointwise", [(StridedShard(0, 2), NESTED)], [(StridedShard(0, 2), NESTED)], (StridedShard(0, 2), NESTED)),
        ("pointwise", [(NESTED, S0)], [(NESTED, S0)], (NESTED, S0)),
        ("add", [FIRST_LAST, FIRST_LAST], [FIRST_LAST] * 2, FIRST_LAST),
        # An operand that lies otherwise is brought to the other's order, one that is whole is cut so.
        ("add", [FIRST_LAST, (Replicate(), Replicate())], [FIRST_LAST] * 2, FIRST_LAST),
        # Half an order is none.
        ("add", [FIRST_LAST, (Replicate(), S0)], [FIRST_LAST] * 2, FIRST_LAST),
        ("sum", [FIRST_LAST], [FIRST_LAST], (Partial(), Partial())),
    ],
    ids=str,
)
def test_order_of_cuts(op: str, operands: list[tuple], wanted: list[tuple], result: tuple) -> None:
    mesh = mesh_of_rank((2, 2), 0)
    layouts = tuple(get_layout(mesh, placements, (8,)) for placements in operands)
    arguments = {"pointwise": (), "add": (1.0,), "sum": (None, False)}[op]
    sharding = OPERATIONS[op].rule(((8,),) * len(layouts), arguments)
    assert sharding is not None
    found = solve(sharding, layouts, mesh)
    assert found is not None
    assert [layout.placements for layout in found.operands if layout is not None] == wanted
    assert found.results[0].placements == result


def test_two_orders_of_one_dimension() -> None:
    """One of the two orders is taken for both operands and the result."""
    mesh = mesh_of_rank((2, 2), 0)
    sharding = OPERATIONS["add"].rule(((8,), (8,)), (1.0,))
    assert sharding is not None
    kinds = [FIRST_LAST, (S0, S0), (StridedShard(0, 2), NESTED), (NESTED, S0), (S0, Replicate()), (NESTED, Replicate())]
    for one, other in itertools.product(kinds, repeat=2):
        found = solve(sharding, (get_layout(mesh, one, (8,)), get_layout(mesh, other, (8,))), mesh)
        assert found is not None and found.operands[0] is found.operands[1] is found.results[0]
        if one is other:
            assert found.results[0].placements == one


@pytest.mark.parametrize(
    "placements", [(StridedShard(0, 2), PackedShard(0, (4, 4))), (PackedShard(0, (4, 4)), S0)], ids=str
)
@pytest.mark.parametrize(
    ("op", "arguments", "native"),
    [
        ("split", ((4, 4), 0), lambda operands, static_args: np.split(operands[0], 2)),
        ("view", ((2, 4, 3),), lambda operands, static_args: operands[0].reshape(static_args[0])),
    ],
    ids=["split", "view"],
)
def test_parts_of_packed_shards_that_are_cut_further(op: str, arguments: Any, native: Any, placements: tuple) -> None:
    """Further cuts of packed parts are undone before the parts are taken apart."""
    mesh, x = mesh_of_rank((2, 2), 0), np.arange(24.0).reshape(8, 3)
    case = Case(op, "", (x,), arguments, native)
    strategy = solve(case.sharding(), (get_layout(mesh, placements, x.shape),), mesh)
    assert strategy is not None and strategy.operands[0] is not None
    assert [p for p in strategy.operands[0].placements if isinstance(p, PackedShard)], "the parts stay packed"
    for y, wanted in zip(run(case, case.sharding(), Solved((2, 2), strategy)), expected_results(case), strict=True):
        same(y, wanted, f"{op} of {placements}")


def test_most_operands_keep_their_order() -> None:
    """Changing the order of cuts has a cost on any mesh dimension: two operands are not moved for one."""
    mesh = mesh_of_rank((2, 2), 0)
    sharding = OPERATIONS["pointwise"].rule(((8,), (8,), (8,)), ())
    assert sharding is not None
    for kinds in ([(S0, S0), FIRST_LAST, FIRST_LAST], [FIRST_LAST, (S0, S0), (S0, S0)]):
        found = solve(sharding, tuple(get_layout(mesh, kind, (8,)) for kind in kinds), mesh)
        assert found is not None and found.results[0].placements == kinds[1]
