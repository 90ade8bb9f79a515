"""Attention over a sharded sequence: each method gives the results and gradients of a single device."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from hyper_parallel import CommDebugMode, DTensor, Partial, Replicate, Shard, implicit_replication
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.core.rules import joined_attention
from hyper_parallel.core.rules.sequence_cut import attention_method, balanced_ranges
from hyper_parallel.experimental import context_parallel, context_parallel_unshard, set_rotate_method
from hyper_parallel.platform.contract.attention import AttentionRole
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import difference, same
from hyper_parallel.testing.extent import on_ranks

#: float64 and float32.
TOLERANCES = {"float64": 1e-12, "float32": 1e-5}
#: (heads of queries, of keys, queries, keys, causal, mask: None, or the sizes of a mask before the scores)
SHAPES = [
    (12, 12, 7, 7, False, None),
    (12, 12, 7, 7, True, None),
    (4, 1, 1, 1, True, None),
    (4, 2, 24, 24, True, None),
    (5, 5, 2, 2, False, None),
    (4, 2, 7, 7, False, (1, 1)),
    (4, 2, 2, 2, False, (1, 1)),
    (12, 12, 5, 5, False, (2, 1)),
    (4, 2, 7, 5, True, None),
]
MORE = [
    *(
        (heads, 1, length, length, causal, None)
        for heads in (1, 12)
        for length in (64, 1000)
        for causal in (False, True)
    ),
    (12, 12, 1000, 1000, True, None),
    (4, 2, 7, 5, False, (1, 4)),
    (4, 4, 7, 7, False, (2, 4)),
]


def check(mesh: Any, method: str | None, shape: tuple, dtype: str, placements: tuple = (Shard(2),)) -> dict[str, Any]:
    """Compare one call with a single device; return the collectives in forward and in backward."""
    heads, shared, queries, keys, causal, masked = shape
    adapter, rng = get_adapter(), np.random.default_rng(0)
    sizes = [(2, heads, queries, 3), (2, shared, keys, 3), (2, shared, keys, 3)]
    arrays = [rng.standard_normal(size).astype(dtype) for size in sizes]
    weight = rng.standard_normal(sizes[0]).astype(dtype)
    if masked is not None:
        arrays.append(rng.standard_normal((*masked, queries, keys)).astype(dtype))
    counts: dict[str, Any] = {}

    def reference(*xs: Any) -> Any:
        y = adapter.scaled_attention(*xs, is_causal=causal)
        return adapter.weighted_sum(y, adapter.tensor(weight)), y

    wanted, wanted_grads = adapter.value_and_grads(reference, arrays)
    kinds = [placements] * 3 + [(Replicate(),) * mesh.ndim]
    layouts = [get_layout(mesh, kind, x.shape) for kind, x in zip(kinds, arrays, strict=False)]
    locals_ = [np.ascontiguousarray(x[layout.local_index()]) for x, layout in zip(arrays, layouts, strict=True)]

    def distributed(*xs: Any) -> Any:
        given = [
            DTensor.from_local(x, mesh, layout.placements, shape=layout.shape)
            for x, layout in zip(xs, layouts, strict=True)
        ]
        with attention_method(method), CommDebugMode() as comm:
            y = adapter.scaled_attention(*given, is_causal=causal)
        counts["forward"] = comm.get_comm_counts()
        assert y.placements == placements, y.placements
        mine = adapter.tensor(np.ascontiguousarray(weight[layouts[0].local_index()]))
        return adapter.weighted_sum(y.to_local(), mine), y

    with CommDebugMode() as comm:
        got, grads = adapter.value_and_grads(distributed, locals_)
    counts["backward"] = difference(comm.get_comm_counts(), counts["forward"])
    case, tolerance = f"{method} {shape} {dtype}", TOLERANCES[dtype]
    same(adapter.numpy(got), adapter.numpy(wanted), f"{case}: output", tolerance)
    for i, (grad, whole, layout) in enumerate(zip(grads, wanted_grads, layouts, strict=True)):
        same(grad, whole[layout.local_index()], f"{case}: gradient of operand {i}", tolerance)
    return counts


def fits(method: str, shape: tuple, ranks: int) -> bool:
    """Return whether the method supports these sizes."""
    heads, shared, queries, keys, _, masked = shape
    if method == "exchange":
        return queries != keys or (heads % ranks == shared % ranks == 0 and masked is None)
    return method == "gather" or masked is None or queries != keys


#: Communication of each method, of one sequence without a mask.
COUNTS = {
    "gather": lambda n: ({"all_gather": 1}, {"reduce_scatter": 1}),
    "exchange": lambda n: ({"all_to_all": 4}, {"all_to_all": 4}),
    "ring": lambda n: ({"shift": n - 1}, {"shift": 2 * (n - 1)}),
}


@spmd.on_mesh()
def ways(mesh: Any, shapes: list[tuple], dtypes: tuple[str, ...]) -> int:
    count, ranks = 0, mesh.size()
    for method in COUNTS:
        for shape in shapes:
            if not fits(method, shape, ranks):
                continue
            for dtype in dtypes:
                counts = check(mesh, method, shape, dtype)
                forward, backward = COUNTS[method](ranks) if ranks > 1 else ({}, {})
                if shape[2] == shape[3] and shape[5] is None:
                    assert (counts["forward"], counts["backward"]) == (forward, backward), f"{method} {shape}: {counts}"
                count += 1
    for shape in shapes:
        check(mesh, None, shape, dtypes[0])
    return count


@on_ranks(1, 2, 3, 4)
def test_each_way(pool: Any, world_size: int) -> None:
    assert min(pool.run(world_size, ways, SHAPES, ("float64", "float32"))) > 20


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_longer_sequences(pool: Any, world_size: int) -> None:
    pool.run(world_size, ways, MORE, ("float64",))


@spmd.on_mesh()
def in_groups(mesh: Any) -> None:
    """Check heads that are processed in several groups, as for long sequences."""
    with patch.object(joined_attention, "_LEAST_BYTES", 1):
        for shape, groups in (((12, 12, 8, 8, True, None), 6), ((4, 2, 3, 3, True, None), 2)):  # no others have these
            for method in ("gather", "ring"):
                counts = check(mesh, method, shape, "float64")
                wanted = COUNTS[method](mesh.size())
                for found, one in zip(counts.values(), wanted, strict=True):
                    assert found == {kind: groups * n for kind, n in one.items()}, f"{method} {shape}: {counts}"


def test_heads_in_groups(pool: Any) -> None:
    pool.run(3, in_groups)


@spmd.on_mesh(2, 2)
def two_dimensions(mesh: Any) -> None:
    """Check heads on one mesh dimension and the sequence on the other; the sequence on both; samples and the
    sequence."""
    for shape in SHAPES[1:4]:
        for placements in ((Shard(1), Shard(2)), (Shard(2), Shard(1)), (Shard(2), Shard(2)), (Shard(0), Shard(2))):
            if Shard(1) not in placements or shape[1] % 2 == 0:
                check(mesh, None, shape, "float64", placements)


def test_two_mesh_dimensions(pool: Any) -> None:
    pool.run(4, two_dimensions)


@spmd.on_mesh()
def refused(mesh: Any) -> list[str]:
    found = []
    for method, shape in (("exchange", (4, 4, 6, 6, True, None)), ("ring", (3, 3, 6, 6, False, (1, 1)))):
        with (
            CommDebugMode() as comm,
            pytest.raises(ValueError, match=r"over a sharded sequence|method 'ring'") as error,
        ):
            check(mesh, method, shape, "float64")
        assert comm.get_total_counts() == 0
        found.append(str(error.value))
    return found


def test_a_method_that_is_not_possible(pool: Any) -> None:
    for exchange, ring in pool.run(3, refused):
        assert "4 query heads and 4 key heads over 3 ranks. Both numbers must" in exchange
        assert "is_causal=True" in ring


@spmd.on_mesh()
def twice(mesh: Any) -> None:
    adapter, layout = get_adapter(), get_layout(mesh, (Shard(2),), (1, 2, 6, 3))

    def run(*xs: Any) -> Any:
        q, k, v = (DTensor.from_local(x, mesh, layout.placements, shape=layout.shape) for x in xs)
        return adapter.sum(adapter.square(adapter.scaled_attention(q, k, v, is_causal=True))).to_local()

    def combine(*gradients: Any) -> Any:
        return adapter.sum(gradients[0] * gradients[0])

    with pytest.raises(ValueError, match="no second-order gradients"):
        adapter.second_order(run, combine, [np.ones(layout.local_shape, np.float32)] * 3)


def test_gradients_of_gradients_are_refused(pool: Any) -> None:
    pool.run(2, twice)


def plain_case(mesh: Any, length: int, balance: bool, method: str | None, rows: int) -> None:
    """Compare attention inside `context_parallel` with a single device."""
    adapter, rng, platform = get_adapter(), np.random.default_rng(0), mesh.platform
    shape = (2, 4, length, 3)
    arrays = [rng.standard_normal(shape).astype(np.float32) for _ in range(3)]
    weight = rng.standard_normal(shape).astype(np.float32)
    masks = [rng.standard_normal((rows, length)).astype(np.float32)] if rows else []

    def reference(*xs: Any) -> Any:
        y = adapter.scaled_attention(*xs, is_causal=not masks)
        return adapter.weighted_sum(y, adapter.tensor(weight)), y

    wanted, wanted_grads = adapter.value_and_grads(reference, [*arrays, *masks])
    buffers = [adapter.tensor(x) for x in (*arrays, weight)]
    with context_parallel(
        mesh,
        buffers=buffers,
        buffer_seq_dims=[2, -2, 2, 2],
        no_restore_buffers={buffers[3]},
        balance=balance,
        method=method,
    ):
        *parts, own_weight = [adapter.numpy(x) for x in buffers]

        def distributed(*xs: Any) -> Any:
            y = adapter.scaled_attention(*xs, is_causal=not masks)
            return adapter.weighted_sum(y, adapter.tensor(own_weight)), y

        y, grads = adapter.value_and_grads(distributed, [*parts, *masks])
    for x, values in zip(buffers, arrays, strict=False):
        np.testing.assert_array_equal(adapter.numpy(x), values)
    assert tuple(platform.shape_of(buffers[3])) == own_weight.shape
    given = [adapter.tensor(adapter.numpy(y)), *map(adapter.tensor, grads[:3])]
    found = [
        *context_parallel_unshard(mesh, given, [2, 2, -2, 2], balance=balance),
        *(sums(g, mesh) for g in grads[3:]),
    ]
    for got, whole in zip(found, [adapter.numpy(wanted), *wanted_grads], strict=True):
        same(adapter.numpy(got), whole, f"{method}, {length} positions, balance {balance}", 1e-5)


def sums(gradient: np.ndarray, mesh: Any) -> Any:
    """Return the sum of a gradient over the ranks, as for the gradient of a parameter."""
    return DTensor.from_local(get_adapter().tensor(gradient), mesh, [Partial()]).full_tensor()


def tells_of_attention(mesh: Any) -> bool:
    """Return whether the platform intercepts attention on plain tensors. Otherwise `context_parallel` is refused."""
    if type(mesh.platform).attention_calls is not AttentionRole.attention_calls:
        return True
    with pytest.raises(TypeError, match="for sharded sequences"), context_parallel(mesh, length=6):
        pass
    return False


@spmd.on_mesh()
def plain(mesh: Any) -> None:
    if not tells_of_attention(mesh):
        return
    for length in (1, 7, 12):
        for balance in (True, False):
            plain_case(mesh, length, balance, "gather", 0)
            plain_case(mesh, length, balance, "ring", 0)
            plain_case(mesh, length, balance, None, length)
    plain_case(mesh, 9, True, None, 1)
    if mesh.size() in (2, 4):
        plain_case(mesh, 7, True, "exchange", 0)
    for rotation in ("alltoall", "allgather", None):
        set_rotate_method(rotation)
        plain_case(mesh, 7, True, None, 0)


@on_ranks(1, 2, 3, 4)
def test_plain_code(pool: Any, world_size: int) -> None:
    pool.run(world_size, plain)


#: Placements of queries, keys and values in `context_parallel`, and of the mask; the latter None for a plain mask.
#: Mesh dimensions are those of queries.
HELD = {
    "heads over tp": (("tp",), (Shard(1),), None),
    "the sequence over cp": (("cp",), (Shard(2),), (Replicate(),)),
    "both": (("cp", "tp"), (Shard(2), Shard(1)), (Replicate(), Replicate())),
    "both, rows of the mask over tp": (("cp", "tp"), (Shard(2), Shard(1)), (Replicate(), Shard(0))),
    "both, rows as the queries": (("cp", "tp"), (Shard(2), Shard(1)), (Shard(0), Replicate())),
    "both, a plain mask": (("cp", "tp"), (Shard(2), Shard(1)), None),
}


@spmd.on_mesh(2, 2, names=("cp", "tp"))
def distributed_with_mask(mesh: Any, length: int) -> None:
    """Check DTensors in `context_parallel`, with a mask whose gradient is asked for."""
    if not tells_of_attention(mesh["cp"]):
        return
    adapter, rng = get_adapter(), np.random.default_rng(0)
    shape, rank = (2, 4, length, 3), mesh["tp"].get_local_rank()
    arrays = [rng.standard_normal(shape).astype(np.float32) for _ in range(3)]
    weight, mask = (rng.standard_normal(size).astype(np.float32) for size in (shape, (length, length)))

    def reference(*xs: Any) -> Any:
        y = adapter.scaled_attention(*xs)
        return adapter.weighted_sum(y, adapter.tensor(weight)), y

    wanted, wanted_grads = adapter.value_and_grads(reference, [*arrays, mask])
    ranges = balanced_ranges(length, 2)
    order = np.concatenate([np.arange(start, start + n) for own in ranges for start, n in own])
    own = order[: len(order) - length // 2] if mesh["cp"].get_local_rank() == 0 else order[len(order) - length // 2 :]
    for name, (dims, placements, of_mask) in HELD.items():
        on = mesh[dims]
        heads = slice(2 * rank, 2 * rank + 2) if "tp" in dims else slice(None)
        parts = [np.ascontiguousarray(x[:, heads][:, :, own]) for x in (*arrays, weight)]
        rows = slice(None)
        if of_mask == (Shard(0), Replicate()):
            rows = own
        elif of_mask == (Replicate(), Shard(0)):
            rows = get_layout(mesh["tp"], (Shard(0),), mask.shape).local_index()[0]
        sizes = (2, 4, length if "cp" in dims else len(own), 3)

        def distributed(*xs: Any) -> Any:
            *qkv, m = xs
            qkv = [DTensor.from_local(x, on, placements, shape=sizes) for x in qkv]  # noqa: B023
            if of_mask is not None:  # noqa: B023
                m = DTensor.from_local(m, on, of_mask, shape=mask.shape)  # noqa: B023
            y = adapter.scaled_attention(*qkv, m)
            return adapter.weighted_sum(y.to_local(), adapter.tensor(parts[3])), y.to_local()  # noqa: B023

        with context_parallel(mesh["cp"], length=length), implicit_replication():
            y, grads = adapter.value_and_grads(distributed, [*parts[:3], np.ascontiguousarray(mask[rows])])
        found = [adapter.numpy(y), *grads[:3]]
        for got, whole in zip(found, [adapter.numpy(wanted), *wanted_grads[:3]], strict=True):
            same(got, whole[:, heads][:, :, own], name)
        # Each rank of tp has the gradient of the plain mask. DTensors have theirs in full.
        got = adapter.numpy(sums(grads[3], mesh["cp"])) if "cp" not in dims else grads[3]
        same(got, wanted_grads[3][rows], f"{name}: mask")


def test_distributed_operands_with_a_mask(pool: Any) -> None:
    pool.run(4, distributed_with_mask, 7)


#: Shape of a mask for use with the causal one, and whether it is boolean.
MASKS = [
    ((1, 1, 1, -1), True),
    ((2, 1, -1, -1), True),
    ((-1, -1), False),
    ((2, 1, 1, -1), False),
    ((1, 4, -1, -1), False),
]


@spmd.on_mesh()
def causal_with_mask(mesh: Any, length: int, hides_all: bool = False) -> None:
    """Check a mask together with ``is_causal=True``. Torch refuses this combination, so the library on torch refuses it
    too.

    With ``hides_all``, the mask hides the first key, so the first query sees no key.
    """
    adapter, rng = get_adapter(), np.random.default_rng(0)
    arrays = [rng.standard_normal((2, heads, length, 3)) for heads in (4, 2, 2)]
    weight = rng.standard_normal((2, 4, length, 3))
    layout = get_layout(mesh, (Shard(2),), weight.shape)
    for shape, boolean in MASKS:
        sizes = [length if n < 0 else n for n in shape]
        mask = rng.random(sizes) < 0.7 if boolean else rng.standard_normal(sizes)
        mask[..., 0] = not hides_all if boolean else -np.inf if hides_all else 0.0

        def single(*xs: Any) -> Any:
            y = adapter.scaled_attention(*xs, is_causal=True)
            return adapter.weighted_sum(y, adapter.tensor(weight)), y

        def distributed(*xs: Any) -> Any:
            *qkv, m = xs
            qkv = [DTensor.from_local(x, mesh, [Shard(2)], shape=(2, *x.shape[1:2], length, 3)) for x in qkv]
            y = adapter.scaled_attention(*qkv, DTensor.from_local(m, mesh, [Replicate()]), is_causal=True).to_local()
            return adapter.weighted_sum(y, adapter.tensor(weight[layout.local_index()])), y

        locals_ = [np.ascontiguousarray(x[layout.local_index()]) for x in arrays]
        try:
            wanted, wanted_grads = adapter.value_and_grads(single, [*arrays, mask])
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match="attn_mask"):
                adapter.value_and_grads(distributed, [*locals_, mask])
            assert "attn_mask" in str(error)
            continue
        y, grads = adapter.value_and_grads(distributed, [*locals_, mask])
        assert np.isfinite(adapter.numpy(wanted)).all()
        same(adapter.numpy(y), adapter.numpy(wanted)[layout.local_index()], f"{shape}: output", 1e-12)
        for i, (got, whole) in enumerate(zip(grads[:3], wanted_grads, strict=False)):
            same(got, whole[layout.local_index()], f"{shape}: gradient of operand {i}", 1e-12)
        if not boolean:
            same(grads[3], wanted_grads[3], f"{shape}: gradient of the mask", 1e-12)


def test_a_mask_with_the_causal_one(pool: Any) -> None:
    for length in (2, 7):
        pool.run(3, causal_with_mask, length)


@spmd.on_mesh()
def wrong(mesh: Any) -> None:
    if not tells_of_attention(mesh):
        return
    adapter = get_adapter()
    x, y = (adapter.tensor(np.ones((2, 4, n, 3), np.float32)) for n in (6, 5))
    whole, square = adapter.tensor(np.ones((2, 4, 6, 3), np.float32)), adapter.tensor(np.ones((2, 2), np.float32))
    one = {"buffers": [x], "buffer_seq_dims": [2]}
    refusals = [
        (TypeError, "takes a DeviceMesh", lambda: context_parallel(None, **one)),
        (ValueError, "one of .*gather", lambda: context_parallel(mesh, **one, method="alltoall")),
        (ValueError, "pass one dimension for each", lambda: context_parallel(mesh, buffers=[x])),
        (
            ValueError,
            "in buffers twice",
            lambda: context_parallel(mesh, buffers=[x, x], buffer_seq_dims=[2, 2], no_restore_buffers={x}),
        ),
        (ValueError, "a tensor that is not in buffers", lambda: context_parallel(mesh, **one, no_restore_buffers={y})),
        (TypeError, "plain tensors as buffers", lambda: context_parallel(mesh, buffers=[1], buffer_seq_dims=[0])),
        (ValueError, "no dimension 4", lambda: context_parallel(mesh, buffers=[x], buffer_seq_dims=[4])),
        (
            ValueError,
            "have different sequence lengths",
            lambda: context_parallel(mesh, buffers=[x, y], buffer_seq_dims=[2, 2]),
        ),
        (ValueError, "have different sequence lengths", lambda: context_parallel(mesh)),
    ]
    with CommDebugMode() as comm:
        for kind, words, make in refusals:
            with pytest.raises(kind, match=words), make():
                pass
        with pytest.raises(ValueError, match="takes one of"):
            set_rotate_method("broadcast")
        with pytest.raises(ValueError, match="pass one dimension for each"):
            context_parallel_unshard(mesh, [x], [])
        with context_parallel(mesh, length=6):
            with pytest.raises(ValueError, match=r"\[\(6, 6, 6\), \(6, 6, 6\), \(6, 6, 6\)\] positions"):
                adapter.scaled_attention(whole, whole, whole)
            part = adapter.tensor(np.ones((2, 4, 2, 3), np.float32))
            with pytest.raises(ValueError, match="plain mask of the full"):
                adapter.scaled_attention(part, part, part, square)
        first = adapter.tensor(np.ones((2, 4, 2, 3), np.float32))
        with context_parallel(mesh, length=5), pytest.raises(ValueError, match=r"\(2, 2, 2\)\] positions"):
            adapter.scaled_attention(first, first, first)  # of the right length on two of three ranks
    assert comm.get_total_counts() == 0
    parts = [1, 2, 3][mesh.get_rank()]
    with pytest.raises(ValueError, match="positions of buffer 0"):
        context_parallel_unshard(mesh, [adapter.tensor(np.ones((parts, 2), np.float32))], [0])


def test_wrong_use_in_plain_code(pool: Any) -> None:
    pool.run(3, wrong)


@spmd.on_mesh(1, 3)
def wrong_mesh(mesh: Any) -> None:
    with pytest.raises(ValueError, match="a 1-D mesh"), context_parallel(mesh, length=6):
        pass


def test_a_mesh_of_two_dimensions(pool: Any) -> None:
    pool.run(3, wrong_mesh)
