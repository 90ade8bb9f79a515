"""Distributing tensors, parameters and modules; how styles treat arguments, keywords and shared parameters."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    ParallelStyle,
    Partial,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    check_ranks,
    distribute_module,
    distribute_parameter,
    distribute_tensor,
    get_platform,
    parallelize_module,
)
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import block_plan, compare, floats, same
from hyper_parallel.testing.extent import in_gate, on_ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
MESHES = [(1,), (2,), (3,), (4,), (2, 2)]


def part(array: np.ndarray, mesh: Any, *placements: Any) -> np.ndarray:
    """Return this rank's shard of a full array, without partial placements."""
    return array[get_layout(mesh, placements, array.shape).local_index()]


def parameters(module: Any) -> dict[str, Any]:
    """Return all parameters of a module by path."""
    platform = get_platform()
    return {
        f"{path}.{name}" if path else name: parameter
        for path, submodule in platform.named_modules(module)
        for name, parameter in platform.named_parameters(submodule)
    }


def weight_of(module: Any) -> Any:
    """Return the weight of a linear or embedding module, under any attribute name."""
    platform = get_platform()
    return dict(platform.named_parameters(module))[platform.kind_of(module).weight]


# ---------------------------------------------------------------------- distribute_tensor


def whole_tensors(mesh_shape: tuple[int, ...], rows: int) -> None:
    """Check ranks with different data: the data of ``src_data_rank`` is used, or each rank's own data for None."""
    mesh = spmd.device_mesh(*mesh_shape)
    if mesh is None:
        return
    adapter, platform = get_adapter(), mesh.platform
    mine = floats(rows, 3) + platform.rank()
    for placements in itertools.product((R, S0, S1, P), repeat=mesh.ndim):
        sharded = sum(isinstance(p, Shard) and mesh.shape[d] > 1 for d, p in enumerate(placements))
        many = sum(n > 1 for n in mesh.shape)
        for source in range(min(mesh.shape)):
            with CommDebugMode() as comm:
                x = distribute_tensor(adapter.tensor(mine), mesh, placements, src_data_rank=source)
            assert comm.get_total_counts() <= many, placements  # nothing to send where there are no elements
            assert set(comm.get_comm_counts()) <= {"scatter", "broadcast"}
            if sharded == 0:
                assert comm.get_comm_counts() == ({"broadcast": many} if many else {})
            assert x.placements == placements
            rank = int(mesh.ranks[(source,) * mesh.ndim])
            wanted = floats(rows, 3) + rank
            same(adapter.numpy(x), wanted, f"{placements} from {source}")
        with CommDebugMode() as comm:
            x = distribute_tensor(adapter.tensor(mine), mesh, placements, src_data_rank=None)
        assert comm.get_total_counts() == 0
        if P not in placements:
            same(adapter.numpy(x.to_local()), part(mine, mesh, *placements), f"own data as {placements}")
    x = distribute_tensor(adapter.tensor(mine), mesh)
    assert distribute_tensor(x, mesh, [R] * mesh.ndim) is x
    with pytest.raises(ValueError, match="redistribute"):
        distribute_tensor(x, mesh, [S0] * mesh.ndim)
    with pytest.raises(ValueError, match=f"src_data_rank={max(mesh.shape)}"):
        distribute_tensor(adapter.tensor(mine), mesh, src_data_rank=max(mesh.shape))


@pytest.mark.parametrize("rows", in_gate([12, 5], [5]))
@pytest.mark.parametrize("mesh", in_gate(MESHES, [(3,), (2, 2)]), ids=str)
def test_distribute_tensor(pool: Any, mesh: tuple[int, ...], rows: int) -> None:
    pool.run(int(np.prod(mesh)), whole_tensors, mesh, rows)


@spmd.on_mesh()
def partial_tensors(mesh: Any) -> None:
    adapter = get_adapter()
    for op in ("sum", "avg", "max", "min", "product"):
        x = distribute_tensor(adapter.tensor(floats(4, 3)), mesh, [Partial(op)])
        same(adapter.numpy(x), floats(4, 3), op)


@on_ranks(1, 2, 3)
def test_distribute_as_partial(pool: Any, world_size: int) -> None:
    """Check that a distributed partial tensor reduces to the given tensor, for each reduction."""
    pool.run(world_size, partial_tensors)


# ---------------------------------------------------------------------- parameters


@spmd.on_mesh()
def one_parameter(mesh: Any) -> None:
    adapter, platform = get_adapter(), mesh.platform
    model = adapter.load(adapter.Mlp(6, 7), np.random.default_rng(5))
    adapter.freeze(model, "up.weight")
    before = parameters(model)
    values = {name: adapter.numpy(p).copy() for name, p in before.items()}
    distribute_parameter(model.up, "weight", mesh, [S0])
    distribute_parameter(model.up, "bias", mesh, [Shard(-1)])
    after = parameters(model)
    assert list(after) == list(before)
    for name in ("up.weight", "up.bias"):
        assert after[name] is before[name], name  # optimizers that exist see it
        assert isinstance(after[name], DTensor)
        assert isinstance(after[name], platform.Parameter)
        assert after[name].placements == (S0,)
        assert getattr(after[name], "name", name) == getattr(before[name], "name", name)
        same(adapter.numpy(after[name]), values[name], name)
    assert not after["up.weight"].requires_grad
    assert after["up.bias"].requires_grad
    assert not isinstance(after["down.weight"], DTensor)
    distribute_parameter(model.up, "weight", mesh, [S0])  # again: nothing happens
    with pytest.raises(ValueError, match="share a parameter"):
        distribute_parameter(model.up, "weight", mesh, [S1])


@on_ranks(1, 2, 3, 4)
def test_distribute_parameter(pool: Any, world_size: int) -> None:
    pool.run(world_size, one_parameter)


@spmd.on_mesh()
def tied(mesh: Any, vocabulary: int) -> Any:
    adapter = get_adapter()
    plan = {
        "embedding": RowwiseParallel(input_layouts=R),
        "head": ColwiseParallel(output_layouts=R),
    }
    model = parallelize_module(adapter.load(adapter.Tied(vocabulary, 6), np.random.default_rng(5)), mesh, plan)
    assert weight_of(model.embedding) is weight_of(model.head)
    assert weight_of(model.head).placements == (S0,)
    mismatched = {"embedding": ColwiseParallel(), "head": ColwiseParallel()}
    with pytest.raises(ValueError, match="share"):
        parallelize_module(adapter.Tied(vocabulary, 6), mesh, mismatched)
    ids = np.random.default_rng(8).integers(0, vocabulary, (3, 4)).astype(np.int64)
    return compare(lambda adapter: adapter.Tied(vocabulary, 6), plan, ids, mesh)


@pytest.mark.parametrize("vocabulary", [12, 7])
@on_ranks(1, 2, 3, 4)
def test_tied_weights(pool: Any, world_size: int, vocabulary: int) -> None:
    for counts in pool.run(world_size, tied, vocabulary):
        if world_size == 1:
            assert counts == {"forward": {}, "backward": {}}
        else:
            assert counts == {"forward": {"all_reduce": 1, "all_gather": 1}, "backward": {"all_reduce": 1}}


@spmd.on_mesh()
def frozen(mesh: Any, names: tuple[str, ...]) -> Any:
    def build(adapter: Any) -> Any:
        model = adapter.Block(24, 36, 2)
        for name in names:
            adapter.freeze(model, name)
        return model

    return compare(build, block_plan(False), floats(2, 12, 24), mesh, takes=S1, gives=S1)


@on_ranks(1, 2, 4)
def test_frozen_parameters(pool: Any, world_size: int) -> None:
    norms = "norm1.gamma", "norm1.beta", "norm2.gamma", "norm2.beta"
    if get_platform().name != "mindspore":
        norms = "norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"
    for names, reduced in [(norms, 0), (norms[:3], 1), (("attention.wq.weight", "feed_forward.w2.weight"), 4)]:
        for counts in pool.run(world_size, frozen, names):
            assert counts["backward"].get("all_reduce", 0) == (reduced if world_size > 1 else 0), names


# ---------------------------------------------------------------------- distribute_module


@spmd.on_mesh()
def whole_module(mesh: Any, rows: int, source: int | None) -> None:
    """Check data parallelism by `distribute_module`: inputs sharded, parameters replicated or sharded."""
    adapter, rank = get_adapter(), mesh.get_local_rank()
    x = floats(rows, 6)
    for arity, column in itertools.product((2, 3, 4), (False, True)):
        # Ranks start from different weights unless each is to keep its own.
        own = 0 if source is None else rank
        single = adapter.load(adapter.Buffered(6), np.random.default_rng(source or 0))
        module = adapter.load(adapter.Buffered(6), np.random.default_rng(own))
        seen: list[str] = []

        def partition(path: str, submodule: Any, mesh: Any, seen: Any = seen, column: bool = column) -> None:
            seen.append(path)
            if column and path == "linear":
                distribute_parameter(submodule, "weight", mesh, [S0], src_data_rank=source)

        def shard(x: Any) -> Any:
            return DTensor.from_local(x, mesh, [S0], shape=(rows, 6))

        def two(args: tuple, mesh: Any) -> Any:
            return (shard(args[0]),)

        def three(module: Any, args: tuple, mesh: Any) -> Any:
            return shard(args[0])

        def four(module: Any, args: tuple, kwargs: dict, mesh: Any) -> Any:
            return (shard(args[0]), *args[1:]), kwargs

        def output(module: Any, y: Any, mesh: Any) -> Any:
            assert isinstance(y, DTensor)
            return y.redistribute(placements=[S0]).to_local()

        with mesh, CommDebugMode() as comm:
            result = distribute_module(
                *(module, None, partition, {2: two, 3: three, 4: four}[arity]),
                output if arity > 2 else lambda y, mesh: output(None, y, mesh),
                src_data_rank=source,
            )
        assert result is module
        assert seen == ["", "linear"]
        if source is None:
            assert comm.get_total_counts() == 0
        assert all(isinstance(p, DTensor) for p in parameters(module).values())
        assert module.linear.weight.placements == ((S0,) if column else (R,))
        assert module.linear.bias.placements == (R,)
        assert isinstance(module.scale, DTensor)
        assert module.scale.placements == (R,)

        def loss_of(module: Any) -> Any:
            def loss(x: Any) -> Any:
                y = adapter.call(module, x)
                return adapter.sum(adapter.square(y)), y

            return loss

        y, grad_x, grads = adapter.model_value_and_grads(single, loss_of(single), x)
        got_y, got_grad_x, got_grads = adapter.model_value_and_grads(module, loss_of(module), part(x, mesh, S0))
        same(adapter.numpy(got_y), part(adapter.numpy(y), mesh, S0), "output")
        same(got_grad_x, part(grad_x, mesh, S0), "gradient of the input")
        for name in grads:
            same(adapter.numpy(got_grads[name]), adapter.numpy(grads[name]), f"gradient of {name}")
    module = adapter.Buffered(6)
    with pytest.raises(ValueError, match=r"input_fn must take .*it takes 1 argument"):
        distribute_module(module, mesh, input_fn=lambda args: args)
    with pytest.raises(ValueError, match=r"output_fn must take .*it takes 1 argument"):
        distribute_module(module, mesh, output_fn=lambda output: output)
    assert not any(isinstance(p, DTensor) for p in parameters(module).values())
    # None leaves the inputs as they are.
    distribute_module(module, mesh, input_fn=lambda args, mesh: None, src_data_rank=source)
    adapter.call(module, DTensor.from_local(adapter.tensor(part(x, mesh, S0)), mesh, [S0], shape=(rows, 6)))


@pytest.mark.parametrize("rows", in_gate([12, 5], [5]))
@on_ranks(1, 2, 3)
def test_distribute_module(pool: Any, world_size: int, rows: int) -> None:
    for source in {0, world_size - 1, None}:
        pool.run(world_size, whole_module, rows, source)


# ---------------------------------------------------------------------- parallelize_module


class Grid(ParallelStyle):
    """A linear layer sharded over a mesh of two dimensions.

    Its inputs and outputs are plain tensors, equal on all ranks.
    """

    def __init__(self, *placements: Any) -> None:
        self.placements = placements
        self.seen: list[Any] = []

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        self.seen.append(device_mesh)
        distribute_parameter(module, "weight", device_mesh, self.placements, src_data_rank=self.src_data_rank)
        distribute_parameter(module, "bias", device_mesh, [R, R], src_data_rank=self.src_data_rank)
        platform = device_mesh.platform
        platform.register_forward_pre_hook(
            module, lambda module, args: (DTensor.from_local(args[0], device_mesh, [R, R]),)
        )
        platform.register_forward_hook(
            module, lambda module, args, y: y.redistribute(placements=[R, R]).to_local(grad_placements=[R, R])
        )
        return module


class Inner(ParallelStyle):
    """Apply a style of the library along one dimension of the given mesh."""

    def __init__(self, style: Any) -> None:
        self.style = style

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        return self.style.apply(module, device_mesh["tp"])


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def on_two_dimensions(mesh: Any) -> None:
    """Check that a user-defined style gets the mesh unchanged, and that plain parameters get the first rank's
    values."""
    adapter, x = get_adapter(), floats(3, 6)
    plans: list[dict[str, Any]] = [
        {"up": Grid(first, second)} for first, second in itertools.product((S0, Shard(1), R), repeat=2)
    ]
    plans += [{"up": Inner(ColwiseParallel()), "down": Inner(RowwiseParallel())}]
    for plan, checked in [*zip(plans, itertools.cycle((False, True)), strict=False)]:
        single = adapter.load(adapter.Mlp(6, 5), np.random.default_rng(0))
        # A style along "tp" alone takes the values of the first rank along that.
        own = mesh["tp"].get_local_rank() if "down" in plan else mesh.get_rank()
        module = adapter.load(adapter.Mlp(6, 5), np.random.default_rng(own))
        with check_ranks(mesh) if checked else nullcontext():
            assert parallelize_module(module, mesh, plan) is module
            assert all(style.seen == [mesh] for style in plan.values() if isinstance(style, Grid))
            (y, grad_x, grads), (got_y, got_grad_x, got) = (
                adapter.model_value_and_grads(m, lambda x, m=m: twice(adapter.call(m, x), adapter), x)
                for m in (single, module)
            )
        same(adapter.numpy(got_y), adapter.numpy(y), f"output of {plan}")
        same(got_grad_x, grad_x, f"gradient of the input of {plan}")
        for name in grads:
            same(adapter.numpy(got[name]), adapter.numpy(grads[name]), f"gradient of {name} of {plan}")
    with pytest.raises(ValueError, match=r"ColwiseParallel on 'down' needs a 1-D mesh"):
        parallelize_module(adapter.Mlp(6, 5), mesh, {"up": Grid(S0, R), "down": ColwiseParallel()})


def twice(y: Any, adapter: Any) -> Any:
    return adapter.sum(adapter.square(y)), y


def test_own_style_on_two_dimensions(pool: Any) -> None:
    pool.run(4, on_two_dimensions)


@spmd.on_mesh()
def data_of_one_rank(mesh: Any) -> None:
    adapter, rank = get_adapter(), mesh.get_local_rank()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def values(seed: int) -> dict[str, np.ndarray]:
        return {
            name: adapter.numpy(p)
            for name, p in parameters(adapter.load(adapter.Mlp(6, 7), np.random.default_rng(seed))).items()
        }

    for source in range(mesh.size()):
        model = adapter.load(adapter.Mlp(6, 7), np.random.default_rng(rank))
        parallelize_module(model, mesh, plan, src_data_rank=source)
        for name, parameter in parameters(model).items():
            same(adapter.numpy(parameter), values(source)[name], f"{name} from rank {source}")
    model = adapter.load(adapter.Mlp(6, 7), np.random.default_rng(rank))
    with CommDebugMode() as comm:
        parallelize_module(model, mesh, plan, src_data_rank=None)
    assert comm.get_total_counts() == 0
    for name, parameter in parameters(model).items():
        same(
            adapter.numpy(parameter.to_local()),
            part(values(rank)[name], mesh, *parameter.placements),
            f"{name}, each rank's own",
        )
    # A style for the model itself takes the rank too.
    model = adapter.load(adapter.linear_module(6, 7), np.random.default_rng(rank))
    parallelize_module(model, mesh, ColwiseParallel(), src_data_rank=mesh.size() - 1)
    whole = adapter.load(adapter.linear_module(6, 7), np.random.default_rng(mesh.size() - 1))
    same(adapter.numpy(weight_of(model)), adapter.numpy(weight_of(whole)), "the root style's weight")


@on_ranks(1, 2, 3, 4)
def test_src_data_rank(pool: Any, world_size: int) -> None:
    pool.run(world_size, data_of_one_rank)


@spmd.on_mesh()
def patterns(mesh: Any) -> None:
    adapter = get_adapter()

    def placed(plan: Any) -> dict[str, Any]:
        model = adapter.Block(24, 36, 2)
        with mesh:
            assert parallelize_module(model, None, plan) is model
        return {
            name.rsplit(".", 1)[0]: p.placements[0] for name, p in parameters(model).items() if isinstance(p, DTensor)
        }

    column, row = ColwiseParallel(), RowwiseParallel()
    qkv = {f"attention.w{x}": S0 for x in "qkv"}
    assert placed({"attention.w[qkv]": column}) == qkv
    assert placed({"attention.w?": column}) == {**qkv, "attention.wo": S0}
    assert placed({"attention.*": column}) == {**qkv, "attention.wo": S0}
    assert placed({"*.w[qkv1]": column}) == {**qkv, "feed_forward.w1": S0}
    assert placed({"norm?": SequenceParallel()}) == {"norm1": R, "norm2": R}
    assert placed({"*.wo": row, "*.w2": row}) == {"attention.wo": S1, "feed_forward.w2": S1}
    with pytest.warns(UserWarning, match=r"'w\*'.*matches no module"):  # a star does not cross a dot
        assert placed({"w*": column}) == {}
    with pytest.warns(UserWarning, match=r"nearest paths are.*'attention\.wq'"):
        assert placed({"atention.wq": column}) == {}
    with pytest.warns(UserWarning, match="without a parallelize_plan"):
        assert placed(None) == {}
    with pytest.raises(ValueError, match="two styles"):
        placed({"attention.wq": column, "attention.w?": row})
    with pytest.raises((ValueError, RuntimeError), match="mesh"):
        parallelize_module(adapter.Block(24, 36, 2), None, {"attention.wq": column})


@on_ranks(1, 2)
def test_patterns_and_the_mesh_that_was_entered(pool: Any, world_size: int) -> None:
    pool.run(world_size, patterns)


# ---------------------------------------------------------------------- styles and arguments


def probe(mesh: Any, style: Any) -> Any:
    """Return a module that records the arguments of its calls."""
    module = get_adapter().Probe()
    assert style.apply(module, mesh) is module
    return module


@spmd.on_mesh()
def prepared_inputs(mesh: Any, rows: int) -> None:
    adapter = get_adapter()
    whole = floats(rows, 3)
    mine = adapter.tensor(part(whole, mesh, S0))
    even = rows % mesh.size() == 0

    def sharded() -> Any:
        return DTensor.from_local(mine, mesh, [S0], shape=whole.shape)

    # Positional: a None slot and inputs after the layouts stay as they are; a DTensor brings its own placement.
    style = PrepareModuleInput(input_layouts=(R, None), desired_input_layouts=(S0, None))
    module = probe(mesh, style)
    plain = adapter.tensor(floats(2, 2))
    adapter.call(module, adapter.tensor(whole), plain, plain, "word", key=plain)
    args, kwargs = module.seen
    assert args[0].placements == (S0,)
    same(adapter.numpy(args[0]), whole, "converted input")
    assert args[1] is plain
    assert args[2] is plain
    assert args[3] == "word"
    assert kwargs["key"] is plain
    adapter.call(module, sharded().redistribute(placements=[S1]), None)
    assert module.seen[0][0].placements == (S0,)
    same(adapter.numpy(module.seen[0][0]), whole, "input that was distributed already")

    # Keywords: only those listed are converted; one that is listed and not given is no error, nor is None.
    style = PrepareModuleInput(input_kwarg_layouts={"x": R, "y": R}, desired_input_kwarg_layouts={"x": S1, "y": R})
    module = probe(mesh, style)
    adapter.call(module, plain, x=adapter.tensor(whole), mask=plain)
    args, kwargs = module.seen
    assert args[0] is plain
    assert set(kwargs) == {"x", "mask"}
    assert kwargs["x"].placements == (S1,)
    same(adapter.numpy(kwargs["x"]), whole, "converted keyword")
    assert kwargs["mask"] is plain
    adapter.call(module, plain, y=None)
    assert module.seen[1] == {"y": None}

    # Both, with local tensors inside.
    style = PrepareModuleInput(
        input_layouts=(R,),
        desired_input_layouts=(S0,),
        input_kwarg_layouts={"x": R},
        desired_input_kwarg_layouts={"x": S1},
        use_local_output=True,
    )
    module = probe(mesh, style)
    adapter.call(module, adapter.tensor(whole), x=adapter.tensor(whole))
    args, kwargs = module.seen
    assert not isinstance(args[0], DTensor)
    same(adapter.numpy(args[0]), part(whole, mesh, S0), "local input")
    same(adapter.numpy(kwargs["x"]), part(whole, mesh, S1), "local keyword")

    # A plain input that is a part is gathered once.
    if even:
        module = probe(mesh, PrepareModuleInput(input_layouts=S0, desired_input_layouts=R))
        with CommDebugMode() as comm:
            adapter.call(module, mine)
        assert comm.get_comm_counts() == ({"all_gather": 1} if mesh.size() > 1 else {})
        same(adapter.numpy(module.seen[0][0].to_local()), whole, "gathered input")


@pytest.mark.parametrize("rows", in_gate([12, 5], [5]))
@on_ranks(1, 2, 3)
def test_prepare_module_input(pool: Any, world_size: int, rows: int) -> None:
    pool.run(world_size, prepared_inputs, rows)


@spmd.on_mesh()
def prepared_outputs(mesh: Any) -> None:
    adapter = get_adapter()
    whole = floats(12, 6)
    mine = adapter.tensor(part(whole, mesh, S0))

    # The first output is converted, the second stays, the third is None.
    module = probe(mesh, PrepareModuleOutput(output_layouts=(S0, None, R), desired_output_layouts=(R, None, S0)))
    plain = adapter.tensor(floats(2, 2))
    first, second, third = adapter.call(module, mine, plain, None)
    same(adapter.numpy(first), whole, "first output")
    assert not isinstance(first, DTensor)
    assert second is plain
    assert third is None
    with pytest.raises(ValueError, match="returned 2 output"):
        adapter.call(module, mine, plain)

    module = probe(
        mesh,
        PrepareModuleInputOutput(
            input_layouts=(S0, None),
            desired_input_layouts=(R, None),
            input_kwarg_layouts={"x": S0},
            desired_input_kwarg_layouts={"x": S1},
            output_layouts=(R, None),
            desired_output_layouts=(S1, None),
            use_local_output=False,
        ),
    )
    first, second = adapter.call(module, mine, plain, x=mine)
    args, kwargs = module.seen
    assert args[0].placements == (R,)
    assert kwargs["x"].placements == (S1,)
    same(adapter.numpy(kwargs["x"]), whole, "keyword of both")
    assert first.placements == (S1,)
    same(adapter.numpy(first), whole, "output of both")
    assert second is plain


@on_ranks(1, 2, 3, 4)
def test_prepare_module_output(pool: Any, world_size: int) -> None:
    pool.run(world_size, prepared_outputs)


@spmd.on_mesh()
def further_arguments(mesh: Any, kind: str) -> None:
    """Check a module with another positional and another keyword argument.

    Its first input is passed by position or keyword.
    """
    adapter = get_adapter()
    style, takes, gives = {
        "column": (ColwiseParallel(), R, S1),
        "row": (RowwiseParallel(), S1, R),
        "sequence": (SequenceParallel(sequence_dim=0, use_local_output=True), S0, S0),
    }[kind]
    whole = floats(12, 12)
    single, sharded = (adapter.load(adapter.Scaled(12, 24), np.random.default_rng(5)) for _ in range(2))
    parallelize_module(sharded, mesh, {"": style})

    def loss_of(module: Any) -> Any:
        def loss(x: Any) -> Any:
            y = adapter.call(module, x, 2.5, shift=0.5)
            return adapter.sum(y if kind == "sequence" else adapter.square(y)), y

        return loss

    wanted, wanted_grad, _ = adapter.model_value_and_grads(single, loss_of(single), whole)
    got, grad, _ = adapter.model_value_and_grads(sharded, loss_of(sharded), part(whole, mesh, takes))
    same(adapter.numpy(got), part(adapter.numpy(wanted), mesh, gives), "output")
    same(grad, part(wanted_grad, mesh, takes), "gradient of the input")
    x = adapter.tensor(part(whole, mesh, takes))
    same(adapter.numpy(adapter.call(sharded, x=x, scale=2.5, shift=0.5)), adapter.numpy(got), "first input by keyword")


@pytest.mark.parametrize("kind", ["column", "row", "sequence"])
@on_ranks(1, 2, 3)
def test_styles_pass_further_arguments_through(pool: Any, world_size: int, kind: str) -> None:
    pool.run(world_size, further_arguments, kind)


@spmd.on_mesh()
def distributed_inputs(mesh: Any) -> None:
    """Check that a distributed input is redistributed from any placement to the placement that the style needs."""
    adapter = get_adapter()
    whole = floats(5, 7)
    for style in (ColwiseParallel(), RowwiseParallel()):
        single, sharded = (adapter.load(adapter.linear_module(7, 6), np.random.default_rng(5)) for _ in range(2))
        parallelize_module(sharded, mesh, style)
        wanted = adapter.numpy(adapter.call(single, adapter.tensor(whole)))
        gives = S1 if isinstance(style, ColwiseParallel) else R
        for placement in (R, S0, S1, P):
            x = distribute_tensor(adapter.tensor(whole), mesh, [placement])
            same(adapter.numpy(adapter.call(sharded, x)), part(wanted, mesh, gives), f"{style} given {placement}")


@on_ranks(1, 2, 3, 4)
def test_inputs_that_are_distributed_already(pool: Any, world_size: int) -> None:
    pool.run(world_size, distributed_inputs)


def test_reprs() -> None:
    prepare_input = PrepareModuleInput(
        input_layouts=(Shard(1), None),
        desired_input_layouts=(Replicate(), None),
        input_kwarg_layouts={"mask": Replicate()},
        desired_input_kwarg_layouts={"mask": Shard(0)},
        use_local_output=True,
    )
    prepare_output = PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=(Replicate(),))
    styles = [
        ColwiseParallel(),
        ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate(), use_local_output=False),
        RowwiseParallel(output_layouts=Shard(1)),
        SequenceParallel(sequence_dim=2, use_local_output=True),
        prepare_input,
        prepare_output,
    ]
    for style in styles:
        # The repr is the call that makes the style.
        again = eval(repr(style))
        assert type(again) is type(style)
        assert vars(again) == vars(style)
    both = PrepareModuleInputOutput(
        input_layouts=Shard(1),
        desired_input_layouts=Replicate(),
        output_layouts=Shard(-1),
        desired_output_layouts=Replicate(),
    )
    again = eval(repr(both))
    assert repr(again) == repr(both)
    assert vars(again.prepare_module_input) == vars(both.prepare_module_input)
    assert vars(again.prepare_module_output) == vars(both.prepare_module_output) == vars(prepare_output)
    assert repr(ColwiseParallel()) == (
        "ColwiseParallel(input_layouts=(Replicate(),), output_layouts=(Shard(dim=-1),), use_local_output=True)"
    )
