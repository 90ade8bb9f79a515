"""Shardings that are listed placement by placement, without a framework: NumPy's arrays are the tensors."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.core.layouts.placement_types import Partial, Replicate, Shard
from hyper_parallel.core.operations.binding import bind_of
from hyper_parallel.core.operations.listed_shardings import TensorSpec, listed_op, listed_rule
from hyper_parallel.core.operations.strategy import solve
from tests.unit.rules_harness import mesh_of_rank

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def platform(meta: bool = True) -> Any:
    """The verbs that are asked; with ``meta``, arrays stand for tensors without data."""
    return SimpleNamespace(
        is_tensor=lambda x: isinstance(x, np.ndarray),
        no_dispatch=nullcontext,
        no_grad=nullcontext,
        alias=np.ndarray.view,
        shape_of=np.shape,
        meta_tensor=lambda shape, dtype: np.empty(shape, dtype) if meta else None,
    )


def scaled_sum(x: np.ndarray, others: list[np.ndarray], factor: float, *, also: Any = None) -> list[np.ndarray]:
    """A function of two results."""
    return [x * factor + sum(others), x if also is None else x + also]


def test_arguments_find_their_places() -> None:
    row = listed_op("custom", platform())
    x, y, z = (np.full((2, 3), float(i)) for i in range(3))
    operands, static_args = bind_of(row)(scaled_sum, (x, [y, z], 2.0), {"also": y})
    assert [id(o) for o in operands] == [id(x), id(y), id(z), id(y)]
    hash(static_args)
    first, second = row.call(scaled_sum, (x + 1, y, z, y), static_args)
    np.testing.assert_array_equal(first, (x + 1) * 2 + y + z)
    np.testing.assert_array_equal(second, x + 1 + y)
    tuple_of, _ = bind_of(row)(scaled_sum, (x, (y,), 2.0), {})
    assert len(tuple_of) == 2


def rule_of(listed: Any, meta: bool = True) -> Any:
    """The rule's answer to a call with two summands, and the arguments that it was asked with."""
    asked: list[Any] = []

    def function(x: Any, others: Any, factor: float, **kwargs: Any) -> Any:
        asked.append((x, others, factor, kwargs))
        return listed

    x = np.zeros((4, 6))
    row = listed_op("custom", platform())
    operands, static_args = bind_of(row)(scaled_sum, (x, [x.astype(np.float32)], 2.0), {})
    rule = listed_rule(scaled_sum, function, platform(meta))
    return rule(tuple(o.shape for o in operands), static_args), asked


def test_the_function_sees_shapes_and_dtypes() -> None:
    sharding, [(x, others, factor, kwargs)] = rule_of([([S0, S0], [S0, S0, None])])
    assert isinstance(x, TensorSpec) and x.shape == (4, 6) and x.ndim == 2 and factor == 2.0 and kwargs == {}
    assert x.size() == (4, 6) and x.size(1) == 6 and others[0].dtype == np.float32
    assert sharding.result_shapes == ((4, 6), (4, 6))
    assert sharding.choices == (((S0, S0), (S0, S0)),)
    # Arguments that are no tensors may be left out.
    assert rule_of([([S0, S0], [S0, S0])])[0].choices == sharding.choices


@pytest.mark.parametrize("wrong", [([S0], [S0, S0, None]), ([S0, S0], [S0]), ([S0, S0], [S0, "rows", None])])
def test_lists_that_do_not_fit(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"scaled_sum lists .* 2 result\(s\) .* 3 argument\(s\).*one placement"):
        rule_of([wrong])


def test_without_tensors_that_hold_nothing_there_is_no_rule() -> None:
    assert rule_of([([S0, S0], [S0, S0, None])], meta=False)[0] is None

    def fails(*args: Any) -> Any:
        raise RuntimeError("needs data")

    x = np.zeros(3)
    _, static_args = bind_of(listed_op("custom", platform()))(fails, (x,), {})
    assert listed_rule(fails, lambda x: [], platform())((x.shape,), static_args) is None


#: placements of both operands -> those that they are read with, and of the results
SOLVED = {
    (S0, S0): ((S0, S0), S0),
    (S0, R): ((S0, S0), S0),
    (S1, S1): ((S1, S1), S1),
    (P, P): ((P, P), P),
    (P, R): ((R, R), R),  # nothing is made a sum
    (R, R): ((R, R), R),
}


@pytest.mark.parametrize("given", SOLVED)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_solver_chooses_among_them(given: tuple, rank: int) -> None:
    listed = [([p, p], [p, p.with_dim(-2) if p is S0 else p, None]) for p in (R, S0, S1, P)]
    sharding = rule_of(listed)[0]
    mesh = mesh_of_rank((2,), rank)
    strategy = solve(sharding, tuple(get_layout(mesh, (p,), (4, 6)) for p in given), mesh)
    assert strategy is not None
    operands, result = SOLVED[given]
    assert tuple(layout.placements[0] for layout in strategy.operands if layout) == operands
    assert [layout.placements for layout in strategy.results] == [(result,), (result,)]
    assert strategy.partial_grad_dims == ((), ())


def test_dimensions_of_several_sizes_are_cut_where_all_divide() -> None:
    def rows(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.concatenate([x, y])

    for sizes, wanted in (((4, 2), S0), ((3, 2), R)):
        x, y = (np.zeros((n, 2)) for n in sizes)
        _, static_args = bind_of(listed_op("custom", platform()))(rows, (x, y), {})
        sharding = listed_rule(rows, lambda x, y: [([S0], [S0, S0])], platform())((x.shape, y.shape), static_args)
        assert sharding is not None
        mesh = mesh_of_rank((2,), 0)
        strategy = solve(sharding, tuple(get_layout(mesh, (S0,), array.shape) for array in (x, y)), mesh)
        assert strategy is not None and strategy.results[0].placements == (wanted,)


def test_a_replicated_operand_of_split_work_gives_a_part_of_its_gradient() -> None:
    sharding = rule_of([([S0, S0], [S0, R, None])])[0]
    mesh = mesh_of_rank((2,), 0)
    strategy = solve(sharding, (get_layout(mesh, (S0,), (4, 6)), get_layout(mesh, (R,), (4, 6))), mesh)
    assert strategy is not None and strategy.partial_grad_dims == ((), (0,))
