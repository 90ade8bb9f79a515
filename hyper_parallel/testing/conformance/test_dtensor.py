"""DTensors: creation from local tensors, conversion back, shared memory, and gradients through both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    get_platform,
    parallelize_module,
)
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import block_plan, difference, floats, local_parts, same
from hyper_parallel.testing.extent import in_gate, on_ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def part(array: np.ndarray, mesh: Any, *placements: Any) -> np.ndarray:
    """Return this rank's shard of a full array, without partial placements."""
    return np.ascontiguousarray(array[get_layout(mesh, placements, array.shape).local_index()])


def split_counts(
    function: Callable[..., Any], arrays: list[np.ndarray]
) -> tuple[Any, list[np.ndarray | None], dict[str, int], dict[str, int]]:
    """Return `adapter.value_and_grads` of ``function`` and the collectives in forward and backward.

    ``function`` returns (loss, value).
    """
    forward: dict[str, int] = {}

    def loss(*xs: Any) -> Any:
        with CommDebugMode() as comm:
            value = function(*xs)
        forward.update(comm.get_comm_counts())
        return value

    with CommDebugMode() as both:
        value, grads = get_adapter().value_and_grads(loss, arrays)
    return value, grads, forward, difference(both.get_comm_counts(), forward)


def if_many(mesh: Any, counts: dict[str, int]) -> dict[str, int]:
    """Return ``counts``, or no collectives on one rank."""
    return counts if mesh.size() > 1 else {}


# ---------------------------------------------------------------------- from_local, to_local, full_tensor


@spmd.on_mesh()
def make_and_take_apart(mesh: Any, rows: int) -> None:
    adapter = get_adapter()
    whole = floats(rows, 3)
    for placement in (R, S0, S1, P):
        layout = get_layout(mesh, (placement,), whole.shape)
        mine = local_parts(whole, layout, np.random.default_rng(1))
        with CommDebugMode() as comm:
            x = DTensor.from_local(adapter.tensor(mine), mesh, [placement], shape=whole.shape)
            local = x.to_local()
        assert comm.get_comm_counts() == {}
        assert tuple(x.shape) == whole.shape
        assert x.placements == (placement,)
        assert x.device_mesh is mesh
        assert not isinstance(local, DTensor)
        same(adapter.numpy(local), mine, f"local part of {placement}")
        full = x.full_tensor()
        assert not isinstance(full, DTensor)
        same(adapter.numpy(full), whole, f"whole of {placement}")
        for word in ("DTensor(", f"placements=[{placement!r}]", f"shape={whole.shape}", "device_mesh="):
            assert word in repr(x), word
    even = DTensor.from_local(adapter.tensor(floats(2, 3)), mesh, [S0])
    assert tuple(even.shape) == (2 * mesh.size(), 3)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("rows", in_gate([12, 5, 1], [5, 1]))
def test_from_local_and_back(pool: Any, world_size: int, rows: int) -> None:
    pool.run(world_size, make_and_take_apart, rows)


def outcome(call: Callable[[], Any]) -> str:
    """Return the message of the ValueError that ``call`` must raise."""
    with CommDebugMode():
        try:
            call()
        except ValueError as error:
            return str(error)
    raise AssertionError("no ValueError was raised")


@spmd.on_mesh()
def run_check(mesh: Any) -> list[str]:
    adapter, rank = get_adapter(), mesh.get_local_rank()
    make = DTensor.from_local
    last = rank == mesh.size() - 1
    agreed = make(adapter.tensor(floats(4, 3)), mesh, [R], run_check=True)
    same(adapter.numpy(agreed), floats(4, 3), "a value that all ranks agree on")
    make(adapter.tensor(floats(4, 3) + rank), mesh, [S0], run_check=True)  # parts may differ
    return [
        outcome(lambda: make(adapter.tensor(floats(5 if last else 4, 3)), mesh, [S0], run_check=True)),
        outcome(
            lambda: make(adapter.tensor(floats(4, 3).astype(np.float64 if last else np.float32)), mesh, run_check=True)
        ),
        outcome(lambda: make(adapter.tensor(floats(4, 3) + last), mesh, [R], run_check=True)),
        outcome(lambda: make(adapter.tensor(floats(4, 3 + last)), mesh, [R], shape=(4, 3), run_check=True)),
    ]


@on_ranks(2, 3)
def test_run_check_is_an_error_on_every_rank_that_names_the_one_that_differs(pool: Any, world_size: int) -> None:
    for messages in pool.run(world_size, run_check):
        for message in messages:
            assert f"rank {world_size - 1}" in message
        shape, dtype, values, misfit = messages
        assert "(10, 3)" in shape or "(15, 3)" in shape
        assert "loat64" in dtype
        assert "values" in values
        assert "(4, 4)" in misfit


@spmd.on_mesh(2, 2)
def run_check_in_one_corner(mesh: Any) -> str:
    x = get_adapter().tensor(floats(4, 3) + (mesh.get_coordinate() == (1, 1)))
    return outcome(lambda: DTensor.from_local(x, mesh, [R, R], run_check=True))


def test_run_check_on_two_dimensions(pool: Any) -> None:
    assert all("values" in message for message in pool.run(4, run_check_in_one_corner))


@spmd.on_mesh()
def outside_gradient(mesh: Any, rows: int) -> None:
    """Check `to_local` with ``grad_placements``, for consumers that are plain functions of this rank alone."""
    adapter, size = get_adapter(), mesh.size()
    rng = np.random.default_rng(2)
    whole = floats(rows, 3)
    everyone = rng.standard_normal((size, rows, 3)).astype(np.float32)  # each rank's own weights
    mine = everyone[mesh.get_local_rank()]
    total = everyone.sum(0)

    def differ_by_rank(x: Any) -> Any:
        y = DTensor.from_local(x, mesh, [R]).to_local(grad_placements=[P])
        return adapter.weighted_sum(y, adapter.tensor(mine)), y

    _, (grad,), forward, backward = split_counts(differ_by_rank, [whole])
    same(grad, total, "to_local(grad_placements=[Partial()])")
    assert (forward, backward) == ({}, if_many(mesh, {"all_reduce": 1}))

    def summands_then_differ(x: Any) -> Any:
        y = DTensor.from_local(x, mesh, [P]).to_local(grad_placements=[P])
        return adapter.weighted_sum(y, adapter.tensor(mine)), y

    _, (grad,), forward, backward = split_counts(summands_then_differ, [whole])
    same(grad, total, "to_local(grad_placements=[Partial()]) of summands")
    assert (forward, backward) == ({}, if_many(mesh, {"all_reduce": 1}))

    def gathered_then_differ(x: Any) -> Any:
        y = DTensor.from_local(x, mesh, [S0], shape=whole.shape).redistribute(placements=[R])
        y = y.to_local(grad_placements=[P])
        return adapter.weighted_sum(y, adapter.tensor(mine)), y

    _, (grad,), forward, backward = split_counts(gathered_then_differ, [part(whole, mesh, S0)])
    same(grad, part(total, mesh, S0), "Partial cotangent of a gathered tensor")
    assert forward == if_many(mesh, {"all_gather": 1})
    assert backward == if_many(mesh, {"reduce_scatter": 1})

    def full_tensor_then_differ(x: Any) -> Any:
        y = DTensor.from_local(x, mesh, [S0], shape=whole.shape).full_tensor(grad_placements=[P])
        return adapter.weighted_sum(y, adapter.tensor(mine)), y

    _, (grad,), _, backward = split_counts(full_tensor_then_differ, [part(whole, mesh, S0)])
    same(grad, part(total, mesh, S0), "full_tensor(grad_placements=[Partial()])")
    assert backward == if_many(mesh, {"reduce_scatter": 1})

    def partial_inside(x: Any) -> Any:
        y = DTensor.from_local(x, mesh, [R], grad_placements=[P])
        z = y.to_local()
        return adapter.weighted_sum(z, adapter.tensor(total)), z

    # The gradient arrives whole and leaves as summands of it, of which the caller takes the sum.
    _, (grad,), _, backward = split_counts(partial_inside, [whole])
    assert backward == {}
    sum_over_ranks = DTensor.from_local(adapter.tensor(grad), mesh, [P])
    same(adapter.numpy(sum_over_ranks), total, "from_local(grad_placements=[Partial()])")


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("rows", in_gate([12, 5], [5]))
def test_gradients_outside(pool: Any, world_size: int, rows: int) -> None:
    pool.run(world_size, outside_gradient, rows)


def redistribute_errors() -> None:
    adapter, mesh, other = get_adapter(), spmd.device_mesh(), spmd.device_mesh(1, spmd.world_size)
    if mesh is None:
        return
    x = DTensor.from_local(adapter.tensor(floats(4, 3)), mesh, [S0])
    with CommDebugMode() as comm:
        assert "cannot make partial tensors" in outcome(lambda: x.redistribute(other, [R, P]))
        assert "Partial" in outcome(lambda: x.redistribute(placements=[P]))
        assert "1 placement(s), got 2" in outcome(lambda: x.redistribute(placements=[R, R]))
        assert "Shard(dim=2)" in outcome(lambda: x.redistribute(placements=[Shard(2)]))
        y = DTensor.from_local(adapter.tensor(floats(4, 3)), mesh, [Partial("max")])
        assert "Partial(max)" in outcome(lambda: y.redistribute(placements=[P]))
        assert x.redistribute(mesh, [Shard(-2)]) is x
    assert comm.get_comm_counts() == {}


@on_ranks(1, 2)
def test_redistribute_errors(pool: Any, world_size: int) -> None:
    pool.run(world_size, redistribute_errors)


# ---------------------------------------------------------------------- sharing collectives


@spmd.on_mesh()
def consumers(mesh: Any, how: str, rows: int) -> Any:
    """Check three column-parallel linear layers that read one activation."""
    adapter = get_adapter()
    whole, weights = floats(rows, 6), [floats(7, 6), floats(5, 6) * 2, floats(8, 6) + 1]
    cotangents = [
        np.random.default_rng(i).standard_normal((rows, len(w))).astype(np.float32) for i, w in enumerate(weights)
    ]

    def loss_of(ys: list[Any], given: list[Any]) -> Any:
        terms = [adapter.weighted_sum(y, c) for y, c in zip(ys, given, strict=True)]
        return terms[0] + terms[1] + terms[2]

    def reference(x: Any, *ws: Any) -> Any:
        ys = [adapter.linear(x, w) for w in ws]
        return loss_of(ys, list(map(adapter.tensor, cotangents))), ys

    def sharded(x: Any, *ws: Any) -> Any:
        if how == "gathered once":
            gathered = DTensor.from_local(x, mesh, [S0], shape=whole.shape).redistribute(placements=[R])
            inputs = [gathered] * 3
        elif how == "one DTensor":
            inputs = [DTensor.from_local(x, mesh)] * 3
        else:
            inputs = [DTensor.from_local(x, mesh) for _ in range(3)]
        ys = [
            adapter.linear(y, DTensor.from_local(w, mesh, [S0], shape=full.shape))
            for y, w, full in zip(inputs, ws, weights, strict=True)
        ]
        assert all(y.placements == (S1,) for y in ys)
        mine = [adapter.tensor(part(c, mesh, S1)) for c in cotangents]
        return loss_of([y.to_local() for y in ys], mine), ys

    wanted, wanted_grads = adapter.value_and_grads(reference, [whole, *weights])
    placed = S0 if how == "gathered once" else R
    arrays = [part(whole, mesh, placed), *(part(w, mesh, S0) for w in weights)]
    got, grads, forward, backward = split_counts(sharded, arrays)
    for i in range(3):
        same(adapter.numpy(got[i]), adapter.numpy(wanted[i]), f"output {i}")
        same(grads[i + 1], part(wanted_grads[i + 1], mesh, S0), f"gradient of weight {i}")
    same(grads[0], part(wanted_grads[0], mesh, placed), "gradient of the activation")
    return forward, backward


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("rows", [12, 5])
def test_consumers_share_one_collective(pool: Any, world_size: int, rows: int) -> None:
    expected: dict[str, tuple] = {
        "gathered once": ({"all_gather": 1}, {"reduce_scatter": 1}),
        "one DTensor": ({}, {"all_reduce": 1}),
        "one plain tensor": ({}, {"all_reduce": 1}),
    }
    for how, counts in expected.items():
        for got in pool.run(world_size, consumers, how, rows):
            assert got == (counts if world_size > 1 else ({}, {})), how


@spmd.on_mesh()
def mixed_consumers(mesh: Any) -> Any:
    """Check two consumers of one gathered activation: one has a partial cotangent, the other the full cotangent."""
    adapter = get_adapter()
    whole, weight = floats(5, 6), floats(7, 6)

    def reference(x: Any, w: Any) -> Any:
        y = adapter.linear(x, w)
        return adapter.sum(y * y) + adapter.sum(x * x * x), y

    def sharded(x: Any, w: Any) -> Any:
        gathered = DTensor.from_local(x, mesh, [S0], shape=whole.shape).redistribute(placements=[R])
        y = adapter.linear(gathered, DTensor.from_local(w, mesh, [S0], shape=weight.shape))
        loss = adapter.sum(y * y) + adapter.sum(gathered * gathered * gathered)
        return loss.full_tensor(), y

    wanted, (grad_x, grad_w) = adapter.value_and_grads(reference, [whole, weight])
    got, grads, _, backward = split_counts(sharded, [part(whole, mesh, S0), part(weight, mesh, S0)])
    same(adapter.numpy(got), adapter.numpy(wanted), "output")
    same(grads[0], part(grad_x, mesh, S0), "gradient of the activation")
    same(grads[1], part(grad_w, mesh, S0), "gradient of the weight")
    return backward


@on_ranks(1, 2, 3, 4)
def test_whole_and_partial_cotangents_of_one_gather(pool: Any, world_size: int) -> None:
    for backward in pool.run(world_size, mixed_consumers):
        assert backward == ({"reduce_scatter": 1} if world_size > 1 else {})


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def two_dimensional(mesh: Any, rows: int, features: int) -> Any:
    adapter = get_adapter()
    arrays = [floats(rows, 6), floats(features, 6), floats(features), floats(features) + 2]
    placements = [(S0, R), (R, S0), (R, S0), (R, R)]

    def run(x: Any, w: Any, b: Any, scale: Any) -> Any:
        return adapter.linear(x, w, b) * scale

    def reference(*xs: Any) -> Any:
        y = run(*xs)
        return adapter.sum(y * y * y), y

    def sharded(*xs: Any) -> Any:
        y = run(
            *(DTensor.from_local(x, mesh, p, shape=a.shape) for x, p, a in zip(xs, placements, arrays, strict=True))
        )
        assert y.placements == (S0, S1)
        local = y.to_local()
        return adapter.sum(local * local * local), y

    wanted, wanted_grads = adapter.value_and_grads(reference, arrays)
    got, grads, forward, backward = split_counts(
        sharded, [part(a, mesh, *p) for a, p in zip(arrays, placements, strict=True)]
    )
    same(adapter.numpy(got), adapter.numpy(wanted), "output")
    for name, grad, all_of_it, placed in zip("xwbs", grads, wanted_grads, placements, strict=True):
        same(grad, part(all_of_it, mesh, *placed), f"gradient of {name}")
    return forward, backward


@pytest.mark.parametrize("sizes", [(8, 12), (5, 7)], ids=["even", "uneven"])
def test_data_and_tensor_parallel_linear(pool: Any, sizes: tuple[int, int]) -> None:
    # The input over tp; weight, bias and the scale of the output over dp; and the scale's parts are gathered over tp.
    for counts in pool.run(4, two_dimensional, *sizes):
        assert counts == ({}, {"all_reduce": 4, "all_gather": 1})


# ---------------------------------------------------------------------- gradients of gradients


@spmd.on_mesh()
def gradients_of_gradients(mesh: Any, rows: int, features: int) -> None:
    adapter = get_adapter()
    x, w, v = floats(rows, 6), floats(features, 6) * 0.5, floats(6, features) * 0.5
    placements = [(S0,), (S0,), (S1,)]
    shapes = [x.shape, w.shape, v.shape]

    def run(x: Any, w: Any, v: Any) -> Any:
        y = adapter.linear(adapter.tanh(adapter.linear(x, w)), v)
        return adapter.sum(adapter.square(y))

    def sharded(*xs: Any) -> Any:
        x, w, v = (DTensor.from_local(a, mesh, p, shape=s) for a, p, s in zip(xs, placements, shapes, strict=True))
        return run(x.redistribute(placements=[R]), w, v).full_tensor()

    def combine(gx: Any, gw: Any, gv: Any) -> Any:
        return adapter.sum(gx * gx) + adapter.sum(gw * gw) + adapter.sum(gv * gv)

    def combine_sharded(*gs: Any) -> Any:
        whole = [DTensor.from_local(g, mesh, p, shape=s) for g, p, s in zip(gs, placements, shapes, strict=True)]
        return combine(*whole).full_tensor()

    wanted = adapter.second_order(run, combine, [x, w, v])
    arrays = [part(a, mesh, *p) for a, p in zip((x, w, v), placements, strict=True)]
    got = adapter.second_order(sharded, combine_sharded, arrays)
    for name, grad, whole, placed in zip("xwv", got, wanted, placements, strict=True):
        same(grad, part(whole, mesh, *placed), f"second-order gradient of {name}", tolerance=1e-4)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("sizes", in_gate([(12, 24), (5, 7)], [(5, 7)]), ids=["even", "uneven"])
def test_gradients_of_gradients(pool: Any, world_size: int, sizes: tuple[int, int]) -> None:
    pool.run(world_size, gradients_of_gradients, *sizes)


# ---------------------------------------------------------------------- nothing stale


@spmd.on_mesh()
def steps_of_training(mesh: Any) -> None:
    adapter = get_adapter()
    array, target = floats(2, 12, 24), floats(2, 12, 24)[::-1] * 0.5
    single, sharded = (adapter.load(adapter.Block(24, 36, 2), np.random.default_rng(5)) for _ in range(2))
    parallelize_module(sharded, mesh, block_plan(False))
    optimizers = [adapter.sgd(module, 0.02) for module in (single, sharded)]

    def loss_of(module: Any, mine: Any) -> Any:
        def loss(x: Any) -> Any:
            y = adapter.call(module, x)
            return adapter.weighted_sum(y * y, adapter.tensor(mine)) * 0.01, y

        return loss

    mine, placed = part(target, mesh, S1), part(array, mesh, S1)
    for step in range(3):
        y, _, grads = adapter.model_value_and_grads(single, loss_of(single, target), array)
        got_y, _, got_grads = adapter.model_value_and_grads(sharded, loss_of(sharded, mine), placed)
        same(adapter.numpy(got_y), part(adapter.numpy(y), mesh, S1), f"output at step {step}", 1e-4)
        for name in grads:
            same(adapter.numpy(got_grads[name]), adapter.numpy(grads[name]), f"gradient of {name} at step {step}", 1e-4)
        for optimizer, its_grads in zip(optimizers, (grads, got_grads), strict=True):
            optimizer(its_grads)


@on_ranks(2, 3)
def test_parameters_that_change_between_steps(pool: Any, world_size: int) -> None:
    pool.run(world_size, steps_of_training)


@spmd.on_mesh()
def changed_in_between(mesh: Any) -> None:
    """Check a replicated tensor with several consumers, which share one cached view.

    The tensor is written between their reads.
    """
    adapter, platform = get_adapter(), get_platform()
    whole, weight, add = floats(5, 6), floats(6), floats(6) * 0.5

    def run(x: Any, w: Any, add: Any) -> Any:
        w = w * 1.0
        first = x * w
        adapter.IN_PLACE["copy_"][0](w, w + add)
        return first + x * w

    def reference(x: Any, w: Any) -> Any:
        with platform.no_grad():
            y = run(x, w, adapter.tensor(add))
        return adapter.sum(adapter.square(x)), y

    def sharded(x: Any, w: Any) -> Any:
        x = DTensor.from_local(x, mesh, [S0], shape=whole.shape)
        with platform.no_grad():
            y = run(x, DTensor.from_local(w, mesh), DTensor.from_local(adapter.tensor(add), mesh))
        return adapter.sum(adapter.square(x)).full_tensor(), y

    wanted, _ = adapter.value_and_grads(reference, [whole, weight])
    got, _ = adapter.value_and_grads(sharded, [part(whole, mesh, S0), weight])
    same(adapter.numpy(got), adapter.numpy(wanted), "value read after the write")


@spmd.on_mesh()
def without_gradients_first(mesh: Any) -> Any:
    """Check that a view made without gradients is not reused for a consumer that needs a gradient."""
    adapter, platform = get_adapter(), get_platform()
    whole, weight = floats(5, 6), floats(7, 6)

    def reference(x: Any, w: Any) -> Any:
        return adapter.sum(adapter.square(adapter.linear(x, w))), x

    def sharded(x: Any, w: Any) -> Any:
        x, w = DTensor.from_local(x, mesh), DTensor.from_local(w, mesh, [S0], shape=weight.shape)
        with platform.no_grad():
            idle = adapter.linear(x, w)
        assert not platform.requires_grad(idle) or platform.name == "mindspore"
        return adapter.sum(adapter.square(adapter.linear(x, w))).full_tensor(), x

    _, wanted = adapter.value_and_grads(reference, [whole, weight])
    _, grads, _, backward = split_counts(sharded, [whole, part(weight, mesh, S0)])
    same(grads[0], wanted[0], "gradient of the activation")
    same(grads[1], part(wanted[1], mesh, S0), "gradient of the weight")
    return backward


@on_ranks(1, 2, 4)
def test_no_view_is_kept_without_gradients(pool: Any, world_size: int) -> None:
    for backward in pool.run(world_size, without_gradients_first):
        assert backward == ({"all_reduce": 1} if world_size > 1 else {})
    pool.run(world_size, changed_in_between)


# ---------------------------------------------------------------------- copies


@spmd.on_mesh()
def copies(mesh: Any, rows: int) -> None:
    adapter = get_adapter()
    whole = floats(rows, 3)
    for placement in (R, S0, S1, P):
        x = distribute_tensor(adapter.tensor(whole), mesh, [placement])
        with CommDebugMode() as comm:
            y = copy.deepcopy(x)
        assert comm.get_comm_counts() == {}
        assert type(y) is type(x)
        assert y.placements == x.placements
        assert tuple(y.shape) == whole.shape
        adapter.IN_PLACE["copy_"][0](x, x * 0.0)
        same(adapter.numpy(x), whole * 0, "the tensor that was written")
        same(adapter.numpy(y), whole, f"copy of {placement}")


@spmd.on_mesh()
def copies_of_models(mesh: Any) -> Any:
    adapter = get_adapter()
    array = floats(3, 6)
    single, sharded = (adapter.load(adapter.Mlp(6, 7), np.random.default_rng(5)) for _ in range(2))
    parallelize_module(sharded, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    copied = copy.deepcopy(sharded)

    def loss_of(module: Any) -> Any:
        def loss(x: Any) -> Any:
            y = adapter.call(module, x)
            return adapter.sum(adapter.square(y)), y

        return loss

    wanted, grad_x, grads = adapter.model_value_and_grads(single, loss_of(single), array)
    # The original moves on; the copy must not follow.
    _, _, first = adapter.model_value_and_grads(sharded, loss_of(sharded), array)
    adapter.sgd(sharded, 0.5)(first)
    with CommDebugMode() as comm:
        got, got_grad_x, got_grads = adapter.model_value_and_grads(copied, loss_of(copied), array)
    same(adapter.numpy(got), adapter.numpy(wanted), "output of the copy")
    same(got_grad_x, grad_x, "gradient of the input of the copy")
    assert set(got_grads) == set(grads)
    for name in grads:
        assert isinstance(got_grads[name], DTensor) or mesh.platform.name == "mindspore"
        same(adapter.numpy(got_grads[name]), adapter.numpy(grads[name]), f"gradient of the copy's {name}")
    changed, _, _ = adapter.model_value_and_grads(sharded, loss_of(sharded), array)
    assert np.abs(adapter.numpy(changed) - adapter.numpy(wanted)).max() > 1e-3, "the original was not trained"
    return comm.get_comm_counts()


@on_ranks(1, 2, 3, 4)
def test_deepcopy(pool: Any, world_size: int) -> None:
    for rows in (4, 5):
        pool.run(world_size, copies, rows)
    for counts in pool.run(world_size, copies_of_models):
        assert counts == ({"all_reduce": 2} if world_size > 1 else {})


# ---------------------------------------------------------------------- in place


@spmd.on_mesh()
def in_place(mesh: Any, rows: int) -> int:
    """Check every in-place operation, for every placement of the written and of the read tensor."""
    adapter = get_adapter()
    whole, other = floats(rows, 3), floats(rows, 3)[::-1] * 0.5 + 1
    tried = 0
    for name, (write, takes_other) in adapter.IN_PLACE.items():
        for placed in (R, S0, S1):
            for others in (R, S0, S1, P) if takes_other else (R,):
                wanted = adapter.tensor(whole) * 1.0
                wanted_result = write(wanted, *([adapter.tensor(other)] if takes_other else []))
                x = distribute_tensor(adapter.tensor(whole), mesh, [placed])
                arguments = [distribute_tensor(adapter.tensor(other), mesh, [others])] if takes_other else []
                result = write(x, *arguments)
                what = f"{name} of {placed} and {others}"
                assert result.placements == (placed,), what
                same(adapter.numpy(result), adapter.numpy(wanted_result), f"result of {what}")
                same(
                    adapter.numpy(x if name[-1] == "_" else result),
                    adapter.numpy(wanted_result),
                    f"the write of {what}",
                )
                tried += 1
    return tried


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("rows", in_gate([4, 5], [5]))
def test_in_place(pool: Any, world_size: int, rows: int) -> None:
    assert all(tried > 20 for tried in pool.run(world_size, in_place, rows))


@spmd.on_mesh()
def in_place_with_gradients(mesh: Any) -> None:
    adapter = get_adapter()
    whole, other = floats(5, 3), floats(5, 3)[::-1] * 0.5

    def run(x: Any, y: Any) -> Any:
        z = x * 2.0
        z = adapter.IN_PLACE["add_"][0](z, y)
        z = adapter.IN_PLACE["sub_"][0](z, adapter.square(y))
        return adapter.square(z)

    def reference(x: Any, y: Any) -> Any:
        z = run(x, y)
        return adapter.sum(z), z

    def sharded(x: Any, y: Any) -> Any:
        z = run(DTensor.from_local(x, mesh, [S0], shape=whole.shape), DTensor.from_local(y, mesh))
        return adapter.sum(z).full_tensor(), z

    wanted, wanted_grads = adapter.value_and_grads(reference, [whole, other])
    got, grads = adapter.value_and_grads(sharded, [part(whole, mesh, S0), other])
    same(adapter.numpy(got), adapter.numpy(wanted), "value")
    same(grads[0], part(wanted_grads[0], mesh, S0), "gradient of the written tensor")
    same(grads[1], wanted_grads[1], "gradient of the read tensor")


@on_ranks(1, 2, 3)
def test_gradients_through_in_place_operations(pool: Any, world_size: int) -> None:
    pool.run(world_size, in_place_with_gradients)
