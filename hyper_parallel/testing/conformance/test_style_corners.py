"""Rare cases of styles and plans: rare arguments, attention modules with few attributes, reprs."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

import hyper_parallel.core.tensor_parallel as tensor_parallel
from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    HeadNormParallel,
    ModuleStyle,
    NoParallel,
    PackedShard,
    ParameterParallel,
    Partial,
    PrepareModuleInput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    check_ranks,
    parallelize_module,
    vocab_parallel_cross_entropy,
)
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import compare, floats, same
from hyper_parallel.testing.extent import on_ranks

PROJECTIONS = {"w[qkv]": ColwiseParallel(), "wo": RowwiseParallel()}


def test_names_of_the_package() -> None:
    """Check that names of losses are imported at first use, and that other names raise AttributeError."""
    assert tensor_parallel.vocab_parallel_cross_entropy is vocab_parallel_cross_entropy
    with pytest.raises(AttributeError, match="no attribute 'bogus'"):
        tensor_parallel.bogus  # noqa: B018


def test_reprs() -> None:
    """Check that a repr is the constructor call."""
    for style in (
        HeadNormParallel(use_local_output=False),
        NoParallel(input_layout=Shard(0), output_layout=Shard(1), use_local_output=False),
        ColwiseParallel(heads=2, replicate_heads=True),
        RowwiseParallel(packed=(4, 2), heads=(2, 1)),
    ):
        assert vars(eval(repr(style))) == vars(style)
    assert repr(ParameterParallel({"w": Shard(0)})) == (
        "ParameterParallel({'w': Shard(dim=0)}, input_layouts=(Replicate(),), output_layouts=(Replicate(),), "
        "use_local_output=True)"
    )


@spmd.on_mesh()
def attention_without_a_size(mesh: Any, heads: int, kv_heads: int) -> Any:
    """Check numbers of heads without a head size, which then follows from the features."""

    def build(adapter: Any) -> Any:
        module = adapter.GroupedAttention(heads, kv_heads, 2)
        module.head_size_of_view, module.head_dim = module.head_dim, None
        return module

    adapter = get_adapter()
    if heads % mesh.size() or kv_heads % mesh.size():
        with pytest.raises(ValueError, match=f"{min(heads, kv_heads)} heads"):
            parallelize_module(build(adapter), mesh, PROJECTIONS)
        return None
    parallelize_module(build(adapter), mesh, PROJECTIONS)
    return None


def test_heads_without_their_size(pool: Any) -> None:
    """Check that heads are found by name and features."""
    pool.run(2, attention_without_a_size, 8, 4)
    pool.run(2, attention_without_a_size, 8, 3)
    pool.run(4, attention_without_a_size, 8, 2)


@spmd.on_mesh()
def unknown_projections(mesh: Any) -> None:
    """Check that projections without a known number of heads are accepted: fused, latent, and with explicit numbers."""
    adapter = get_adapter()
    module = adapter.GroupedAttention(4, 4, 2)
    module.num_heads = module.num_kv_heads = 3  # of other features than 3 heads of 2
    parallelize_module(module, mesh, PROJECTIONS)
    module = adapter.GroupedAttention(4, 4, 2)
    module.head_dim = None
    module.num_heads = module.num_kv_heads = 5
    parallelize_module(module, mesh, PROJECTIONS)
    module = adapter.GroupedAttention(4, 2, 2, normed=True)
    module.q_norm = adapter.RmsNorm(3)  # neither of a head nor of all
    plan = {"wq": ColwiseParallel(heads=4), "wk": ColwiseParallel(packed=2), "wv": ColwiseParallel(), "wo": "rowwise"}
    parallelize_module(module, mesh, plan)
    assert not isinstance(module.q_norm.weight, DTensor)
    assert isinstance(module.k_norm.weight, DTensor)


def test_unknown_projections(pool: Any) -> None:
    """Check that no heads are guessed for unknown projections."""
    pool.run(2, unknown_projections)


class WithoutArguments(ModuleStyle):
    def __init__(self) -> None:
        self.use_local_output = False


class InnerParallel(ModuleStyle):
    """A user-defined style: each rank has some rows of the kernel, and computes a partial product."""

    placements: ClassVar = {"kernel": Shard(0)}
    desired_input_layouts = (Shard(-1),)

    def __init__(self, scale: int = 1, *, note: str | None = None) -> None:
        self.scale, self.note = scale, note


@spmd.on_mesh()
def own_style(mesh: Any) -> Any:
    adapter = get_adapter()
    with pytest.raises(ValueError, match=r"InnerParallel\(1\) names the parameter 'kernel'.*'Probe'"):
        parallelize_module(adapter.Probe(), mesh, InnerParallel())
    return compare(lambda adapter: adapter.Projection(6, 5), InnerParallel(), floats(3, 6), mesh)


@on_ranks(1, 2, 4)
def test_style_of_ones_own(pool: Any, world_size: int) -> None:
    """Check a user-defined style: full inputs are sharded, partial outputs are reduced, and checks of the plan
    apply."""
    for counts in pool.run(world_size, own_style):
        once = {"forward": {"all_reduce": 1}, "backward": {"all_gather": 1}}
        assert counts == (once if world_size > 1 else {"forward": {}, "backward": {}})
    assert repr(InnerParallel(2, note="x")) == "InnerParallel(2, note='x')"
    assert repr(WithoutArguments()) == "WithoutArguments()"
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        WithoutArguments(3)  # type: ignore[call-arg]


@spmd.on_mesh()
def several_inputs(mesh: Any) -> None:
    """Check `ParameterParallel` with an entry for each of several inputs and outputs."""
    adapter = get_adapter()
    style = ParameterParallel({"up": Shard(0)}, input_layouts=(None, Shard(0)), output_layouts=(None, Shard(0)))
    probe = adapter.Probe()
    probe.up = adapter.Projection(4, 2).kernel
    parallelize_module(probe, mesh, style)
    x = adapter.tensor(floats(2, 3))
    first, second = adapter.call(probe, "text", x)
    assert first == "text"
    same(adapter.numpy(second), adapter.numpy(x), "a shard that stays one")
    assert isinstance(probe.seen[0][1], DTensor)
    with pytest.raises(ValueError, match=r"1 positional input\(s\), but ParameterParallel has 2 input_layouts"):
        adapter.call(probe, x)
    with pytest.raises(ValueError, match=r"returned 3 output\(s\), but ParameterParallel has 2 output_layouts"):
        adapter.call(probe, x, x, x)
    with pytest.raises(TypeError, match="names of parameters, got 3"):
        ParameterParallel({3: Shard(0)})


def test_several_inputs(pool: Any) -> None:
    """Check that only inputs with a layout are converted."""
    pool.run(2, several_inputs)


@spmd.on_mesh()
def rare_calls(mesh: Any) -> None:
    adapter = get_adapter()
    x = adapter.tensor(floats(4, 6))
    # None is an input, too: it stays None.
    probe = parallelize_module(
        adapter.Probe(),
        mesh,
        PrepareModuleInput(
            input_layouts=(Replicate(), Replicate()),
            desired_input_layouts=(Replicate(), Replicate()),
            input_kwarg_layouts={"mask": Replicate(), "bias": None},
            desired_input_kwarg_layouts={"mask": Replicate(), "bias": None},
        ),
    )
    adapter.call(probe, x, None, mask=None, bias=x)
    assert probe.seen[0][1] is None
    assert probe.seen[1]["mask"] is None
    assert probe.seen[1]["bias"] is x
    with pytest.raises(ValueError, match=r"PrepareModuleInput.*already"):
        parallelize_module(probe, mesh, PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Shard(0)))
    parallelize_module(probe, mesh, PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Shard(0)))

    with pytest.raises(TypeError, match="the output of"):
        # A forward that gives no tensor of the library: its result is not known to be the same on all ranks.
        parallelize_module(adapter.Probe(), mesh, {"": SequenceParallel(sequence_dim=0)})(x, x)

    # A module of several inputs and outputs that every rank computes whole.
    probe = parallelize_module(adapter.Probe(), mesh, NoParallel())
    outputs = adapter.call(probe, x, (x, [adapter.relu(x)]), x)
    assert probe.seen[0][0] is probe.seen[0][2] and isinstance(probe.seen[0][0], DTensor)
    assert len(outputs) == 3 and not any(isinstance(y, DTensor) for y in (outputs[0], *outputs[1], outputs[2]))
    adapter.call(probe, x, y=x)
    assert probe.seen[0][0] is probe.seen[1]["y"] and isinstance(probe.seen[1]["y"], DTensor)
    probe = parallelize_module(adapter.Probe(), mesh, NoParallel(local_output_grad_placements=Partial()))
    whole = DTensor.from_local(adapter.relu(x), mesh, [Replicate()])
    assert not any(isinstance(y, DTensor) for y in adapter.call(probe, x, whole))
    # Plain further inputs are the same on all ranks, unless the first is a part.
    scale, rows = adapter.tensor(floats(6)), Shard(0)
    scaled = parallelize_module(adapter.Scaled(6, 6), mesh, NoParallel())
    assert adapter.call(scaled, x, scale, shift=scale).shape == (4, 6)
    scaled = parallelize_module(adapter.Scaled(6, 6), mesh, NoParallel(input_layout=rows, output_layout=rows))
    with pytest.raises(ValueError, match=r"got a plain tensor \(.* and a DTensor"):
        adapter.call(scaled, x, scale, shift=scale)

    for wrong, kind, message in (
        ([1], TypeError, "a style, its name, or a dict"),
        ({1: "colwise"}, TypeError, "the key 1"),
    ):
        with pytest.raises(kind, match=message):
            parallelize_module(adapter.linear_module(4, 4), mesh, wrong)


def test_rare_calls(pool: Any) -> None:
    """Check None as an input, a style applied twice, and invalid plans."""
    pool.run(2, rare_calls)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def other_meshes(mesh: Any) -> None:
    adapter = get_adapter()
    with pytest.raises(ValueError, match=r"ColwiseParallel on '\w+' needs a 1-D mesh.*mesh\['tp'\]"):
        ColwiseParallel().apply(adapter.linear_module(4, 4), mesh)
    module = ColwiseParallel().apply(adapter.linear_module(4, 4), mesh["tp"])
    assert module.weight.placements == (Shard(0),)
    x = DTensor.from_local(adapter.tensor(floats(2, 4)), mesh["dp"], [Replicate()])
    with pytest.raises(
        ValueError, match=r"the input of .* is distributed over .*dp.*, but the style is applied to .*tp"
    ):
        adapter.call(module, x)


def test_other_meshes(pool: Any) -> None:
    """Check that a style refuses a mesh of two dimensions, and inputs on another dimension."""
    pool.run(4, other_meshes)


@spmd.on_mesh()
def logits_that_differ(mesh: Any) -> None:
    """Check ranks with different numbers of samples: all raise, and none hangs."""
    adapter, samples = get_adapter(), 3 + mesh.get_local_rank()
    target = adapter.tensor(np.zeros(samples, np.int64))
    with pytest.raises(ValueError, match="differ in the samples of local_logits"):
        vocab_parallel_cross_entropy(adapter.tensor(floats(samples, 4)), target, mesh)
    with pytest.raises(ValueError, match=r"the target has shape \(2, 4\)"):
        vocab_parallel_cross_entropy(adapter.tensor(floats(3, 5)), adapter.tensor(floats(2, 4)), mesh)


@spmd.on_mesh()
def misfits(mesh: Any) -> None:
    adapter = get_adapter()
    with pytest.raises(ValueError, match=r"24 features, which do not divide into 7 heads \(heads=\(3, 2, 2\)\)"):
        parallelize_module(adapter.linear_module(4, 24), mesh, ColwiseParallel(heads=(3, 2, 2)))
    # The framework's own words for an input that fits the style and not the weight.
    column = parallelize_module(adapter.linear_module(4, 24), mesh, ColwiseParallel())
    with pytest.raises((RuntimeError, ValueError)):
        adapter.numpy(adapter.call(column, adapter.tensor(floats(3, 13))))
    rows = ColwiseParallel(input_layouts=PackedShard(0, (3, 3)))
    with pytest.raises(ValueError, match=r"the input of .* is not placed as the plan says: .*, got \(5, 4\)"):
        adapter.call(parallelize_module(adapter.linear_module(4, 24), mesh, rows), adapter.tensor(floats(5, 4)))
    for nothing in (None, "x"):
        with pytest.raises(TypeError, match=r"the input of .* must be a tensor, got"):
            adapter.call(column, nothing)


def test_misfits(pool: Any) -> None:
    """Check heads, features and inputs that do not fit."""
    pool.run(2, misfits)


@spmd.on_mesh()
def model_with_buffers(mesh: Any) -> Any:
    """Check that buffers are compared inside `check_ranks`."""
    adapter = get_adapter()
    with check_ranks(mesh):
        model = parallelize_module(adapter.Buffered(4), mesh, NoParallel())
    assert isinstance(model.scale, DTensor)


def test_buffers_are_compared(pool: Any) -> None:
    """Check that buffers that are equal on all ranks are accepted."""
    pool.run(2, model_with_buffers)


@spmd.on_mesh()
def two_styles(mesh: Any) -> Any:
    """Check one style for the parameters and another style for the input of a module."""
    prepared = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    return compare(
        lambda adapter: adapter.Mlp(6, 8),
        {"up": ColwiseParallel(), "u[p]": prepared, "down": RowwiseParallel()},
        floats(4, 6),
        mesh,
        takes=Shard(0),
    )


def test_two_styles_on_a_module(pool: Any) -> None:
    """Check that two styles are applied in the order of the plan."""
    for counts in pool.run(2, two_styles):
        assert counts == {
            "forward": {"all_gather": 1, "all_reduce": 1},
            "backward": {"reduce_scatter": 1},
        }


@spmd.on_mesh()
def row_without_bias(mesh: Any) -> Any:
    return compare(lambda adapter: adapter.linear_module(6, 4, False), "rowwise_rep", floats(3, 6), mesh)


@spmd.on_mesh()
def wrong_logits(mesh: Any) -> None:
    adapter = get_adapter()
    target = adapter.tensor(np.zeros((), np.int64))
    with pytest.raises(ValueError, match="dimension of classes"):
        vocab_parallel_cross_entropy(adapter.tensor(np.float32(1.0)), target, mesh)


def test_logits_without_classes(pool: Any) -> None:
    """Check that logits without a class dimension are refused before any communication."""
    pool.run(2, wrong_logits)
    pool.run(2, logits_that_differ)
    pool.run(2, row_without_bias)
