"""Styles by name, `NoParallel`, `ParameterParallel`, other classes of linear layers, and plans with globs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    NoParallel,
    PackedShard,
    ParallelStyle,
    ParameterParallel,
    Replicate,
    RowwiseParallel,
    Shard,
    get_platform,
    parallelize_module,
    register_style,
    strict,
)
from hyper_parallel.core.tensor_parallel.styles.style_names import style_by_name, style_names
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import compare, difference, floats, same
from hyper_parallel.testing.conformance.test_attention import expect
from hyper_parallel.testing.extent import on_ranks


@spmd.on_mesh()
def named_linear(mesh: Any, style: str, takes: Any, gives: Any) -> Any:
    return compare(
        lambda adapter: adapter.linear_module(12, 24), style, floats(2, 3, 12), mesh, takes=takes, gives=gives
    )


#: Name -> (placement of the input, of the output, collectives of forward, of backward) for a linear layer.
LINEAR_NAMES = {
    "colwise": (None, Shard(-1), {}, {"all_reduce": 1}),
    "local_colwise": (None, Shard(-1), {}, {"all_reduce": 1}),
    "rowwise": (Shard(-1), None, {"all_reduce": 1}, {}),
    "local_rowwise": (Shard(-1), None, {"all_reduce": 1}, {}),
    "colwise_rep": (None, None, {"all_gather": 1}, {"all_reduce": 1}),
    "colwise_gather_output": (None, None, {"all_gather": 1}, {"all_reduce": 1}),
    "embedding_colwise": (None, None, {"all_gather": 1}, {"all_reduce": 1}),
    "rowwise_rep": (None, None, {"all_reduce": 1}, {"all_gather": 1}),
    "rowwise_split_input": (None, None, {"all_reduce": 1}, {"all_gather": 1}),
    "packed_colwise": (None, PackedShard(-1, 2), {}, {"all_reduce": 1}),
    "packed_rowwise": (PackedShard(-1, 2), None, {"all_reduce": 1}, {}),
    "local_packed_rowwise": (PackedShard(-1, 2), None, {"all_reduce": 1}, {}),
    "replicate": (None, None, {}, {}),
    "replicated": (None, None, {}, {}),
}


@on_ranks(1, 2, 3, 4)
def test_names_for_linear_layers(pool: Any, world_size: int) -> None:
    for style, (takes, gives, forward, backward) in LINEAR_NAMES.items():
        for counts in pool.run(world_size, named_linear, style, takes, gives):
            assert counts == expect(world_size, forward, backward), style


#: Those of the package: tests register further ones.
NAMES = style_names()


def test_all_names_are_tried() -> None:
    here = {"embedding_rowwise", "sequence_parallel"}
    in_test_attention = {"replicated_with_grad_allreduce"}
    assert set(LINEAR_NAMES) | here | in_test_attention == set(NAMES)
    assert all(isinstance(style_by_name(name, "x"), ParallelStyle) for name in style_names())


@spmd.on_mesh()
def named_block(mesh: Any) -> Any:
    plan = {
        "attention.w[qkv]": "colwise",
        "attention.wo": "rowwise",
        "feed_forward.w[13]": "colwise",
        "feed_forward.w2": "rowwise",
    }
    return compare(lambda adapter: adapter.Block(24, 36, 2), plan, floats(2, 5, 24), mesh)


@on_ranks(1, 2, 3, 4)
def test_block_by_names(pool: Any, world_size: int) -> None:
    for counts in pool.run(world_size, named_block):
        assert counts == expect(world_size, {"all_reduce": 2}, {"all_reduce": 2})


@spmd.on_mesh()
def named_embedding(mesh: Any, vocabulary: int) -> Any:
    ids = np.random.default_rng(8).integers(0, vocabulary, (4, 3)).astype(np.int64)
    return compare(lambda adapter: adapter.embedding_module(vocabulary, 6), "embedding_rowwise", ids, mesh)


@spmd.on_mesh()
def named_norm(mesh: Any) -> Any:
    plan = {"": "sequence_parallel"}
    adapter = get_adapter()
    single, sharded = (adapter.load(adapter.norm_module(6), np.random.default_rng(5)) for _ in range(2))
    parallelize_module(sharded, mesh, plan)
    x = floats(2, 12, 6)
    y = adapter.call(sharded, adapter.tensor(x[:, spmd_part(12, mesh)]))
    assert isinstance(y, DTensor)
    assert y.placements == (Shard(1),)
    same(adapter.numpy(y), adapter.numpy(adapter.call(single, adapter.tensor(x))), "output")


def spmd_part(size: int, mesh: Any) -> slice:
    each = size // mesh.size()
    return slice(mesh.get_local_rank() * each, (mesh.get_local_rank() + 1) * each)


@on_ranks(1, 2, 3, 4)
def test_names_for_other_modules(pool: Any, world_size: int) -> None:
    for counts in pool.run(world_size, named_embedding, 11):
        assert counts == expect(world_size, {"all_reduce": 1}, {})
    pool.run(world_size, named_norm)


@spmd.on_mesh()
def registered_name(mesh: Any) -> Any:
    register_style("rowwise_to_rows", lambda: RowwiseParallel(output_layouts=Shard(0)))
    with pytest.raises(TypeError, match="register_style"):
        register_style("wrong", RowwiseParallel())
    return compare(
        lambda adapter: adapter.linear_module(12, 24),
        "rowwise_to_rows",
        floats(12, 12),
        mesh,
        takes=Shard(-1),
        gives=Shard(0),
    )


def test_registered_name(pool: Any) -> None:
    for counts in pool.run(2, registered_name):
        assert counts == expect(2, {"reduce_scatter": 1}, {"all_gather": 1})


# ---------------------------------------------------------------- NoParallel
@spmd.on_mesh()
def whole(mesh: Any, style: Any, takes: Any, gives: Any) -> Any:
    return compare(lambda adapter: adapter.Mlp(6, 12), style, floats(12, 6), mesh, takes=takes, gives=gives)


@on_ranks(1, 2, 3, 4)
def test_no_parallel(pool: Any, world_size: int) -> None:
    cases = {
        (None, None): ({}, {}),
        (Shard(0), None): ({"all_gather": 1}, {}),
        (None, Shard(0)): ({}, {"all_gather": 1}),
        (Shard(0), Shard(0)): ({"all_gather": 1}, {"all_gather": 1}),
    }
    for (takes, gives), (forward, backward) in cases.items():
        style = NoParallel(input_layout=takes, output_layout=gives)
        for counts in pool.run(world_size, whole, style, takes, gives):
            assert counts == expect(world_size, forward, backward), style


@spmd.on_mesh()
def whole_with_sharded_inside(mesh: Any) -> Any:
    """Check a style of a module and styles of its submodules, in any order of the plan."""
    inside = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}
    first = compare(lambda adapter: adapter.Mlp(6, 12), {"": NoParallel(), **inside}, floats(4, 6), mesh)
    assert first == compare(lambda adapter: adapter.Mlp(6, 12), {**inside, "": NoParallel()}, floats(4, 6), mesh)
    return first


@on_ranks(1, 2, 3, 4)
def test_no_parallel_around_sharded_modules(pool: Any, world_size: int) -> None:
    for counts in pool.run(world_size, whole_with_sharded_inside):
        assert counts == expect(world_size, {"all_reduce": 1}, {"all_reduce": 1})


# ---------------------------------------------------------------- ParameterParallel
@spmd.on_mesh()
def stacked(mesh: Any, placements: dict[str, Any], hidden: int) -> Any:
    return compare(lambda adapter: adapter.Experts(5, 4, hidden), ParameterParallel(placements), floats(5, 3, 4), mesh)


@pytest.mark.parametrize("hidden", [12, 7], ids=["even", "uneven"])
@on_ranks(1, 2, 3, 4)
def test_stacked_expert_weights(pool: Any, world_size: int, hidden: int) -> None:
    tensor_parallel = {"gate_up": PackedShard(2, 2), "down": Shard(1)}
    for counts in pool.run(world_size, stacked, tensor_parallel, hidden):
        assert counts == expect(world_size, {"all_reduce": 1}, {"all_reduce": 1})
    expert_parallel = {"gate_up": Shard(0), "down": Shard(0)}
    for counts in pool.run(world_size, stacked, expert_parallel, hidden):
        # Every rank takes the tokens of its experts and gives their outputs to all; and back.
        assert counts == expect(world_size, {"all_gather": 1}, {"all_gather": 1})


@spmd.on_mesh()
def parameter_errors(mesh: Any) -> None:
    adapter = get_adapter()
    model = adapter.Experts(5, 4, 6)
    with CommDebugMode() as comm:
        with pytest.raises(ValueError, match=r"'gate'.*are: 'gate_up', 'down'"):
            parallelize_module(model, mesh, ParameterParallel({"gate": Shard(0)}))
        with pytest.raises(ValueError, match=r"parameter 'down' of 'Experts', of shape \(5, 6, 4\)"):
            parallelize_module(model, mesh, ParameterParallel({"gate_up": Shard(0), "down": Shard(3)}))
        with pytest.raises(ValueError, match=r"PackedShard\(dim=2, sizes=\(5, 4\)\).*12 elements.*add up to 9"):
            parallelize_module(model, mesh, ParameterParallel({"gate_up": PackedShard(2, (5, 4))}))
        with pytest.raises(ValueError, match="at least one parameter"):
            ParameterParallel({})
        with pytest.raises(TypeError, match=r"placements\['down'\]"):
            ParameterParallel({"down": 0})
    assert comm.get_total_counts() == 0
    assert not isinstance(model.gate_up, DTensor)


def test_wrong_parameters(pool: Any) -> None:
    pool.run(2, parameter_errors)


# ---------------------------------------------------------------- further linear layers
@spmd.on_mesh()
def registered_linear(mesh: Any, style: Any, takes: Any, gives: Any, uneven: bool) -> Any:
    adapter = get_adapter()
    get_platform().register_linear_module(adapter.Projection, weight="kernel", bias="shift", out_dim=1)
    n_in, n_out = (7, 5) if uneven else (12, 24)
    return compare(
        lambda adapter: adapter.Projection(n_in, n_out), style, floats(3, n_in), mesh, takes=takes, gives=gives
    )


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@on_ranks(1, 2, 3, 4)
def test_registered_linear_layer(pool: Any, world_size: int, uneven: bool) -> None:
    for counts in pool.run(world_size, registered_linear, "colwise", None, Shard(-1), uneven):
        assert counts == expect(world_size, {}, {"all_reduce": 1})
    for counts in pool.run(world_size, registered_linear, "rowwise", Shard(-1), None, uneven):
        assert counts == expect(world_size, {"all_reduce": 1}, {})


@spmd.on_mesh()
def linear_by_subclass(mesh: Any) -> Any:
    return compare(
        lambda adapter: adapter.LinearByAnotherName(7, 5), ColwiseParallel(), floats(3, 7), mesh, gives=Shard(-1)
    )


def test_linear_layer_by_subclass(pool: Any) -> None:
    for counts in pool.run(3, linear_by_subclass):
        assert counts == expect(3, {}, {"all_reduce": 1})


@spmd.on_mesh()
def registration_errors(mesh: Any) -> None:
    adapter, platform = get_adapter(), get_platform()
    with pytest.raises(TypeError, match="takes a class"):
        platform.register_linear_module(adapter.Projection(2, 2))
    with pytest.raises(ValueError, match="out_dim"):
        platform.register_linear_module(adapter.Projection, weight="kernel", out_dim=2)
    with pytest.raises(TypeError, match="takes a class"):
        platform.register_embedding_module("Embedding")
    with pytest.raises(ValueError, match="register_linear_module"):
        parallelize_module(adapter.Experts(2, 2, 2), mesh, "colwise")


def test_wrong_registration(pool: Any) -> None:
    pool.run(1, registration_errors)


# ---------------------------------------------------------------- heads
@spmd.on_mesh()
def wrong_heads(mesh: Any) -> None:
    adapter = get_adapter()
    plan = {"w[qkv]": "colwise", "wo": "rowwise"}

    def refused(model: Any, plan: dict, *words: str) -> None:
        with CommDebugMode() as comm, pytest.raises(ValueError) as caught:
            parallelize_module(model, mesh, plan)
        missing = [word for word in words if word not in str(caught.value)]
        assert not missing, f"{missing} not in {caught.value}"
        assert comm.get_total_counts() == 0
        assert not any(isinstance(p, DTensor) for p in dict(get_platform().named_parameters(model.wo)).values())

    # From the attributes of the attention module, with the attribute's name.
    refused(
        adapter.GroupedAttention(6, 6, 2), plan, "'wq' has 6 heads of 2", "(num_heads)", "4 ranks", "1, 2, 3, 6 ranks"
    )
    refused(adapter.GroupedAttention(8, 2, 2), plan, "'wk' has 2 heads", "num_kv_heads", "replicate_heads=True")
    # By the arguments of the style.
    explicit = {"wq": ColwiseParallel(heads=6), "wo": RowwiseParallel()}
    refused(adapter.GroupedAttention(8, 8, 3), explicit, "'wq' has 6 heads of 4 features", "use_local_output=False")
    refused(
        adapter.GroupedAttention(8, 8, 3), {"wq": ColwiseParallel(heads=7)}, "24 features", "do not divide into 7 heads"
    )
    refused(adapter.GroupedAttention(8, 8, 3), {"wo": RowwiseParallel(heads=6)}, "'wo' has 6 heads")
    refused(adapter.FusedAttention(8, 2, 2), {"wqkv": ColwiseParallel(heads=(8, 2, 2))}, "'wqkv' has 2 heads of 2")
    refused(adapter.FusedAttention(8, 2, 2), {"wqkv": ColwiseParallel(packed=5)}, "'wqkv'", "24 elements", "5 parts")
    refused(adapter.FusedAttention(8, 2, 2), {"wqkv": ColwiseParallel(packed=(8, 8))}, "24 elements", "add up to 16")
    shared = {"wk": ColwiseParallel(heads=3, replicate_heads=True)}
    refused(adapter.GroupedAttention(12, 3, 2), shared, "'wk' has 3 heads")
    # A norm over all heads together.
    wide = adapter.GroupedAttention(8, 8, 2, normed=True)
    wide.q_norm = adapter.RmsNorm(16)
    refused(wide, plan, "'q_norm' normalises all 16 features of 'wq'", "output_layouts=Replicate()")

    at_least_one, parts = "takes numbers of at least 1", "takes the size of each part or the number of equal parts"
    for wrong, message in (
        ({"heads": 0}, at_least_one),
        ({"heads": (2, 0)}, at_least_one),
        ({"packed": 0}, parts),
        ({"packed": ()}, parts),
        ({"replicate_heads": True}, "needs the number of heads"),
    ):
        with pytest.raises(ValueError, match=message):
            ColwiseParallel(**wrong)
    with pytest.raises(ValueError, match="different numbers of parts"):
        ColwiseParallel(heads=(8, 2, 2), packed=(8, 8))
    with pytest.raises(ValueError, match="one number for each part"):
        ColwiseParallel(heads=8, packed=(8, 8))
    number, ints = "takes a number of heads, or a number for each part", "takes ints as sizes"
    for wrong, message in (
        ({"heads": "8"}, number),
        ({"heads": True}, number),
        ({"packed": 1.5}, ints),
        ({"packed": "ab"}, ints),
    ):
        with pytest.raises(TypeError, match=message):
            RowwiseParallel(**wrong)
    with pytest.raises(ValueError, match="is an embedding"):
        parallelize_module(adapter.embedding_module(8, 4), mesh, ColwiseParallel(packed=2))


def test_wrong_heads(pool: Any) -> None:
    pool.run(4, wrong_heads)


# ---------------------------------------------------------------- plans
@spmd.on_mesh()
def many_patterns(mesh: Any) -> None:
    adapter = get_adapter()

    def placed(plan: dict) -> list[str]:
        model = adapter.Block(24, 36, 2)
        with strict():
            parallelize_module(model, mesh, plan, src_data_rank=None)
        return [
            path
            for path, module in get_platform().named_modules(model)
            if any(isinstance(p, DTensor) for _, p in get_platform().named_parameters(module))
        ]

    assert placed({"attention.w[qkv]": "colwise"}) == ["attention.wq", "attention.wk", "attention.wv"]
    assert placed({"norm?": "replicate"}) == ["norm1", "norm2"]
    assert placed({"norm[1-1]": "replicate"}) == ["norm1"]
    assert placed({"norm[!1]": "replicate"}) == ["norm2"]
    assert placed({"*.w*": "colwise"}) == [
        *(f"attention.w{name}" for name in "qkvo"),
        *(f"feed_forward.w{i}" for i in (1, 3, 2)),
    ]
    # An asterisk stays within a segment, and a path does not match by its end.
    for pattern in ("*wq", "wq", "attention*", "a.norm1"):
        with strict(), pytest.raises(ValueError, match=r"matches no module|linear and embedding"):
            parallelize_module(adapter.Block(24, 36, 2), mesh, {pattern: "colwise"})
    # Nothing to do.
    model = adapter.Block(24, 36, 2)
    assert parallelize_module(model, mesh, {}) is model
    assert not any(isinstance(p, DTensor) for p in dict(get_platform().named_parameters(model.norm1)).values())


def test_patterns(pool: Any) -> None:
    pool.run(2, many_patterns)


@spmd.on_mesh()
def gathered_input(mesh: Any) -> Any:
    """Check by counts that the input of a replicated module is gathered only once."""
    adapter = get_adapter()
    model = parallelize_module(adapter.load(adapter.Mlp(6, 12), np.random.default_rng(0)), mesh, NoParallel())
    x = DTensor.from_local(adapter.tensor(floats(2, 6)), mesh, [Replicate()])
    with CommDebugMode() as before:
        adapter.call(model, x)
    return difference(before.get_comm_counts(), {})


def test_replicated_input_is_not_communicated(pool: Any) -> None:
    assert pool.run(2, gathered_input) == [{}, {}]
