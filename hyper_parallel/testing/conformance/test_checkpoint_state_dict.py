"""State dicts of models and optimizers, sharded and whole, from one mesh to another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel import DTensor, Replicate, distribute_tensor
from hyper_parallel.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
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
    """Whole ones of all ranks, of the first rank, and shards; also into an optimizer that has not stepped."""
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
                if which == "stepped" or number == [*MODELS].index(name) % 3:  # a new one is compiled on MindSpore
                    train(other, name, step, range(2, 3))
    with fails(ValueError, "does not fit", "missing", "'x'"):
        set_model_state_dict(model, {"x": adapter.tensor(np.ones(2, np.float32))}, options=FULL)
    with fails(ValueError, "set full_state_dict=True too"):
        set_model_state_dict(model, {}, options=StateDictOptions(broadcast_from_rank0=True))
    other = spmd.device_mesh(4)
    shifted = {n: distribute_tensor(x, other, [Replicate()], src_data_rank=None) for n, x in states[0][0].items()}
    with fails(ValueError, "is on", "given is a DTensor on"):
        set_model_state_dict(model, shifted)
