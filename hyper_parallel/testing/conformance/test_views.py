"""Writes through views of DTensors: if two tensors share memory on one device, a write to one changes the other on many
ranks too."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    PackedShard,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    parallelize_module,
)
from hyper_parallel.core.weak_table import collect_garbage
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.extent import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def swapped(x: Any) -> Any:
    """Return an array or a tensor with its first two dimensions exchanged."""
    return x.swapaxes(0, 1) if isinstance(x, np.ndarray) else get_adapter().transpose(x, 0, 1)


#: name -> view of an array or of a tensor.
VIEWS: dict[str, Callable[[Any], Any]] = {
    "int": lambda x: x[1],
    "last": lambda x: x[-1],
    "slice": lambda x: x[1:3],
    "step": lambda x: x[0:4:2],
    "column": lambda x: x[:, 1],
    "columns": lambda x: x[:, 1:4],
    "both": lambda x: x[1:3, 2],
    "dots": lambda x: x[..., 0],
    "nothing": lambda x: x[2:2],
    "reshape": lambda x: x.reshape((24,)),
    "transposed": lambda x: swapped(x),
    "transposed int": lambda x: swapped(x)[2],
    "int of slice": lambda x: x[1:4][1],
    "slice of reshape": lambda x: x.reshape((2, 12))[1],
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "fill": lambda v: v.__setitem__(..., 7.0),
    "double": lambda v: v.__imul__(2.0),
    "first": lambda v: v.__setitem__(slice(0, 1), 5.0),
}


def whole(x: Any) -> np.ndarray:
    return np.array(get_adapter().numpy(x.full_tensor()))


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1


@spmd.on_mesh()
def write_through(mesh: Any, shape: tuple[int, ...], placement: Any) -> None:
    """Check every view with every write: the base, the view, and another view that was taken later."""
    for name, view in VIEWS.items():
        for how, write in WRITES.items():
            array = numbers(*shape)
            x = distribute_tensor(get_adapter().tensor(array), mesh, [placement])
            v, expected = view(x), view(array)
            write(v)
            write(expected)
            message = f"{name}, {how}, {placement}"
            assert np.array_equal(whole(x), array), message
            assert np.array_equal(whole(v), expected), message
            assert np.array_equal(whole(x[2]), array[2]), message


@pytest.mark.parametrize("placement", [R, S0, S1], ids=str)
@on_ranks(1, 2, 3, 4)
def test_writes_reach_the_base(pool: Any, world_size: int, placement: Any) -> None:
    """Check shards of several sizes; on four ranks one shard is empty."""
    for shape in (6, 4), (4, 6):
        pool.run(world_size, write_through, shape, placement)


@spmd.on_mesh()
def write_into_packed(mesh: Any) -> None:
    """Check writes along the packed dimension. A write across several parts is refused, on every rank."""
    array = numbers(4, 8)
    x = distribute_tensor(get_adapter().tensor(array), mesh, [PackedShard(1, (4, 4))])
    row = x[1]
    row[...] = 3.0
    array[1] = 3.0
    assert np.array_equal(whole(x), array)
    if mesh.size() > 1:
        column = x[:, 1]
        with pytest.raises(ValueError, match=r"cannot write into a tensor placed \[PackedShard"):
            column[...] = 3.0
    assert np.array_equal(whole(x), array)


@on_ranks(1, 2, 4)
def test_packed_shards(pool: Any, world_size: int) -> None:
    pool.run(world_size, write_into_packed)


@spmd.on_mesh(2, 2)
def write_on_two_dimensions(mesh: Any) -> None:
    for placements in ([S0, S1], [S0, S0], [S1, R], [R, S0], [S1, S0]):
        for name, view in VIEWS.items():
            array = numbers(6, 4)
            x = distribute_tensor(get_adapter().tensor(array), mesh, placements)
            v, expected = view(x), view(array)
            v[...] = 7.0
            expected[...] = 7.0
            assert np.array_equal(whole(x), array), f"{name}, {placements}"
            assert np.array_equal(whole(v), expected), f"{name}, {placements}"


def test_two_mesh_dimensions(pool: Any) -> None:
    pool.run(4, write_on_two_dimensions)


# ---------------------------------------------------------------------------- views that are out of date
@spmd.on_mesh()
def use_after_write(mesh: Any) -> None:
    """Check that a copied view is refused after a write to its base, and is right when taken again."""
    array = numbers(6, 4)
    writes: dict[str, Callable[[Any], Any]] = {
        "base": lambda x: x.__setitem__(..., 2.0),
        "another view": lambda x: get_adapter().transpose(x, 0, 1).__setitem__(..., 2.0),
        "another view that moved": lambda x: x[0].__setitem__(..., 2.0),
        "assignment": lambda x: x.__setitem__(0, 2.0),
    }
    for how, write in writes.items():
        x = distribute_tensor(get_adapter().tensor(array), mesh, [S0])
        row, later = x[0], swapped(x[0:2])
        assert np.array_equal(whole(row), array[0])
        write(x)
        if mesh.size() > 1:
            for stale in row, later:
                for use in (lambda v: v * 2, lambda v: v.full_tensor(), lambda v: v.to_local(), repr):
                    with pytest.raises(ValueError, match="make the view again after the write"):
                        use(stale)
        else:
            assert np.array_equal(whole(row), np.full(4, 2.0)), how
        assert np.array_equal(whole(x[0]), np.full(4, 2.0)), how


@spmd.on_mesh()
def write_parts(mesh: Any) -> None:
    """Check that the results of one split do not overlap: a write to one result does not change the other results."""
    array = numbers(6, 4)
    x = distribute_tensor(get_adapter().tensor(array), mesh, [S0])
    parts = get_adapter().chunk(x, 3, 0)
    for i, rows in enumerate(parts):
        rows[...] = float(i)
        array[2 * i : 2 * i + 2] = i
    assert np.array_equal(whole(x), array)
    for i, rows in enumerate(parts):
        assert np.array_equal(whole(rows), array[2 * i : 2 * i + 2])


@spmd.on_mesh()
def step(mesh: Any) -> None:
    """Check that a row of a parameter is refused after a step, and that an int in a tensor selects."""
    adapter = get_adapter()
    module = parallelize_module(adapter.linear_module(4, 6, bias=False), mesh, ColwiseParallel())
    weight = dict(mesh.platform.named_parameters(module))["weight"]
    take_step = adapter.sgd(module, 0.1)
    grads = adapter.model_value_and_grads(module, lambda x: ((y := module(x)).sum(), y), numbers(2, 4))[2]
    row = adapter.detach(weight)[0]
    before = whole(row)
    take_step(grads)
    if mesh.size() > 1:
        with pytest.raises(ValueError, match="make the view again"):
            whole(row)
    assert not np.array_equal(whole(weight[0]), before)
    array = numbers(6, 4)
    x = distribute_tensor(adapter.tensor(array), mesh, [S0])
    x[adapter.tensor(np.int64(1))][...] = 7.0
    array[1] = 7.0
    assert np.array_equal(whole(x), array)
    assert not swapped(x[0:2]).is_contiguous()
    assert swapped(x[0:2]).stride() == (1, 4)


@on_ranks(1, 2, 4)
def test_views_out_of_date(pool: Any, world_size: int) -> None:
    pool.run(world_size, use_after_write)
    pool.run(world_size, step)
    pool.run(world_size, write_parts)


@spmd.on_mesh(2, 2)
def use_views_of_views(mesh: Any) -> None:
    """Check that a write also makes views of views stale: views of a reshaped tensor, and of a copied view."""
    array = numbers(4, 4, 2)
    x = distribute_tensor(get_adapter().tensor(array), mesh, [S0, S1])
    flat = x.reshape((4, 4, 2, 1))
    row, moved = flat[1], x[1]
    inner = moved[1]
    assert np.array_equal(whole(inner), array[1, 1])
    x[...] = 5.0
    for view in (row, moved, inner):
        with pytest.raises(ValueError, match="make the view again"):
            whole(view)
    assert np.array_equal(whole(flat), np.full((4, 4, 2, 1), 5.0))
    flat[...] = 6.0
    assert np.array_equal(whole(x[1][1]), np.full(2, 6.0))


def test_views_of_views_out_of_date(pool: Any) -> None:
    pool.run(4, use_views_of_views)


@spmd.on_mesh()
def write_to_partial(mesh: Any) -> None:
    """Check that writes to a view of a maximum over ranks are refused."""
    x = DTensor.from_local(get_adapter().tensor(numbers(4, 4)), mesh, [Partial("max")])
    row = x[0]
    if mesh.size() > 1:
        with pytest.raises(ValueError, match="cannot change the base tensor"):
            row[...] = 2.0
    assert np.array_equal(whole(x), numbers(4, 4))


@on_ranks(1, 2)
def test_views_of_partial(pool: Any, world_size: int) -> None:
    pool.run(world_size, write_to_partial)


# ---------------------------------------------------------------------------- copies that a shard would not need
@spmd.on_mesh()
def write_to_copies(mesh: Any, shape: tuple[int, ...]) -> None:
    """Check that ``contiguous`` and ``reshape`` copy a permuted tensor, even if this rank's shard is contiguous."""
    adapter = get_adapter()
    for placement in (Shard(d) for d in range(len(shape))):
        for name, copy in {
            "contiguous": lambda x: adapter.contiguous(adapter.transpose(x, 0, 1)),
            "product, contiguous": lambda x: adapter.contiguous(adapter.transpose(x, 0, 1) * 2),
            "reshape": lambda x: get_adapter().transpose(x, 0, 1).reshape((-1,)),
            "columns": lambda x: get_adapter().transpose(x, 0, 1)[:, 0:2].reshape((-1,)),
        }.items():
            array = numbers(*shape)
            x = distribute_tensor(get_adapter().tensor(array), mesh, [placement])
            y = copy(x)
            before = whole(y)
            y[...] = 7.0
            assert np.array_equal(whole(x), array), f"{name}, {placement}: the copy wrote to its source"
            y, x[...] = copy(x), 5.0
            assert np.array_equal(whole(y), before), f"{name}, {placement}: the source wrote to the copy"
        x = distribute_tensor(get_adapter().tensor(array), mesh, [placement])
        for view in (
            adapter.contiguous,
            lambda x: x.reshape(shape),
            lambda x: adapter.contiguous(adapter.transpose(adapter.transpose(x, 0, 1), 0, 1)),
        ):
            view(x)[...] = 9.0
            assert np.array_equal(whole(x), np.full(shape, 9.0)), placement
            x[...] = 1.0


@pytest.mark.parametrize("shape", [(4, 3, 2), (2, 4), (3, 2), (2, 3, 1)], ids=str)
@on_ranks(1, 2, 4, gate=(2,))
def test_copies_stay_copies(pool: Any, world_size: int, shape: tuple[int, ...]) -> None:
    pool.run(world_size, write_to_copies, shape)


@spmd.on_mesh()
def write_to_contiguous_slices(mesh: Any) -> None:
    """Check ``contiguous`` of a contiguous slice: the slice itself or a copy, as on a single device."""
    indices = (slice(0, 2), slice(2, 4), slice(2, None), 0, 3, (slice(1, 4), None), (3, slice(1, 2)), (..., 0, 2))
    for placement in (Shard(0), Shard(1), Replicate()):
        for index in indices:
            plain = get_adapter().tensor(numbers(4, 3))
            x = distribute_tensor(plain, mesh, [placement])
            for tensor in (plain, x):
                get_adapter().contiguous(tensor[index])[...] = 7.0
            assert np.array_equal(whole(x), get_adapter().numpy(plain)), f"{index} of {placement}"
            view = x[index]
            y, before = get_adapter().contiguous(view), whole(view)
            view[...] = 5.0
            own = get_adapter().numpy(get_adapter().contiguous(plain[index]))
            assert np.array_equal(before, own), f"{index} of {placement}"
            plain_view = plain[index]
            plain_y = get_adapter().contiguous(plain_view)
            plain_view[...] = 5.0
            assert np.array_equal(whole(y), get_adapter().numpy(plain_y)), f"{index} of {placement}"


@on_ranks(1, 2, 4)
def test_contiguous_slices(pool: Any, world_size: int) -> None:
    pool.run(world_size, write_to_contiguous_slices)


# ---------------------------------------------------------------------------- data that moved, of permuted tensors
#: name -> a view that needs no communication, of rows or columns, that is not contiguous.
NOT_CONTIGUOUS: dict[str, Callable[[Any], Any]] = {
    "transposed": swapped,
    "columns": lambda x: x[:, 0:3],
    "every second": lambda x: x[0:6:2],
    "every second column": lambda x: x[:, 0:6:2],
    "transposed columns": lambda x: swapped(x[:, 0:3]),
}
#: name -> a view of it, for which data may have to move.
MOVED: dict[str, Callable[[Any], Any]] = {
    "row": lambda x: x[0:1],
    "column": lambda x: x[:, 0:1],
    "rows": lambda x: x[0:2],
    "columns": lambda x: x[:, 0:2],
    "first": lambda x: x[0],
    "first of each": lambda x: x[:, 0],
    "part of part": lambda x: x[0:2][:, 0:1],
    "transposed part": lambda x: swapped(x[0:2]),
    "new dimension": lambda x: x[0:2, None],
}
#: name -> the tensor itself, or a copy where it does not lie in memory in that way.
COPIES: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda v: np.ascontiguousarray(v) if isinstance(v, np.ndarray) else get_adapter().contiguous(v),
    "reshape": lambda v: v.reshape((-1,)),
    "reshape, cut": lambda v: v.reshape((*v.shape[:-1], v.shape[-1], 1)),
}


@spmd.on_mesh()
def write_to_moved(mesh: Any, shape: tuple[int, ...]) -> None:
    """Check that ``contiguous`` and ``reshape`` return a view or a copy as on a single device, for any memory order."""
    for placement in (S0, S1):
        for names in itertools.product(NOT_CONTIGUOUS, MOVED, COPIES):
            before, view, copy = NOT_CONTIGUOUS[names[0]], MOVED[names[1]], COPIES[names[2]]
            array = numbers(*shape)
            x = distribute_tensor(get_adapter().tensor(array), mesh, [placement])
            v, plain = view(before(x)), view(before(array))
            y, plain_y = copy(v), copy(plain)
            y[...] = 7.0
            plain_y[...] = 7.0
            for got, wanted in ((x, array), (v, plain), (y, plain_y)):
                assert np.array_equal(whole(got), wanted), f"{names}, {placement}"


@pytest.mark.parametrize("shape", [(6, 6), (6, 8, 2)], ids=str)
@on_ranks(1, 2, 4, gate=(2,))
def test_moved_views_keep_their_order(pool: Any, world_size: int, shape: tuple[int, ...]) -> None:
    pool.run(world_size, write_to_moved, shape)


@spmd.on_mesh()
def write_to_results(mesh: Any) -> None:
    """Check that an operation's result has the single device's memory order, even if its operand was redistributed."""
    adapter = get_adapter()
    for shape in ((4, 6), (mesh.size(), 3)):
        for placements in ([S0], [S1], [Partial("avg")]):
            partial = placements[0].is_partial()
            x = DTensor.from_local(adapter.tensor(numbers(*shape)), mesh, placements if partial else [R])
            x = x if partial else x.redistribute(placements=placements)
            for more in (lambda v: v, lambda v: v * 2.0 + 1.0):
                y, own = more(adapter.square(swapped(x))), more(np.square(swapped(numbers(*shape))))
                if adapter.FUZZ_LIMITS.get("row_major"):
                    own = np.ascontiguousarray(own)
                z, own_z = adapter.contiguous(y), np.ascontiguousarray(own)
                z[...] = 7.0
                own_z[...] = 7.0
                assert np.array_equal(whole(y), own), f"{shape}, {placements}"


@on_ranks(1, 2, 4)
def test_results_keep_the_order(pool: Any, world_size: int) -> None:
    pool.run(world_size, write_to_results)


def refusal(x: Any) -> ValueError | None:
    """Return the error of a write to ``x``, without the frames that hold ``x``."""
    try:
        x[...] = 1.0
    except ValueError as error:
        return error.with_traceback(None)
    return None


@spmd.on_mesh()
def write_where_nobody_can_tell(mesh: Any) -> None:
    """Check the result of `cumsum`, whose memory order is not tracked: a write is refused while both tensors are in
    use."""
    array = numbers(mesh.size(), 3)
    x = get_adapter().transpose(distribute_tensor(get_adapter().tensor(array), mesh, [S0]), 0, 1)
    summed = get_adapter().cumsum(x, 0)
    y = get_adapter().contiguous(summed)
    if mesh.size() > 1:
        assert "do not tell whether the result shares memory" in str(refusal(y))
        assert "do not tell whether the result shares memory" in str(refusal(summed))
    del summed
    y[...] = 1.0
    assert np.array_equal(whole(y), np.ones((3, mesh.size())))


@on_ranks(1, 2, 4)
def test_memory_that_is_not_known(pool: Any, world_size: int) -> None:
    pool.run(world_size, write_where_nobody_can_tell)


# ---------------------------------------------------------------------------- costs
@spmd.on_mesh()
def drop_views(mesh: Any) -> None:
    """Check that a view and its base end with the program's last reference, whatever was written."""
    writes: dict[str, Callable[[Any, Any], Any]] = {
        "nothing": lambda x, v: None,
        "view": lambda x, v: v.__setitem__(..., 7.0),
        "base": lambda x, v: x.__setitem__(..., 7.0),
    }
    for name, how in itertools.product(VIEWS, writes):
        for needs_gradient in (False, True):
            x = distribute_tensor(get_adapter().tensor(numbers(6, 4)), mesh, [S0])
            x = get_adapter().leaf(x) * 1.0 if needs_gradient else x
            v = VIEWS[name](x)
            writes[how](x, v)
            left = [ref(x), ref(v)]
            del x, v
            collect_garbage()
            assert [one() for one in left] == [None, None], f"{name}, writing to {how}"


@on_ranks(1, 2, 4, gate=(2,))
def test_dropped_views_leave_nothing(pool: Any, world_size: int) -> None:
    pool.run(world_size, drop_views)


@spmd.on_mesh()
def count_collectives(mesh: Any) -> None:
    """Check that a write to replicated rows, or to rows that one rank holds, does not communicate."""
    x = distribute_tensor(get_adapter().tensor(numbers(4, 4)), mesh, [S0])
    with CommDebugMode() as comm:
        x[0] = 1.0
        x[1:3] = 2.0
        x[:, 0] = 3.0
    assert comm.get_comm_counts() == {}
    row = x[0]
    with CommDebugMode() as comm:
        row[...] = 1.0
    assert comm.get_comm_counts() == {}


@on_ranks(1, 2, 4)
def test_writes_send_nothing(pool: Any, world_size: int) -> None:
    pool.run(world_size, count_collectives)
