"""npu_fusion_attention on DTensors: heads and batches stay sharded, in every layout; everything else is gathered."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hyper_parallel import Replicate, Shard, distribute_tensor
from hyper_parallel.debug import CommDebugMode
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device, randn

R = Replicate()
BATCH, HEADS, QUERIES, KEYS, FEATURES = 4, 4, 6, 8, 8
VERSIONS = ("npu_fusion_attention", "npu_fusion_attention_v2", "npu_fusion_attention_v3")
#: layout -> (dimension of the batch or None, dimension of the heads)
DIMS = {"BNSD": (0, 1), "BSND": (0, 2), "BSH": (0, 2), "SBH": (1, 2), "TND": (None, 1)}


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """(batch, heads, length, features) in another layout."""
    x = x if layout == "BNSD" else x.transpose(1, 2)
    x = x.flatten(2) if layout in ("BSH", "SBH") else x.flatten(0, 1) if layout == "TND" else x
    return (x.transpose(0, 1) if layout == "SBH" else x).contiguous()


def operands(layout: str, heads: int = HEADS, shared: int = 2, batch: int = BATCH) -> list[torch.Tensor]:
    """Query, key and value; with fewer features in the value."""
    shapes = ((heads, QUERIES, FEATURES), (shared, KEYS, FEATURES), (shared, KEYS, FEATURES // 2))
    return [laid_out(randn(batch, *shape, seed=i), layout) for i, shape in enumerate(shapes)]


def attend(version: str, layout: str, heads: int, *tensors: Any, **options: Any) -> Any:
    import torch_npu

    if layout == "TND":
        ends = [[size * (i + 1) for i in range(BATCH)] for size in (QUERIES, KEYS)]
        lengths = map(torch.tensor, ends) if version.endswith("v3") else ends
        options.update(zip(("actual_seq_qlen", "actual_seq_kvlen"), lengths, strict=True))
    options.setdefault("scale", 1 / math.sqrt(FEATURES))
    return getattr(torch_npu, version)(*tensors, heads, layout, **options)


def compare(
    mesh: Any, case: tuple, tensors: list, placements: list, options: dict, forward: dict, backward: dict
) -> list[Any]:
    """Run on one device and on ``mesh``; compare values, statistics, gradients and collectives; give the results.

    Args:
        case: version, layout, number of heads.
        tensors: query, key and value.
        placements: of each of them.
        options: of the call; tensors are (tensor, placements).
        forward, backward: collectives expected.
    """
    plain = [x.clone().requires_grad_() for x in tensors]
    spread = [distribute_tensor(x, mesh, p).requires_grad_() for x, p in zip(tensors, placements, strict=True)]
    plain_options, spread_options, more = {}, {}, []
    for name, value in options.items():
        if isinstance(value, tuple):
            x = value[0].clone().requires_grad_(value[0].is_floating_point())
            y = distribute_tensor(value[0], mesh, value[1]).requires_grad_(x.requires_grad)
            plain_options[name], spread_options[name] = x, y
            if x.requires_grad:
                more.append((x, y))
        else:
            plain_options[name] = spread_options[name] = value
    what = f"{case}, {placements}, {list(options)}"
    wanted = attend(*case, *plain, **plain_options)
    with CommDebugMode() as comm:
        got = attend(*case, *spread, **spread_options)
    assert comm.get_comm_counts() == forward, f"{what}: {comm.get_comm_counts()}"
    close(got[0], wanted[0], what)
    for x, y in zip(got[1:3], wanted[1:3], strict=True):
        if case[1] == "TND" and options.get("softmax_layout") != "TND":
            y = y.reshape(y.shape[1], y.shape[0], -1)  # as it lies in memory
        close(x, y, f"statistic of {what}")
    cotangent = randn(*wanted[0].shape, seed=9)
    wanted[0].backward(cotangent)
    cotangent = distribute_tensor(cotangent, mesh, got[0].placements)
    with CommDebugMode() as comm:
        got[0].backward(cotangent)
    assert comm.get_comm_counts() == backward, f"backward of {what}: {comm.get_comm_counts()}"
    for x, y in [*zip(plain, spread, strict=True), *more]:
        close(y.grad, x.grad, f"gradient of {what}")
    return list(got)


@on_mesh(2)
def heads_and_batches(mesh: Any, layout: str) -> None:
    """Nothing is sent, in neither direction, when heads or batches are sharded; anything else is gathered."""
    batch, heads = DIMS[layout]
    mask = torch.ones(64, 64, dtype=torch.bool, device=device()).triu(1)
    for version in VERSIONS:
        case = (version, layout, HEADS)
        options = {"atten_mask": (mask, [R]), "sparse_mode": 2}
        for dim in (heads, batch):
            if dim is None:
                continue
            got = compare(mesh, case, operands(layout), [[Shard(dim)]] * 3, options, {}, {})
            assert got[0].placements == (Shard(dim),)
    for dim in range(len(operands(layout)[0].shape)):
        if dim in (batch, heads):
            continue
        gathered = [[Shard(dim)]] * 3
        got = compare(mesh, case, operands(layout), gathered, {}, {"all_gather": 3}, {})
        assert got[0].placements == (R,)
    # One sharded operand is enough: it costs less to slice the others than to gather it.
    back = {"all_gather": 2}
    got = compare(mesh, case, operands(layout), [[Shard(heads)], [R], [R]], {}, {}, back)
    assert got[0].placements == (Shard(heads),)


@pytest.mark.parametrize("layout", DIMS)
def test_heads_and_batches(pool: Any, layout: str) -> None:
    pool.run(2, heads_and_batches, layout)


@on_mesh(4)
def four_ranks(mesh: Any, layout: str) -> None:
    """Three cases: as many heads as ranks, key and value heads that four ranks cannot share, and a single one."""
    heads, case = DIMS[layout][1], (VERSIONS[0], layout, HEADS)
    got = compare(mesh, case, operands(layout, shared=4), [[Shard(heads)]] * 3, {}, {}, {})
    assert got[0].to_local().shape[heads] * 4 == got[0].shape[heads]
    # Two key heads of eight features can be cut in four, but not between heads.
    got = compare(mesh, case, operands(layout, shared=2), [[Shard(heads)]] * 3, {}, {"all_gather": 3}, {})
    assert got[0].placements == (R,)
    # Each rank knows a part of the gradients of the one key and value head.
    single = [[Shard(heads)], [R], [R]]
    got = compare(mesh, case, operands(layout, shared=1), single, {}, {}, {"all_reduce": 2})
    assert got[0].placements == (Shard(heads),)


@pytest.mark.parametrize("layout", DIMS)
def test_key_heads_on_four_ranks(pool: Any, layout: str) -> None:
    pool.run(4, four_ranks, layout)


@on_mesh(2, 2, names=("dp", "tp"))
def two_dimensions(mesh: Any) -> None:
    """Batches over one mesh dimension and heads over the other, with a mask and a bias that have both."""
    mask = randn(BATCH, 1, QUERIES, KEYS, seed=5) > 1
    bias = randn(1, HEADS, QUERIES, KEYS, seed=6)
    for layout, (batch, heads) in DIMS.items():
        if batch is None:
            continue
        options = {"atten_mask": (mask, [Shard(0), R]), "pse": (bias, [R, Shard(1)])}
        placements = [[Shard(batch), Shard(heads)]] * 3
        got = compare(mesh, (VERSIONS[1], layout, HEADS), operands(layout), placements, options, {}, {"all_reduce": 1})
        assert list(got[0].placements) == placements[0]


def test_batches_and_heads(pool: Any) -> None:
    """The gradient of a bias that all batches share is all-reduced over their ranks."""
    pool.run(4, two_dimensions)


@on_mesh(2)
def other_operands(mesh: Any) -> None:
    shard, three = [Shard(1)], [[Shard(1)]] * 3
    # Five heads on two ranks.
    for layout in ("BNSD", "TND"):
        got = compare(mesh, (VERSIONS[0], layout, 5), operands(layout, 5, 5), three, {}, {}, {})
        assert got[0].placements == (Shard(1),)
    # One more score for each head, and in its own layout of statistics.
    options: dict[str, Any] = {"sink": (randn(HEADS, seed=5), [Shard(0)])}
    compare(mesh, (VERSIONS[1], "BNSD", HEADS), operands("BNSD"), three, options, {}, {})
    got = compare(
        mesh, (VERSIONS[0], "TND", HEADS), operands("TND"), three, {**options, "softmax_layout": "TND"}, {}, {}
    )
    assert [x.placements for x in got[:3]] == [(Shard(1),)] * 3
    # Further features of query and key.
    rope = {
        "query_rope": (laid_out(randn(BATCH, HEADS, QUERIES, 4, seed=7), "TND"), shard),
        "key_rope": (laid_out(randn(BATCH, 2, KEYS, 4, seed=8), "TND"), shard),
    }
    compare(mesh, (VERSIONS[1], "TND", HEADS), operands("TND"), three, rope, {}, {})
    # A prefix for each batch element: batches must be whole, heads need not.
    mask = torch.ones(96, 64, dtype=torch.bool, device=device())
    prefixed = {"prefix": [3, 4, 5, 6], "atten_mask": (mask, [R]), "sparse_mode": 6}
    compare(mesh, (VERSIONS[0], "BNSD", HEADS), operands("BNSD"), three, prefixed, {}, {})
    batches = [[Shard(0)]] * 3
    compare(mesh, (VERSIONS[0], "BNSD", HEADS), operands("BNSD"), batches, prefixed, {"all_gather": 3}, {})


def test_other_operands(pool: Any) -> None:
    pool.run(2, other_operands)


@on_mesh(2)
def with_dropout(mesh: Any, layout: str) -> None:
    """The noise is that of one device: heads are gathered, and the ranks' generators are brought in step."""
    heads = DIMS[layout][1]
    tensors = operands(layout)
    torch.manual_seed(7)
    state = torch.npu.get_rng_state()  # type: ignore[attr-defined]
    plain = [x.clone().requires_grad_() for x in tensors]
    wanted = attend(VERSIONS[0], layout, HEADS, *plain, keep_prob=0.5)
    wanted[0].square().sum().backward()
    torch.npu.set_rng_state(state)  # type: ignore[attr-defined]
    spread = [distribute_tensor(x, mesh, [Shard(heads)]).requires_grad_() for x in tensors]
    got = attend(VERSIONS[0], layout, HEADS, *spread, keep_prob=0.5)
    close(got[0], wanted[0])
    assert got[4:] == wanted[4:]
    got[0].square().sum().backward()
    for x, y in zip(plain, spread, strict=True):
        close(y.grad, x.grad)


@pytest.mark.parametrize("layout", ["BNSD", "BSH", "TND"])
def test_dropout(pool: Any, layout: str) -> None:
    pool.run(2, with_dropout, layout)


@on_mesh(2)
def left_to_torch_npu(mesh: Any) -> None:
    """Arguments unknown to the rule are gathered, or torch_npu reports their error."""
    tensors = [distribute_tensor(x, mesh, [Shard(1)]) for x in operands("BNSD")]
    for options, said in (
        ({"padding_mask": tensors[0]}, "without padding_mask"),
        ({"dropout_mask": tensors[0]}, "draws its dropout_mask itself"),
        ({"nonsense": 1}, "nonsense"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=said):
            attend(VERSIONS[0], "BNSD", HEADS, *tensors, **options)
    with pytest.raises(ValueError, match="'NDSB' is none of"):
        attend(VERSIONS[0], "NDSB", HEADS, *tensors)
    with pytest.raises(RuntimeError, match="for argument 'value'"):
        attend(VERSIONS[0], "BNSD", HEADS, *tensors[:2])
    with pytest.raises(ValueError, match="plain tensor"):
        attend(VERSIONS[0], "BNSD", HEADS, *tensors, atten_mask=torch.ones(QUERIES, KEYS, device=device()))
    # Lengths of sequences in a DTensor
    import torch_npu

    q, k, v = (distribute_tensor(x, mesh, [Shard(1)]) for x in operands("TND"))
    ends = [[size * (i + 1) for i in range(BATCH)] for size in (QUERIES, KEYS)]
    lengths = [distribute_tensor(torch.tensor(x), mesh, [R]) for x in ends]
    options = dict(zip(("actual_seq_qlen", "actual_seq_kvlen"), lengths, strict=True))
    got = torch_npu.npu_fusion_attention_v3(q, k, v, HEADS, "TND", **options)
    assert got[0].placements == (R,)
    close(got[0], attend(VERSIONS[0], "TND", HEADS, *operands("TND"), scale=1.0)[0])


def test_left_to_torch_npu(pool: Any) -> None:
    pool.run(2, left_to_torch_npu)
