"""Uses that graphs of modules with styles cannot hold: each raises an error with a reason, of one text on all ranks,
before communication."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn
from mindspore.graph._parse.namespace import ClassMemberNamespace

from hyper_parallel import (
    ColwiseParallel,
    ModuleStyle,
    NoParallel,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    fully_shard,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.debug import CommDebugMode
from hyper_parallel.platform.contract.programs import STEPS
from hyper_parallel.platform.mindspore.compiled import functions, hooks, parsing
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.nets import error_of, make_net

FEATURES, UNITS = 8, 12


class Scaled(nn.Cell):
    """A cell whose parameter has a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Parameter(Tensor(np.ones(FEATURES, np.float32)))

    def construct(self, x: Any) -> Any:
        return x * self.scale


class Cuts(ModuleStyle):
    """A style of a user's own, for a norm."""

    desired_input_layouts = (Shard(0),)


def styled(mesh: Any, layer: nn.Cell, *styles: Any) -> Any:
    """A net of this layer."""
    net = nn.SequentialCell(layer)
    for style in styles:
        parallelize_module(net, mesh, {"0": style})
    return net


def dense(outputs: int = UNITS, inputs: int = FEATURES, **options: Any) -> Any:
    return nn.Dense(inputs, outputs, **options)


def hooked(net: Any) -> Any:
    net[0].register_forward_pre_hook(lambda cell, args: None)
    return net


def other_parameter(net: Any) -> Any:
    net[0].weight = Parameter(Tensor(np.ones((UNITS, FEATURES), np.float32)))
    return net


def recomputed(net: Any) -> Any:
    net.recompute()
    return net


def beside_dropout(mesh: Any, layer: Any) -> Any:
    """A net with a plain layer of dropout, which in evaluation is compiled."""
    net = parallelize_module(nn.SequentialCell(dense(), layer), mesh, {"0": ColwiseParallel()})
    assert net(Tensor(np.ones((4, FEATURES), np.float32))) is not None
    assert ms.jit(net.set_train(False))(Tensor(np.ones((4, FEATURES), np.float32))) is not None
    return net.set_train()


#: name -> a function that makes the net of a mesh, and words of why it cannot be in a graph. Found before anything is
#: compiled.
HELD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "fully_shard": (
        lambda mesh: nn.SequentialCell(fully_shard(dense(), mesh=mesh)),
        "this kind of module, is not traced",
    ),
    "a hook": (lambda mesh: hooked(styled(mesh, dense(), ColwiseParallel())), "it has hooks"),
    "another parameter": (
        lambda mesh: other_parameter(styled(mesh, dense(), ColwiseParallel())),
        "its parameters were replaced after its style distributed",
    ),
    "features of unequal parts": (
        lambda mesh: styled(mesh, dense(5), RowwiseParallel(output_layouts=Shard(-1))),
        "its output would be sharded along its features, into shards of unequal sizes",
    ),
    "from unequal parts": (
        lambda mesh: styled(mesh, dense(5), ColwiseParallel(output_layouts=Shard(0))),
        "its output would be redistributed between shards of unequal sizes",
    ),
    "to unequal parts": (
        lambda mesh: styled(mesh, dense(UNITS, 5), RowwiseParallel(input_layouts=Shard(0))),
        "its input would be redistributed between shards of unequal sizes",
    ),
    "an activation": (
        lambda mesh: styled(mesh, dense(activation="relu"), ColwiseParallel()),
        "it is an nn.Dense with an activation",
    ),
    "packed rows": (
        lambda mesh: styled(mesh, dense(), RowwiseParallel(packed=2, input_layouts=Replicate())),
        "its weight packs several matrices, and its input is replicated",
    ),
    "an input that is cut first": (
        lambda mesh: styled(mesh, nn.LayerNorm([FEATURES]), Cuts()),
        "its input would be redistributed from one sharded dimension to another",
    ),
    "a parameter of its own": (
        lambda mesh: styled(mesh, Scaled(), NoParallel()),
        "it holds 'scale', which is not supported in graphs",
    ),
    "padding": (
        lambda mesh: styled(
            mesh, mint.nn.Embedding(UNITS, FEATURES, padding_idx=0), ColwiseParallel(output_layouts=Replicate())
        ),
        "this kind of module, or an embedding with other options",
    ),
    "DTensors": (
        lambda mesh: styled(
            mesh, dense(), PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
        ),
        "a style passes DTensors to it: set use_local_output=True in that style",
    ),
    "keywords": (
        lambda mesh: styled(
            mesh,
            dense(),
            PrepareModuleInput(
                input_kwarg_layouts={"x": Shard(0)},
                desired_input_kwarg_layouts={"x": Replicate()},
                use_local_output=True,
            ),
        ),
        "a style converts keyword inputs",
    ),
    "a hook outside a style": (
        lambda mesh: hooked(
            styled(
                mesh,
                dense(),
                PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True),
            )
        ),
        "one of its hooks or styles is not supported in graphs",
    ),
    "computed again": (
        lambda mesh: recomputed(styled(mesh, dense(), ColwiseParallel())),
        "it is recomputed in backward",
    ),
    "dropout": (lambda mesh: beside_dropout(mesh, nn.Dropout(p=0.5)), "its dropout would use MindSpore's kernel"),
    "dropout of rows": (lambda mesh: beside_dropout(mesh, nn.Dropout1d(p=0.5)), "its dropout would use"),
    "dropout of images": (lambda mesh: beside_dropout(mesh, nn.Dropout2d(p=0.5)), "its dropout would use"),
}


@on_mesh()
def held(mesh: Any) -> dict[str, str]:
    mesh._has_uneven_shards, x = False, Tensor(np.ones((4, FEATURES), np.float32))
    found = {}
    for name, (make, _) in HELD.items():
        net = make(mesh)
        with CommDebugMode() as comm:
            found[name] = error_of(ms.jit(net), x)
        assert comm.get_total_counts() == 0, name
    mesh._has_uneven_shards = False
    return found


def test_graphs_have_every_step() -> None:
    """A bias alone is made one of the summands, which `ScatterAndAdd` does."""
    assert {*functions._MOVES, "one_summand"} == {verb.moves for verb in STEPS.values()}


def test_modules_that_no_graph_can_hold(pool: Any) -> None:
    first, second = pool.run(2, held)
    assert first == second
    wanted = {name: f"graphs cannot contain ({words}" for name, (_, words) in HELD.items()}
    wanted["fully_shard"] = "graphs cannot contain (its style, or this kind of module, is not traced"
    assert {name: text for name, text in first.items() if wanted[name] not in text} == {}
    assert all(text.startswith("RuntimeError: the function ") for text in first.values())


#: name -> layer, style, shape and dtype of the input, and the error. Found while the graph is made.
SHAPES: dict[str, tuple[Callable[[], Any], Any, tuple[int, ...], Any, str]] = {
    "double precision": (
        dense, ColwiseParallel(), (4, FEATURES), ms.float64,
        "TypeError: '0' in a graph: graphs on CPUs reduce only single and half precision, got an input of dtype",
    ),
    "too few dimensions": (
        dense, RowwiseParallel(input_layouts=Shard(2)), (4, 4), ms.float32,
        "ValueError: '0' takes an input sharded along dimension 2, got an input of shape (4, 4)",
    ),
    "cut along what is normalized": (
        lambda: nn.LayerNorm([FEATURES]), SequenceParallel(sequence_dim=1, use_local_output=True), (4, FEATURES),
        ms.float32, "ValueError: '0' in a graph: its input, of shape (4, 8), is sharded along a normalized dimension",
    ),
    "other features": (
        dense, RowwiseParallel(input_layouts=Replicate()), (4, 6), ms.float32,
        "ValueError: '0' takes 8 features, got an input of shape (4, 6)",
    ),
    "an output of fewer dimensions": (
        dense, ColwiseParallel(output_layouts=Shard(3)), (4, FEATURES), ms.float32,
        "ValueError: the output of '0' has 2 dimensions, but its style shards it along dimension 3",
    ),
    "an output cut along its features": (
        dense, RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), (4, FEATURES), ms.float32,
        "ValueError: the output of '0' in a graph cannot be sharded along dimension 1, which is the dimension of its",
    ),
    "an output of unequal parts": (
        dense, ColwiseParallel(output_layouts=Shard(0)), (3, FEATURES), ms.float32,
        "ValueError: the output of '0' in a graph is sharded along dimension 0 into equal shards, but",
    ),
    "after unequal parts": (
        lambda: nn.LayerNorm([FEATURES]), SequenceParallel(sequence_dim=0, use_local_output=True), (4, FEATURES),
        ms.float32, "RuntimeError: '0' in a graph: a layer has returned plain shards of unequal sizes",
    ),
}  # fmt: skip


@on_mesh()
def shapes(mesh: Any) -> dict[str, str]:
    found = {}
    for name, (layer, style, shape, dtype, _) in SHAPES.items():
        net = styled(mesh, layer(), style)
        mesh._has_uneven_shards = name == "after unequal parts"
        with CommDebugMode() as comm:
            found[name] = error_of(ms.jit(net), Tensor(np.ones(shape), dtype))
        assert comm.get_total_counts() == 0, name
    mesh._has_uneven_shards = False
    net = styled(mesh, dense(), ColwiseParallel())

    @ms.enable_dynamic(x=Tensor(shape=[None, FEATURES], dtype=ms.float32))
    @ms.jit
    def of_any_length(x: Any) -> Any:
        return net(x)

    found["of any length"] = error_of(of_any_length, Tensor(np.ones((4, FEATURES), np.float32)))
    return found


def test_inputs_that_a_graph_is_not_right_for(pool: Any) -> None:
    first, second = pool.run(2, shapes)
    assert first == second
    wanted = {name: words for name, (*_, words) in SHAPES.items()}
    wanted["of any length"] = "ValueError: '0' in a graph needs a static input shape, got (None, 8): pass"
    assert {name: text for name, text in first.items() if not text.startswith(wanted[name])} == {}


@on_mesh()
def by_the_parser(mesh: Any) -> list[str]:
    """Refusals that no known program triggers through the parser: asked in the way that the parser asks."""
    net = make_net(mesh)
    ask = ClassMemberNamespace.__getitem__
    conversions: Any = SimpleNamespace(local=True, count=1, conversions=())
    return [
        error_of(hooks._slots, net, [conversions, conversions]),
        error_of(parsing.checked_resolution, ask, ClassMemberNamespace(net.up), "_replaced_forward"),
        error_of(parsing.checked_answer, lambda x: x, net.up.weight),
    ]


def test_what_the_parser_comes_across(pool: Any) -> None:
    for by_styles, by_name, by_answer in pool.run(2, by_the_parser):
        assert by_styles == "NotTracedError: several styles convert its inputs or its outputs"
        assert "graphs cannot contain (MindSpore calls it in a way that cannot be traced)" in by_name, by_name
        assert "a function or cell that is compiled uses the distributed parameter" in by_answer, by_answer


def another_backend() -> str:
    return error_of(lambda: init_device_mesh(None, (2,), mesh_dim_names=("tp",), backend_override={"tp": "nccl"}))


@on_mesh()
def partial_statistics(mesh: Any) -> str:
    from mindspore import ops

    from hyper_parallel import DTensor, Partial, distribute_tensor

    x = distribute_tensor(Tensor(np.ones((4, 3, 2, 2), np.float32)), mesh, [Shard(0)])
    rows = [distribute_tensor(Tensor(np.ones(3, np.float32)), mesh, [Replicate()]) for _ in range(2)]
    running = [DTensor.from_local(Tensor(np.ones(3, np.float32)), mesh, [Partial()]) for _ in range(2)]
    with CommDebugMode() as comm:
        text = error_of(lambda: ops.batch_norm(x, *running, *rows, True))
    assert comm.get_total_counts() == 0
    return text


def test_outside_of_graphs(pool: Any) -> None:
    words = "ValueError: MindSpore has only the communication backend "
    for text in pool.run(2, another_backend):
        assert text.startswith(words) and "got 'nccl': leave the backend out of backend_override" in text, text
    first, second = pool.run(2, partial_statistics)
    assert first == second
    assert first.startswith("ValueError: batch_norm writes in place into running_mean, placed"), first
