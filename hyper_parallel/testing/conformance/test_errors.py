"""Wrong calls raise an error that names the mistake, on every rank and before any communication. Nothing hangs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    HeadNormParallel,
    NoParallel,
    PackedShard,
    Partial,
    PrepareModuleInput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
    strict,
)
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.extent import on_ranks


def fails(kind: type[Exception], *words: str) -> Any:
    """Context manager whose block must raise ``kind`` with all ``words`` in its message, and communicate nothing."""
    return _Fails(kind, words)


class _Fails:
    def __init__(self, kind: type[Exception], words: tuple[str, ...]) -> None:
        self.kind, self.words, self.comm = kind, words, CommDebugMode()

    def __enter__(self) -> None:
        self.comm.__enter__()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        self.comm.__exit__()
        assert error is not None, f"no {self.kind.__name__} was raised"
        if not isinstance(error, self.kind):
            return False
        missing = [word for word in self.words if word not in str(error)]
        assert not missing, f"{missing} not in {error}"
        assert self.comm.get_total_counts() == 0, "communicated before it failed"
        return True


def floats(*shape: int) -> Any:
    return get_adapter().tensor(np.zeros(shape, np.float32))


@spmd.on_mesh()
def wrong_plans(mesh: Any) -> None:
    adapter = get_adapter()

    def model() -> Any:
        return adapter.load(adapter.Mlp(4, 8), np.random.default_rng(0))

    with fails(ValueError, "ups", "'up'"), strict():
        parallelize_module(model(), mesh, {"ups": ColwiseParallel()})
    with pytest.warns(UserWarning, match="'ups' matches no module.*'up'"):
        parallelize_module(model(), mesh, {"ups": ColwiseParallel()})
    with pytest.warns(UserWarning, match="matches no module"):
        # A path never matches by its last segment.
        parallelize_module(model(), mesh, {"block.up": ColwiseParallel()})
    with pytest.warns(UserWarning, match=r"'up0' matches no module(.|\n)*'up19' matches(.|\n)*and 5 more"):
        parallelize_module(model(), mesh, {f"up{i}": ColwiseParallel() for i in range(25)})
    with fails(ValueError, "ColwiseParallel", "linear and embedding", "Mlp"):
        parallelize_module(model(), mesh, ColwiseParallel())
    with fails(ValueError, "'up'", "two styles"):
        parallelize_module(model(), mesh, {"up": ColwiseParallel(), "u*": RowwiseParallel()})
    with fails(TypeError, "'up'", "ParallelStyle"):
        parallelize_module(model(), mesh, {"up": ColwiseParallel})
    with fails(ValueError, "'up'", "'wise'", "'rowwise'", "'colwise'"):
        parallelize_module(model(), mesh, {"up": "wise"})
    with fails(TypeError, "parallelize_plan"):
        parallelize_module(model(), mesh, [ColwiseParallel()])
    with fails(ValueError, "src_data_rank=9"):
        parallelize_module(model(), mesh, {"up": ColwiseParallel()}, src_data_rank=9)
    with fails(TypeError, "src_data_rank", "'0'"):
        parallelize_module(model(), mesh, {"up": ColwiseParallel()}, src_data_rank="0")
    with fails(TypeError, "parallelize_module", "platform", "str"):
        parallelize_module("model", mesh, ColwiseParallel())
    with fails(TypeError, "parallelize_module", "DeviceMesh", "str"):
        parallelize_module(model(), "tp", ColwiseParallel())
    with fails(TypeError, "ColwiseParallel.apply", "DeviceMesh", "str"):
        ColwiseParallel().apply(model().up, "tp")
    with fails(ValueError, "parallelize_module", "device_mesh"):
        parallelize_module(model(), None, {"up": ColwiseParallel()})
    with pytest.warns(UserWarning, match="without a parallelize_plan"):
        parallelize_module(model(), mesh)

    tied = adapter.load(adapter.Tied(8, 4), np.random.default_rng(0))
    with fails(ValueError, "'embedding' and 'head' share", "Shard(dim=1)", "Shard(dim=0)"):
        parallelize_module(tied, mesh, {"embedding": ColwiseParallel(), "head": ColwiseParallel()})
    with fails(ValueError, "'head' shares its parameter 'weight' with 'embedding'", "[Shard(dim=0)]", "no style"):
        parallelize_module(tied, mesh, {"embedding": RowwiseParallel(input_layouts=Replicate())})
    # A plan for one side only can still be applied to that side itself.
    parallelize_module(tied.embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
    with fails(ValueError, "of 'head' is placed [Shard(dim=0)] already", "RowwiseParallel"):
        parallelize_module(tied, mesh, {"head": RowwiseParallel()})

    # All or nothing: the first entry is fine and must not have been applied.
    untouched = model()
    with fails(ValueError, "'Mlp' is a Mlp"):
        parallelize_module(untouched, mesh, {"up": ColwiseParallel(), "": RowwiseParallel()})
    assert not isinstance(untouched.up.weight, DTensor)

    twice = parallelize_module(model(), mesh, {"up": ColwiseParallel()})
    with fails(ValueError, "'up'", "already"):
        parallelize_module(twice, mesh, {"up": ColwiseParallel()})


@spmd.on_mesh()
def wrong_layouts(mesh: Any) -> None:
    with fails(ValueError, "input_layouts has 2", "desired_input_layouts has 1"):
        PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(),))
    with fails(ValueError, "output_layouts has 1", "desired_output_layouts has 2"):
        PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=(Replicate(), None))
    with fails(ValueError, "input_kwarg_layouts", "mask", "x"):
        PrepareModuleInput(input_kwarg_layouts={"x": Shard(0)}, desired_input_kwarg_layouts={"mask": Shard(0)})
    with fails(TypeError, "ColwiseParallel(input_layouts=...)", "'rows'"):
        ColwiseParallel(input_layouts="rows")
    with fails(TypeError, "PrepareModuleInput(input_kwarg_layouts=...)", "dict", "[Shard(dim=0)]"):
        PrepareModuleInput(input_kwarg_layouts=[Shard(0)], desired_input_kwarg_layouts=[Shard(0)])
    with fails(TypeError, "PrepareModuleInput(desired_input_kwarg_layouts=...)", "'rows'"):
        PrepareModuleInput(input_kwarg_layouts={"x": Shard(0)}, desired_input_kwarg_layouts={"x": "rows"})
    for style in (ColwiseParallel, RowwiseParallel, SequenceParallel, HeadNormParallel, NoParallel):
        with fails(TypeError, f"{style.__name__}(use_local_output=...)", "True or False", "'no'"):
            style(use_local_output="no")
    with fails(TypeError, "SequenceParallel(sequence_dim=...)", "'1'"):
        SequenceParallel(sequence_dim="1")
    with fails(ValueError, "RowwiseParallel(output_layouts=...)", "one placement"):
        RowwiseParallel(output_layouts=(Shard(0), Shard(1)))
    with fails(ValueError, "Partial(reduce_op)", "'bogus'"):
        Partial("bogus")
    with fails(TypeError, "Shard(dim)", "'0'"):
        Shard("0")

    x = floats(4, 6)
    with fails(ValueError, "Shard(dim=5)", "2 dimension(s)", "mesh dimension 0"):
        DTensor.from_local(x, mesh, [Shard(5)])
    with fails(ValueError, "Shard(dim=-3)", "out of range"):
        distribute_tensor(x, mesh, [Shard(-3)])
    with fails(ValueError, "needs 1 placement(s), got 2"):
        distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    with fails(TypeError, "write [Shard(dim=0)]"):
        distribute_tensor(x, mesh, Shard(0))
    with fails(TypeError, "must be Shard(dim), Replicate() or Partial()"):
        distribute_tensor(x, mesh, [0])
    with fails(ValueError, "cannot redistribute Replicate() to Partial(sum)"):
        distribute_tensor(x, mesh, [Replicate()], src_data_rank=None).redistribute(placements=[Partial()])
    with fails(ValueError, "global shape (5, 6)", "got (4, 6)"):
        DTensor.from_local(x, mesh, [Replicate()], shape=(5, 6))
    with fails(TypeError, "plain tensor"):
        DTensor.from_local(DTensor.from_local(x, mesh), mesh)

    probe = parallelize_module(
        get_adapter().Probe(),
        mesh,
        PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None)),
    )
    with fails(ValueError, "Probe", "1 positional input(s)", "2 input_layouts"):
        get_adapter().call(probe, x)
    with fails(TypeError, "input 0 of Probe", "must be a tensor, got str"):
        get_adapter().call(probe, "x", x)

    parts = PackedShard(1, (2, 2))
    packed = PrepareModuleInput(input_layouts=(Replicate(), None), desired_input_layouts=(parts, None))
    with fails(ValueError, "input 0 of Probe", "cannot be placed as the plan says", "(2, 2)", "6"):
        get_adapter().call(parallelize_module(get_adapter().Probe(), mesh, packed), x, x)


@spmd.on_mesh()
def wrong_calls(mesh: Any) -> None:
    """Check that messages name the module by its path in the plan."""
    adapter, x = get_adapter(), floats(4, 6)

    def model(**styles: Any) -> Any:
        made = adapter.load(adapter.Mlp(6, 12), np.random.default_rng(0))
        return parallelize_module(made, mesh, styles, src_data_rank=None)

    path = "the input of Dense 'up'" if "Dense" in type(model().up).__name__ else "the input of Linear 'up'"
    with fails(ValueError, path, "(4, 6)", "Shard(dim=3)", "dimension(s)"):
        adapter.call(model(up=ColwiseParallel(input_layouts=Shard(3))), x)
    with fails(ValueError, "the output of", "'up'", "Shard(dim=2)", "dimension(s)"):
        adapter.call(model(up=ColwiseParallel(output_layouts=Shard(2))), x)
    with fails(TypeError, path, "must be a tensor, got str"):
        adapter.call(model(up=ColwiseParallel()), "x")
    with fails(
        ValueError, "'down'", "has 13 features", f"takes {12 // mesh.size()} of the 12 features", "input_layouts"
    ):
        adapter.call(model(down=RowwiseParallel()).down, floats(4, 13))
    with fails(ValueError, "'up' was called without inputs"):
        adapter.call(model(up=ColwiseParallel()).up)


class Stop(Exception):
    """Exception that a model may raise to end a computation early."""


def _stopping(cls: Any) -> Any:
    """Return a subclass of ``cls`` whose forward raises `Stop` if its attribute ``stops`` is set."""
    entry = "construct" if "construct" in vars(cls) else "forward"
    original = vars(cls)[entry]

    def run(self: Any, x: Any) -> Any:
        if self.stops:
            raise Stop
        return original(self, x)

    return type("StoppingNorm", (cls,), {entry: run, "stops": False})


@spmd.on_mesh()
def own_exception(mesh: Any) -> None:
    """Check that a user's exception is unchanged, and that the module works afterwards."""
    adapter, x = get_adapter(), floats(2, 4 * mesh.size(), 6)
    stopping = _stopping(type(adapter.RmsNorm(6)))
    mesh.platform.register_norm_module(stopping)
    norm = adapter.load(stopping(6), np.random.default_rng(0))
    wanted = adapter.numpy(adapter.call(norm, x))
    parallelize_module(norm, mesh, SequenceParallel())
    given = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(1)])
    for stops in (True, False, True, False):
        norm.stops = stops
        if stops:
            with pytest.raises(Stop):
                adapter.call(norm, given)
        else:
            np.testing.assert_allclose(
                adapter.numpy(adapter.call(norm, given).full_tensor()), wanted, rtol=1e-5, atol=1e-6
            )


@spmd.on_mesh()
def mixed_tensors(mesh: Any) -> None:
    x = floats(4, 6)
    distributed = DTensor.from_local(x, mesh, [Shard(0)])
    for mix in (lambda: distributed + x, lambda: x + distributed, lambda: x * distributed):
        with fails(ValueError, "plain tensor", "(4, 6)", "DTensor", "implicit_replication"):
            mix()


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def wrong_meshes(mesh: Any) -> None:
    adapter = get_adapter()
    with fails(ValueError, "1-D mesh", "(2, 2)", "mesh['tp']"):
        parallelize_module(adapter.Mlp(4, 8), mesh, {"up": ColwiseParallel()})
    with fails(KeyError, "'pp'", "'dp', 'tp'"):
        mesh["pp"]
    with fails(ValueError, "2 dimensions", "get_local_rank"):
        mesh.get_local_rank()
    with fails(ValueError, "abacus"):
        init_device_mesh("abacus", (4,))
    with fails(ValueError, "needs 5 ranks", "the world has 4"):
        init_device_mesh(None, (5,))
    with fails(ValueError, "mesh_dim_names"):
        init_device_mesh(None, (2, 2), mesh_dim_names=("a",))
    with fails(ValueError, "differ"):
        init_device_mesh(None, (2, 2), mesh_dim_names=("a", "a"))
    other = mesh["tp"]
    x, y = DTensor.from_local(floats(2), mesh), DTensor.from_local(floats(2), other)
    with fails(ValueError, "different meshes"):
        x + y


@on_ranks(1, 2, 4)
@pytest.mark.parametrize(
    "job", [wrong_plans, wrong_layouts, wrong_calls, own_exception, mixed_tensors], ids=lambda job: job.__name__
)
def test_wrong_use(pool: Any, world_size: int, job: Any) -> None:
    pool.run(world_size, job)


def test_wrong_mesh(pool: Any) -> None:
    pool.run(4, wrong_meshes)
