"""torch.distributed.checkpoint: shards are saved, loaded and cut anew, whole state dicts gathered and loaded."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    PackedShard,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    StridedShard,
    distribute_tensor,
    fully_shard,
    parallelize_module,
)
from hyper_parallel.testing.spmd import device_mesh, on_mesh
from hyper_parallel.torch import from_torch_dtensor, to_torch_dtensor
from tests.torch.support import close, device, full


def make_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.Linear(6, 5), torch.nn.GELU(), torch.nn.Linear(5, 6)).to(
        device()
    )


def batch() -> torch.Tensor:
    return torch.arange(12.0).reshape(2, 6).to(device())


def trained(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(batch()).square().mean().backward()
    optimizer.step()
    return model, optimizer


def parallel(mesh: Any, seed: int = 0) -> torch.nn.Module:
    model = parallelize_module(make_model(seed), mesh if mesh.ndim == 1 else mesh["tp"], plan())
    return model if mesh.ndim == 1 else fully_shard(model, mesh=mesh["dp"])


def plan() -> dict[str, Any]:
    return {"1": ColwiseParallel(), "3": RowwiseParallel()}


def same(got: Any, wanted: Any, what: str = "") -> None:
    """Plain tensors, whole, in the same places."""
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for name in wanted:
            same(got[name], wanted[name], f"{what}.{name}")
    elif isinstance(wanted, torch.Tensor):
        assert not isinstance(got, DTensor)
        close(got, wanted, what)
    else:
        assert got == wanted, what


def equal(got: Any, wanted: Any, what: str) -> None:
    """The same bits, whole."""
    got, wanted = full(got), full(wanted)
    assert got.dtype is wanted.dtype and got.shape == wanted.shape and torch.equal(got, wanted), what


def mesh_of(shape: tuple[int, ...]) -> Any:
    return device_mesh(*shape, names=("tp",) if len(shape) == 1 else ("dp", "tp"))


def group_of(mesh: Any) -> Any:
    """The group that the planners of torch take for all ranks: None is the world."""
    return mesh.get_group() if mesh.ndim == 1 else None


# ---------------------------------------------------------------------- shards, from any placement to any other
#: name -> (tensor, placements on one dimension, placements on two).
PLACED: dict[str, tuple[Any, Any, Any]] = {
    "rows": (torch.arange(35.0).reshape(7, 5), [Shard(0)], [Shard(0), Shard(1)]),
    "columns": (torch.arange(14).reshape(2, 7), [Shard(1)], [Replicate(), Shard(1)]),
    "strided": (torch.arange(21.0).reshape(7, 3), [Shard(0)], [StridedShard(0, split_factor=2), Shard(0)]),
    "packed": (torch.arange(40.0).reshape(10, 4), [PackedShard(0, (6, 4))], [Shard(1), PackedShard(0, (6, 4))]),
    "packed and cut": (
        torch.arange(39.0).reshape(13, 3),
        [PackedShard(0, (6, 7))],
        [StridedShard(0, split_factor=2), PackedShard(0, (6, 7))],
    ),
    "one row": (torch.arange(3.0).reshape(1, 3).bfloat16(), [Shard(0)], [Shard(0), Shard(0)]),
    "whole": (torch.arange(3.0), [Replicate()], [Replicate(), Replicate()]),
    "number": (torch.tensor(7), [Replicate()], [Replicate(), Replicate()]),
    "nothing": (torch.zeros(0, 3), [Shard(0)], [Shard(1), Shard(0)]),
}


def placed(mesh: Any, values: bool, other: bool = False) -> dict[str, Any]:
    """The tensors of `PLACED`, or zeros; ``other``: each with the placements of the next."""
    found: dict[str, Any] = {"step": 3 if values else 0}
    for name, (x, *choices) in PLACED.items():
        placements = choices[mesh.ndim - 1]
        if other and x.ndim == 2:
            placements = [Replicate()] * (mesh.ndim - 1) + [Shard(1)]
        x = (x if values else torch.zeros_like(x)).to(device())
        found[name] = distribute_tensor(x, mesh, placements)
    return found


def save_placed(shape: tuple[int, ...], folder: str, how: str) -> None:
    import torch.distributed.checkpoint as dcp

    mesh = mesh_of(shape)
    if mesh is None:
        return
    state = placed(mesh, values=True)
    if how == "save":
        dcp.save(state, checkpoint_id=folder, process_group=group_of(mesh))
        return
    if "cpu:" not in dist.get_backend_config():  # torch's own, before anything else
        with pytest.raises(AssertionError, match="A CPU backend must be enabled for async save"):
            dcp.async_save(state, checkpoint_id=folder)
        dcp.save(state, checkpoint_id=folder)
        return
    under_way: Any = dcp.async_save(state, checkpoint_id=folder, process_group=group_of(mesh))
    for x in state.values():
        if isinstance(x, DTensor):
            x.zero_()  # the staged values differ from those of the program
    under_way.result()


def load_placed(shape: tuple[int, ...], folder: str, other: bool) -> None:
    import torch.distributed.checkpoint as dcp

    mesh = mesh_of(shape)
    if mesh is None:
        return
    state = placed(mesh, values=False, other=other)
    before = dict(state)
    dcp.load(state, checkpoint_id=folder, process_group=group_of(mesh))
    assert state["step"] == 3
    for name, (x, *_) in PLACED.items():
        assert state[name] is before[name], name
        equal(state[name], x.to(device()), name)


@pytest.mark.parametrize(
    ("saved", "loaded", "how"),
    [((4,), (2, 2), "save"), ((2, 2), (2,), "save"), ((3,), (4,), "save"), ((2, 2), (4,), "async_save")],
)
def test_shards(pool: Any, tmp_path: Path, saved: tuple, loaded: tuple, how: str) -> None:
    folder = str(tmp_path / "checkpoint")
    pool.run(4, save_placed, saved, folder, how)
    for other in (False, True):
        pool.run(4, load_placed, loaded, folder, other)


# ---------------------------------------------------------------------- the same names here
def test_names_and_keywords() -> None:
    """`hyper_parallel.checkpoint.distributed` and ``.state_dict`` take the arguments that the installed torch takes.
    The page about checkpoints of others lists the missing names."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as theirs

    from hyper_parallel.checkpoint import distributed
    from hyper_parallel.checkpoint import state_dict as ours

    page = (Path(__file__).parents[2] / "docs" / "checkpoint_interop.md").read_text()
    for module, here in ((theirs, ours), (dcp, distributed)):
        names = [n for n in getattr(module, "__all__", vars(module)) if not n.startswith("_")]
        found = [n for n in names if hasattr(here, n)]
        assert len(found) >= 4
        for name in found:
            value, mine = getattr(module, name), getattr(here, name)
            if not callable(value) or (isinstance(value, type) and issubclass(value, BaseException)):
                continue
            wanted, got = (inspect.signature(x).parameters for x in (value, mine))
            assert [*got] == [*wanted], name
            for key in wanted:
                if key != "async_checkpointer_type":  # torch's own enumeration, here None
                    assert got[key].default == wanted[key].default, (name, key)
        lost = [
            n for n in names if n not in found and not inspect.ismodule(getattr(module, n)) and f"`{n}`" not in page
        ]
        assert lost == [], "explain these in docs/checkpoint_interop.md"


# ---------------------------------------------------------------------- torch's own DTensors
@on_mesh(2, 2, names=("dp", "tp"))
def exchanged(mesh: Any, folder: str, ours_saved: bool) -> None:
    """Each library loads the DTensors that the other has saved."""
    import torch.distributed.checkpoint as dcp

    def state(values: bool, ours: bool, flip: bool) -> dict[str, Any]:
        found = {}
        for name in ("rows", "columns", "strided", "whole"):
            x, _, placements = PLACED[name]
            if flip:
                placements = placements[:: 1 if any(isinstance(p, StridedShard) for p in placements) else -1]
            y = distribute_tensor((x if values else torch.zeros_like(x)).to(device()), mesh, placements)
            found[name] = y if ours else to_torch_dtensor(y)
        return found

    dcp.save(state(True, ours_saved, False), checkpoint_id=folder)
    loaded = state(False, not ours_saved, True)
    dcp.load(loaded, checkpoint_id=folder)
    for name, x in loaded.items():
        equal(from_torch_dtensor(x) if ours_saved else x, PLACED[name][0].to(device()), name)


@pytest.mark.parametrize("ours_saved", [True, False])
def test_with_native_dtensors(pool: Any, tmp_path: Path, ours_saved: bool) -> None:
    pool.run(4, exchanged, str(tmp_path / "checkpoint"), ours_saved)


# ---------------------------------------------------------------------- a training job
def job_state(mesh: Any, seed: int) -> tuple[Any, Any, dict[str, Any]]:
    from torch.distributed.checkpoint import state_dict as helpers

    model, optimizer = trained(parallel(mesh, seed))
    of_model, of_optimizer = helpers.get_state_dict(model, optimizer)
    return model, optimizer, {"model": of_model, "optimizer": of_optimizer}


def save_job(shape: tuple[int, ...], folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    mesh = mesh_of(shape)
    if mesh is not None:
        dcp.save(job_state(mesh, 0)[2], checkpoint_id=folder, process_group=group_of(mesh))


def load_job(shape: tuple[int, ...], folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as helpers

    mesh = mesh_of(shape)
    if mesh is None:
        return
    model, optimizer, state = job_state(mesh, 1)
    dcp.load(state, checkpoint_id=folder, process_group=group_of(mesh))
    helpers.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    whole, its_optimizer = trained(make_model(0))
    for _ in range(2):
        for m, o in ((whole, its_optimizer), (model, optimizer)):
            o.zero_grad()
            m(batch()).square().mean().backward()
            o.step()
    for name, p in model.state_dict().items():
        close(p, whole.state_dict()[name], name)


@pytest.mark.parametrize(("saved", "loaded"), [((2,), (2, 2)), ((2, 2), (4,))])
def test_training_goes_on(pool: Any, tmp_path: Path, saved: tuple, loaded: tuple) -> None:
    """Training goes on with `fully_shard` on two dimensions."""
    folder = str(tmp_path / "checkpoint")
    pool.run(4, save_job, saved, folder)
    pool.run(4, load_job, loaded, folder)


# ---------------------------------------------------------------------- the Hugging Face writer and reader
FLOATS = ("rows", "packed", "packed and cut", "one row", "whole")


def write_huggingface(shape: tuple[int, ...], folder: str, consolidated: bool) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    mesh = mesh_of(shape)
    if mesh is None:
        return
    state = {name: x for name, x in placed(mesh, values=True).items() if name in FLOATS}
    files = {name: 1 + i % 2 for i, name in enumerate(FLOATS)} if consolidated else None
    writer = HuggingFaceStorageWriter(folder, files, save_distributed=True, enable_consolidation=consolidated)
    dcp.save(state, storage_writer=writer, process_group=group_of(mesh))


def read_huggingface(shape: tuple[int, ...], folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    mesh = mesh_of(shape)
    if mesh is None:
        return
    state = {name: x for name, x in placed(mesh, values=False, other=True).items() if name in FLOATS}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder), process_group=group_of(mesh))
    for name, x in state.items():
        equal(x, PLACED[name][0].to(device()), name)


@pytest.mark.parametrize("consolidated", [True, False])
def test_huggingface_files(pool: Any, tmp_path: Path, consolidated: bool) -> None:
    from safetensors.torch import load_file

    folder = tmp_path / "checkpoint"
    pool.run(4, write_huggingface, (2, 2), str(folder), consolidated)
    if consolidated:
        files = sorted(folder.glob("*.safetensors"))
        assert len(files) == 2
        found = {name: x for file in files for name, x in load_file(file).items()}
        assert found.keys() == set(FLOATS)
        for name, x in found.items():
            equal(x, PLACED[name][0], name)
    for shape in ((2,), (2, 2)):
        pool.run(4, read_huggingface, shape, str(folder))


@on_mesh(2)
def one_file_of_parts(mesh: Any, folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    state = {"rows": placed(mesh, values=True)["rows"]}
    with pytest.raises(
        BaseException, match=r"'rows' of shape \(7, 5\) is sharded: pass save_distributed=True to the writer"
    ):
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder), process_group=mesh.get_group())


@on_mesh(2)
def sums(mesh: Any, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"sum": DTensor.from_local(torch.ones(2, device=device()), mesh, [Partial()])}
    with pytest.raises(BaseException, match="a partial tensor: redistribute it"):
        dcp.save(state, checkpoint_id=folder, process_group=mesh.get_group())


@pytest.mark.parametrize("job", [one_file_of_parts, sums], ids=lambda job: job.__name__)
def test_refusals(pool: Any, tmp_path: Path, job: Any) -> None:
    pool.run(2, job, str(tmp_path / "checkpoint"))


@on_mesh(2)
def misplaced(mesh: Any) -> None:
    """A request of another library's planner."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    x = placed(mesh, values=True)["rows"]
    start = 4 * mesh.get_local_rank()
    assert torch.equal(x.__get_tensor_shard__(MetadataIndex("rows")), x.to_local())
    assert x.__get_tensor_shard__(MetadataIndex("rows", torch.Size([start, 0]))).data_ptr() == x.to_local().data_ptr()
    with pytest.raises(ValueError, match=r"no shard of 'rows' at offset torch.Size\(\[1, 0\]\)"):
        x.__get_tensor_shard__(MetadataIndex("rows", torch.Size([1, 0])))


def test_parts_that_are_elsewhere(pool: Any) -> None:
    pool.run(2, misplaced)


# ---------------------------------------------------------------------- whole state dicts
@on_mesh(2)
def whole_state_dicts(mesh: Any, offload: bool) -> None:
    from torch.distributed.checkpoint import state_dict as helpers

    options = helpers.StateDictOptions(full_state_dict=True, cpu_offload=offload)
    wanted = helpers.get_state_dict(*trained(make_model()), options=options)
    got = helpers.get_state_dict(*trained(parallel(mesh)), options=options)
    if offload and dist.get_rank():
        assert got == ({}, {})
    else:
        same(got[0], wanted[0])
        same(got[1], wanted[1])


@pytest.mark.parametrize("offload", [False, True])
def test_whole_state_dicts(pool: Any, offload: bool) -> None:
    pool.run(2, whole_state_dicts, offload)


@on_mesh(4)
def loaded(mesh: Any, from_first: bool) -> None:
    from torch.distributed.checkpoint import state_dict as helpers

    whole = helpers.get_state_dict(*trained(make_model()), options=helpers.StateDictOptions(full_state_dict=True))
    options = helpers.StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first)
    model, optimizer = trained(parallel(mesh, seed=1))
    states: Any = whole if dist.get_rank() == 0 or not from_first else ({}, {})
    helpers.set_model_state_dict(model, dict(states[0]), options=options)
    helpers.set_optimizer_state_dict(model, optimizer, dict(states[1]), options=options)
    for name, p in model.state_dict().items():
        close(p, whole[0][name], name)
    for name, wanted in whole[1]["state"].items():
        for key, value in optimizer.state[model.get_parameter(name)].items():
            close(value, wanted[key], f"{name} {key}")


@pytest.mark.parametrize("from_first", [False, True])
def test_whole_state_dicts_are_loaded(pool: Any, from_first: bool) -> None:
    pool.run(4, loaded, from_first)


@on_mesh(2)
def offloaded(mesh: Any) -> None:
    from torch.distributed.checkpoint import state_dict as helpers

    model, optimizer = trained(parallel(mesh))
    options = helpers.StateDictOptions(cpu_offload=True)
    states = helpers.get_state_dict(model, optimizer, options=options)
    for name, p in model.state_dict().items():
        x = states[0][name]
        assert x.device.type == "cpu" and type(x) is type(p)
        assert getattr(x, "placements", None) == getattr(p, "placements", None)
    moment: Any = states[1]["state"]["1.weight"]["exp_avg"]
    assert moment.device.type == "cpu" and moment.placements == (Shard(0),)


def test_shards_on_the_host(pool: Any) -> None:
    pool.run(2, offloaded)


@on_mesh(2)
def nested(mesh: Any) -> None:
    """Lists and tuples of them, and entries that are no tensors."""
    from torch.distributed._state_dict_utils import _gather_state_dict

    x = distribute_tensor(torch.arange(3.0), mesh, [Shard(0)])
    got: Any = _gather_state_dict({"list": [x, (x, 1)], "text": "a"})
    assert got["list"][0].tolist() == got["list"][1][0].tolist() == [0, 1, 2] and got["text"] == "a"


def test_nested_entries(pool: Any) -> None:
    pool.run(2, nested)


# ---------------------------------------------------------------------- load_state_dict(assign=True)
@on_mesh(2)
def assigned(mesh: Any, of: str, meta: bool) -> None:
    """Whole tensors, DTensors of other placements, and torch's own, into a module with values and one on meta."""
    wanted, model = make_model(0), make_model(1)
    if meta:
        model = model.to("meta")
    model = parallelize_module(model, mesh, plan())
    state: dict[str, Any] = dict(wanted.state_dict())
    if of != "whole":
        for name in ("1.weight", "3.weight"):
            state[name] = distribute_tensor(state[name], mesh, [Replicate()])
    if of == "native":
        state["1.weight"] = to_torch_dtensor(state["1.weight"])
    placements = {name: p.placements for name, p in model.named_parameters() if isinstance(p, DTensor)}
    frozen = model.get_parameter("3.weight").requires_grad_(False)
    model.load_state_dict(state, assign=True)
    for name, p in model.named_parameters():
        equal(p, wanted.get_parameter(name), name)
        assert isinstance(p, torch.nn.Parameter) and p.requires_grad == (name != "3.weight"), name
        assert getattr(p, "placements", None) == placements.get(name), name
    assert model.get_parameter("3.weight") is not frozen
    close(model(batch()), wanted(batch()))
    model(batch()).sum().backward()
    assert model.get_parameter("1.weight").grad.placements == (Shard(0),)


@pytest.mark.parametrize(("of", "meta"), [("whole", False), ("whole", True), ("others", True), ("native", False)])
def test_assigned_tensors(pool: Any, of: str, meta: bool) -> None:
    pool.run(2, assigned, of, meta)


@on_mesh(2, 2, names=("dp", "tp"))
def assigned_to_units(mesh: Any, folder: str) -> None:
    """Parameters of `fully_shard`; a state that was saved by each rank for itself is one, too."""
    file = Path(folder) / f"{dist.get_rank()}.pt"
    wanted, model = make_model(0), parallel(mesh, 1)
    model.load_state_dict(wanted.state_dict(), assign=True)
    torch.save(model.state_dict(), file)
    again = parallel(mesh, 2)
    again.load_state_dict(torch.load(file, weights_only=True), assign=True)
    for m in (model, again):
        single = copy.deepcopy(wanted)
        optimizers = [torch.optim.AdamW(x.parameters(), lr=0.1) for x in (m, single)]
        for _ in range(2):
            for x, optimizer in zip((m, single), optimizers, strict=True):
                optimizer.zero_grad()
                x(batch()).square().mean().backward()
                optimizer.step()
        for name, p in m.named_parameters():
            close(p, single.get_parameter(name), name)


def test_assigned_to_units(pool: Any, tmp_path: Path) -> None:
    pool.run(4, assigned_to_units, str(tmp_path))


def assigned_from_elsewhere() -> None:
    first, whole = device_mesh(2), device_mesh(4)
    if first is None:
        return
    model = parallelize_module(make_model(), first, plan())
    state = parallelize_module(make_model(), whole, plan(), src_data_rank=None).state_dict()
    with pytest.raises(ValueError, match=r"load_state_dict\(assign=True\): '1.weight' is on .* Load with assign=False"):
        model.load_state_dict(state, assign=True)


def test_assigned_on_another_mesh(pool: Any) -> None:
    pool.run(4, assigned_from_elsewhere)


@on_mesh(4)
def from_first_onto_meta(mesh: Any) -> None:
    from torch.distributed.checkpoint import state_dict as helpers

    wanted = make_model()
    model = parallelize_module(make_model(1).to("meta"), mesh, plan())
    options = helpers.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = copy.copy(wanted.state_dict()) if dist.get_rank() == 0 else {}
    helpers.set_model_state_dict(model, state, options=options)
    for name, p in model.named_parameters():
        equal(p, wanted.get_parameter(name), name)
    assert model.get_parameter("1.weight").placements == (Shard(0),)


def test_broadcast_onto_meta(pool: Any) -> None:
    pool.run(4, from_first_onto_meta)
