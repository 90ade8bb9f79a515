"""State dicts of models and optimizers, sharded and full, moved from one mesh to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel import DTensor, Replicate, Shard, distribute_tensor
from hyper_parallel.checkpoint import RandomState
from hyper_parallel.checkpoint import distributed as dcp
from hyper_parallel.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.conformance.test_checkpoint import MODELS, Setup, build, digests, optimizer_of, train
from hyper_parallel.testing.conformance.test_checkpoint_state import fails

FULL = StateDictOptions(full_state_dict=True)


def job(shape: tuple[int, ...], name: str, seed: int, steps: int) -> Any:
    setup = Setup(shape, "fully_shard" if len(shape) == 2 else "none")
    mesh = setup.mesh()
    if mesh is None:
        return None
    model = build(mesh, setup, name, seed)
    optimizer, step = optimizer_of(model, mesh.platform)
    train(model, name, step, range(steps))
    return mesh, model, optimizer, step


@pytest.mark.parametrize("name", [*MODELS])
def test_to_another_model(pool: Any, name: str) -> None:
    pool.run(4, moved, name)


def moved(name: str) -> None:
    """Check full state dicts on all ranks, full state dicts on the first rank, and sharded state dicts.

    The new optimizer may have no steps yet.
    """
    saved = job((2, 2), name, 5, 2)
    mesh, model, optimizer, _ = saved
    platform, adapter = mesh.platform, get_adapter()
    wanted = digests(model, optimizer, platform)
    states = []
    for options in (FULL, StateDictOptions(full_state_dict=True, cpu_offload=True), StateDictOptions()):
        of_model = get_model_state_dict(model, options=options)
        of_optimizer = {} if optimizer is None else get_optimizer_state_dict(model, optimizer, options=options)
        states.append((of_model, of_optimizer))
        if options.full_state_dict and options.cpu_offload and platform.rank():
            assert of_model == of_optimizer == {}
            continue
        assert of_model.keys() == dict(platform.saved_tensors(model)).keys()
        assert options.full_state_dict is not any(isinstance(x, DTensor) for x in of_model.values())
    first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # One that had not stepped trains for each model, as its optimizer is compiled on MindSpore.
    index = [*MODELS].index(name)
    trains = ((4,) if index < 2 else (2, 2), index % 3)
    for shape in ((4,), (2, 2)):
        stepped = job(shape, name, 6, 1)
        for number, ((of_model, of_optimizer), options) in enumerate(
            zip(states, (FULL, first, StateDictOptions()), strict=True)
        ):
            if not options.full_state_dict and len(shape) == 1:
                continue
            for which, (_, other, its, step) in (("new", job(shape, name, 6, 0)), ("stepped", stepped)):
                set_model_state_dict(other, of_model, options=options)
                if its is not None:
                    set_optimizer_state_dict(other, its, of_optimizer, options=options)
                assert digests(other, its, platform) == wanted, (shape, options, which)
                if which == "stepped" or (shape, number) == trains:
                    train(other, name, step, range(2, 3))
    with fails(ValueError, "does not fit", "missing", "'x'"):
        set_model_state_dict(model, {"x": adapter.tensor(np.ones(2, np.float32))}, options=FULL)
    with fails(ValueError, "set full_state_dict=True too"):
        set_model_state_dict(model, {}, options=StateDictOptions(broadcast_from_rank0=True))
    other = spmd.device_mesh(4)
    shifted = {n: distribute_tensor(x, other, [Replicate()], src_data_rank=None) for n, x in states[0][0].items()}
    with fails(ValueError, "is on", "in the model and on"):
        set_model_state_dict(model, shifted)
    if optimizer is None:
        return
    elsewhere = {
        name: {
            key: distribute_tensor(x, other, [Replicate()], src_data_rank=None) if getattr(x, "shape", ()) else x
            for key, x in row.items()
        }
        for name, row in states[0][1]["state"].items()
    }
    with fails(ValueError, "is on", "in the model and on"):
        set_optimizer_state_dict(model, optimizer, {**states[0][1], "state": elsewhere})


@spmd.on_mesh(4)
def under_torchs_names(mesh: Any, directory: str) -> None:
    """Check a program for torch with a changed import line: joint and flat state dicts, several optimizers, frozen
    parameters."""
    platform, adapter, setup = mesh.platform, get_adapter(), Setup((4,), "none")

    def made(seed: int, steps: int) -> Any:
        model = build(mesh, setup, "packed", seed)  # of which `w13.weight` is frozen
        optimizer, step = optimizer_of(model, platform)
        train(model, "packed", step, range(steps))
        return model, optimizer

    model, optimizer = made(5, 1)
    frozen = StateDictOptions(ignore_frozen_params=True, full_state_dict=True)
    state = get_model_state_dict(model, options=frozen)
    assert state.keys() == get_model_state_dict(model).keys() - {"w13.weight"}
    other, _ = made(6, 0)
    with fails(ValueError, "missing ['w13.weight']"):
        set_model_state_dict(other, state, options=FULL)
    assert set_model_state_dict(other, state, options=frozen) == ([], [])
    loose = StateDictOptions(full_state_dict=True, strict=False)
    kept = {**{name: x for name, x in state.items() if name != "w2.weight"}, "x": state["w2.weight"]}
    assert set_model_state_dict(other, kept, options=loose) == (["w13.weight", "w2.weight"], ["x"])
    set_model_state_dict(other, get_model_state_dict(model))
    assert digests(other, None, platform) == digests(model, None, platform)
    for wrong in ({"keep_submodule_prefixes": False}, {"dsd_fqn_modifiers": "x"}):
        with fails(ValueError, *wrong):
            StateDictOptions(**wrong)
    with fails(ValueError, "submodules=...", "with the submodule as the model"):
        get_model_state_dict(model, submodules={model})
    with fails(TypeError, "optimizers must be optimizers of the framework, got int"):
        get_optimizer_state_dict(model, 3)
    if optimizer is None:
        return
    for options in (
        StateDictOptions(),
        StateDictOptions(flatten_optimizer_state_dict=True),
        StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, flatten_optimizer_state_dict=True),
    ):
        of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
        if options.flatten_optimizer_state_dict:
            assert {"state.w2.weight.exp_avg", "param_groups.w2.weight.lr"} <= of_optimizer.keys()
            assert not any(isinstance(x, dict) for x in of_optimizer.values())
        if options.broadcast_from_rank0 and platform.rank():
            of_model, of_optimizer = {}, {}
        other, its = made(6, 0)
        result = set_state_dict(other, its, model_state_dict=of_model, optim_state_dict=of_optimizer, options=options)
        assert result == ([], []) and digests(other, its, platform) == digests(model, optimizer, platform), options
    # One that had not stepped, into one that has not, and one that has.
    models = {name: made(5, steps) for name, steps in (("new", 0), ("its", 0), ("stepped", 1))}
    before = get_optimizer_state_dict(*models["new"])
    set_optimizer_state_dict(*models["its"], before)
    assert digests(*models["its"], platform) == digests(*models["new"], platform)
    if not any(before["state"].values()):  # on MindSpore there are moments of zeros before the first step
        with fails(ValueError, "lacks", "w2.weight.exp_avg", "the saved optimizer had not taken a step"):
            set_optimizer_state_dict(*models["stepped"], before)
        set_optimizer_state_dict(*models["stepped"], before, options=StateDictOptions(strict=False))
    # Two optimizers of one model.
    pairs = []
    for seed in (5, 6):
        both = adapter.Probe()
        both.first, both.second = (adapter.load(adapter.Mlp(4, 6), np.random.default_rng(seed + i)) for i in range(2))
        pairs.append((both, [adapter.optimizer(x, "adamw", 0.1 / seed)[0] for x in (both.first, both.second)]))
    state = get_optimizer_state_dict(*pairs[0])
    assert len(state["param_groups"]) == 2 and "second.up.weight" in state["param_groups"][1]["params"]
    set_optimizer_state_dict(*pairs[1], state)
    rates = [float(platform.optimizer_state(o).options[0]["lr"]) for o in pairs[1][1]]
    np.testing.assert_allclose(rates, [0.02, 0.02], rtol=1e-6)


@spmd.on_mesh(2)
def saved_under_torchs_names(mesh: Any, directory: str) -> None:
    """Check `save`, `load` and `async_save` with torch's keywords. Loaded values are put into the given state dict."""
    adapter, path = get_adapter(), f"{directory}/1"
    whole = np.arange(6, dtype=np.float32).reshape(3, 2)

    def state(scale: int) -> dict[str, Any]:
        x = distribute_tensor(adapter.tensor(whole * scale), mesh, [Shard(0)])
        return {"x": x, "step": scale, "nest": {"list": [scale, (scale, 2)], "none": None if scale else 1}}

    for call in (dcp.save, lambda *a, **k: dcp.async_save(*a, **k).result(timeout=100)):
        call(state(2), checkpoint_id=path, process_group=mesh)
        call(state(1), checkpoint_id=path, process_group=mesh)  # replaces it, as torch does
        got = state(0)
        inner = got["nest"]
        assert dcp.load(got, checkpoint_id=path, process_group=mesh) is None
        assert got["nest"] is inner and inner == {"list": [1, (1, 2)], "none": None} and got["step"] == 1
        assert (adapter.numpy(got["x"]) == whole).all()
    assert isinstance(RandomState(), dcp.Stateful) and not isinstance(3, dcp.Stateful)
    with fails(dcp.CheckpointException, "there is no checkpoint"):
        dcp.load(state(0), checkpoint_id=f"{path}-none", process_group=mesh)
    for call, words in (
        (lambda: dcp.save({}), "checkpoint_id is missing"),
        (lambda: dcp.save({}, checkpoint_id=path, planner=3), "planner: checkpoints of hyper_parallel"),
        (lambda: dcp.load({}, checkpoint_id=path, storage_reader=3), "storage_reader: "),
        (
            lambda: dcp.save({}, checkpoint_id=path, no_dist=True),
            "save(no_dist=True) is not supported: pass False",
        ),
        (lambda: dcp.save({}, checkpoint_id=path, process_group=3), "process_group is a int: pass a DeviceMesh"),
        (lambda: dcp.async_save({}, checkpoint_id=path, async_checkpointer_type="process"), "pass 'thread'"),
    ):
        with fails(ValueError, words):
            call()
    # A path that is no checkpoint is never replaced.
    other = Path(directory) / "other"
    if mesh.get_rank() == 0:
        (other / "mine").mkdir(parents=True)
    with fails(ValueError, "not a checkpoint, so it is not overwritten"):
        dcp.save(state(1), checkpoint_id=other, process_group=mesh)
    if mesh.get_rank() == 0:
        assert (other / "mine").is_dir()


@pytest.mark.parametrize(
    ("job", "size"), [(under_torchs_names, 4), (saved_under_torchs_names, 2)], ids=["state dicts", "saves"]
)
def test_names(pool: Any, tmp_path: Path, job: Any, size: int) -> None:
    pool.run(size, job, str(tmp_path))
