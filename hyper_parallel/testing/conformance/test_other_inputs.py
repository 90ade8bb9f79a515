"""Tensor-parallel ranks with different inputs: all raise an error in the first call, before any communication."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    NoParallel,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    check_ranks,
    manual_seed,
    parallelize_module,
)
from hyper_parallel.core.communication.rank_check import Check
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import floats
from hyper_parallel.testing.conformance.test_wrong_inputs import Outer
from hyper_parallel.testing.extent import everything, on_ranks

WHOLE = Replicate()


def sequential(**modules: Any) -> tuple[Any, Any]:
    """Return a module that calls the given submodules one after the other."""
    adapter = get_adapter()
    outer = Outer(**modules)

    def run(x: Any) -> Any:
        for name in modules:
            x = adapter.call(getattr(outer, name), x)
        return x

    return outer, run


def models() -> Iterator[tuple[str, str, Callable[[], tuple[Any, Any]], Any, bool]]:
    """Yield a description, the module that takes the input, a model with its call, and its plan. The last value says
    whether the module takes ids."""
    adapter = get_adapter()

    def mlp() -> tuple[Any, Any]:
        model = adapter.Mlp(6, 12)
        return model, lambda x: adapter.call(model, x)

    def table() -> tuple[Any, Any]:
        return sequential(
            table=adapter.embedding_module(9, 6), up=adapter.linear_module(6, 12), down=adapter.linear_module(12, 6)
        )

    def router() -> tuple[Any, Any]:
        return sequential(gate=adapter.linear_module(6, 12), down=adapter.linear_module(12, 6))

    pair = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    yield "column", "'up'", mlp, pair, False
    yield "rows of ids", "'table'", table, {"table": RowwiseParallel(input_layouts=WHOLE), **pair}, True
    yield "columns of ids", "'table'", table, {"table": ColwiseParallel(output_layouts=WHOLE), **pair}, True
    whole = {"up": ColwiseParallel(output_layouts=WHOLE), "down": RowwiseParallel(input_layouts=WHOLE)}
    yield "gathered", "'up'", mlp, whole, False
    distributed = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=True)}
    yield "DTensors inside", "'up'", mlp, distributed, False
    yield "row alone", "'down'", router, {"down": RowwiseParallel(input_layouts=WHOLE)}, False
    yield "replicated", "'gate'", router, {"gate": NoParallel()}, False
    prepared = {"gate": PrepareModuleInput(input_layouts=WHOLE, desired_input_layouts=WHOLE, use_local_output=True)}
    yield "prepared", "'gate'", router, prepared, False


def given(ids: bool, what: str, odd: bool) -> Any:
    adapter = get_adapter()
    x = floats(6, 4, 6)
    if what == "values" and odd:
        x = x[::-1].copy()
    if what == "shape" and odd:
        x = x[:3]
    if ids:
        x = (x[..., -1] * 100).astype(adapter.TARGET_DTYPE) % 9
    if what == "one value" and odd:
        x.flat[-1] = (x.flat[-1] + 1) % 9
    return adapter.tensor(x)


class Compared:
    """Count the comparisons of the ranks."""

    def __enter__(self) -> list[str]:
        self.steps: list[str] = []
        self.original = Check.agree

        def agree(check: Any, step: str, *args: Any, **kwargs: Any) -> None:
            self.steps.append(step)
            self.original(check, step, *args, **kwargs)

        Check.agree = agree  # type: ignore[method-assign]
        return self.steps

    def __exit__(self, *_: Any) -> None:
        Check.agree = self.original  # type: ignore[method-assign]


def raised(job: Callable[[], Any]) -> tuple[str, str, tuple[int, ...]]:
    with CommDebugMode() as comm:
        try:
            job()
        except Exception as error:
            assert comm.get_total_counts() == 0, error
            return type(error).__name__, str(error), getattr(error, "ranks", ())
    return "nothing", "", ()


@spmd.on_mesh()
def other_inputs(mesh: Any) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    adapter, rank, found = get_adapter(), mesh.get_local_rank(), {}
    manual_seed(0, mesh)  # earlier jobs may have drawn on some of the ranks, which `check_ranks` would notice
    for name, path, make, plan, ids in models():
        odd_ranks = range(mesh.size()) if everything() else (mesh.size() - 1,)
        for what in ("values", "one value", "shape"):
            for odd_rank in odd_ranks:
                odd, same = given(ids, what, rank == odd_rank), given(ids, what, False)
                model, run = make()
                adapter.load(model, np.random.default_rng(0))
                wanted = adapter.numpy(run(same))
                parallelize_module(model, mesh, plan)
                found[f"{name}, {path}, {what}, {odd_rank}"] = raised(lambda run=run, odd=odd: run(odd))
        with Compared() as steps:
            np.testing.assert_allclose(adapter.numpy(run(same)), wanted, rtol=1e-4, atol=1e-5, err_msg=name)
        assert len(steps) == (mesh.size() > 1), (name, steps)
        with Compared() as steps:
            run(same)
        assert steps == [], (name, steps)

        def again(run: Any = run, ids: bool = ids) -> None:
            with check_ranks(mesh):
                run(given(ids, "values", rank == mesh.size() - 1))

        found[f"{name}, {path}, in check_ranks, {mesh.size() - 1}"] = raised(again)
    by_name(mesh)
    return found


def by_name(mesh: Any) -> None:
    """Check that a plain keyword input is compared too, and only once."""
    adapter = get_adapter()
    layer: Any = adapter.linear_module(4, 4)
    name = next(iter(inspect.signature(getattr(layer, "construct", None) or layer.forward).parameters))
    parallelize_module(layer, mesh, ColwiseParallel())
    for count in (int(mesh.size() > 1), 0):
        with Compared() as steps:
            adapter.call(layer, **{name: adapter.tensor(floats(2, 4))})
        assert len(steps) == count, steps


@on_ranks(1, 2, 3)
def test_other_inputs_are_refused(pool: Any, world_size: int) -> None:
    results = pool.run(world_size, other_inputs)
    assert all(result == results[0] for result in results)
    for case, (kind, message, ranks) in results[0].items():
        if world_size == 1:
            assert kind == "nothing", message
            continue
        assert kind == "RankMismatchError", f"{case}: {kind} {message}"
        _, path, _, odd = case.split(", ")
        if world_size > 2:
            assert ranks == (int(odd),), f"{case}: {message}"
        for word in (path, "input", "differ in the", "same"):
            assert word in message, f"{case}: {message}"
