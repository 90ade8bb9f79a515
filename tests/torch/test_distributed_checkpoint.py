"""torch.distributed.checkpoint: whole state dicts are gathered and loaded, shards are refused before writing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_parallel import ColwiseParallel, DTensor, RowwiseParallel, Shard, distribute_tensor, parallelize_module
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device


def make_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.Linear(6, 5), torch.nn.GELU(), torch.nn.Linear(5, 6)).to(
        device()
    )


def trained(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(12.0).reshape(2, 6).to(device())).square().mean().backward()
    optimizer.step()
    return model, optimizer


def parallel(mesh: Any, seed: int = 0) -> torch.nn.Module:
    return parallelize_module(make_model(seed), mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})


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
def saved(mesh: Any, folder: str, name: str) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"plain": torch.zeros(2), "model": parallel(mesh).state_dict()}
    # async_save copies before it plans, which a shard refuses by itself.
    message = r"(?s)cannot save or load a DTensor.*full_state_dict=True.*one file a rank|full_tensor\(\) to save"
    if name == "async_save" and device().type != "cpu":
        message += "|A CPU backend must be enabled for async save"  # torch's own, before anything else
    with pytest.raises(BaseException, match=message):
        if name == "save":
            dcp.save(state, checkpoint_id=folder, process_group=mesh.get_group())
        elif name == "async_save":
            dcp.async_save(state, checkpoint_id=folder, process_group=mesh.get_group()).result()
        else:
            dcp.load(state, checkpoint_id=folder, process_group=mesh.get_group())
    assert not [file for file in Path(folder).rglob("*") if file.suffix in (".distcp", ".metadata") and name != "load"]


@pytest.mark.parametrize("name", ["save", "async_save"])
def test_shards_are_not_saved(pool: Any, tmp_path: Path, name: str) -> None:
    pool.run(2, saved, str(tmp_path / "checkpoint"), name)


@on_mesh(2)
def write_plain(mesh: Any, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(
        {"plain": torch.zeros(2), "model": make_model().state_dict()},
        checkpoint_id=folder,
        process_group=mesh.get_group(),
    )


def test_shards_are_not_loaded(pool: Any, tmp_path: Path) -> None:
    """Of a checkpoint of whole tensors; these can be read into plain tensors."""
    pool.run(2, write_plain, str(tmp_path / "checkpoint"))
    pool.run(2, saved, str(tmp_path / "checkpoint"), "load")


@on_mesh(2)
def nested(mesh: Any) -> None:
    """Lists and tuples of them, and entries that are no tensors."""
    from torch.distributed._state_dict_utils import _gather_state_dict

    x = distribute_tensor(torch.arange(3.0), mesh, [Shard(0)])
    got: Any = _gather_state_dict({"list": [x, (x, 1)], "text": "a"})
    assert got["list"][0].tolist() == got["list"][1][0].tolist() == [0, 1, 2] and got["text"] == "a"


def test_nested_entries(pool: Any) -> None:
    pool.run(2, nested)
