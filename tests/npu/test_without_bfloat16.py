"""Ascend 910A and 310P have no bfloat16: it is refused before anything is sent, on all ranks, and float16 works."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hyper_parallel import get_platform
from tests.simulated_npu import preload

pytestmark = pytest.mark.skipif(
    not preload.is_simulated(), reason="the NPUs here are real, and must all be plain tensors"
)
ROOT = Path(__file__).resolve().parents[2]

#: The program of a rank: each line of JSON is (what was tried, how it ended).
PROGRAM = """
import json
import torch
from hyper_parallel import DTensor, Partial, Replicate, Shard, distribute_tensor, full, get_platform, init_device_mesh
from hyper_parallel import ColwiseParallel, parallelize_module
from hyper_parallel.core.communication import collectives

get_platform().init_process_group()
mesh = init_device_mesh(mesh_shape=(get_platform().world_size(),), mesh_dim_names=("tp",))
half = torch.ones(4, 4, dtype=torch.bfloat16)
local = half.npu()
sizes = [4 // mesh.size()] * mesh.size()
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).bfloat16()
refused = {
    "distribute": lambda: distribute_tensor(half, mesh, [Shard(0)]),
    "on the device": lambda: distribute_tensor(local, mesh, [Replicate()], src_data_rank=None),
    "from_local": lambda: DTensor.from_local(local, mesh, [Partial()], run_check=False),
    "module": lambda: parallelize_module(model, mesh, {"0": ColwiseParallel()}),
    "factory": lambda: full((4, 4), 1.0, dtype=torch.bfloat16, device_mesh=mesh),
    "all_reduce": lambda: collectives.all_reduce(local, mesh, 0),
    "reduce_scatter": lambda: collectives.bind_reduce_scatter(mesh, 0, 0, sizes)(local),
    "all_gather": lambda: collectives.bind_all_gather(mesh, 0, 0, [4] * mesh.size())(local),
    "all_to_all": lambda: collectives.bind_all_to_all(mesh, 0, 0, 1, [4] * mesh.size(), sizes)(local),
    "scatter": lambda: collectives.scatter(local, mesh, 0, 0, sizes, 0),
    "broadcast": lambda: collectives.broadcast(local, mesh, 0, 0),
}
for name, call in refused.items():
    try:
        call()
        ended = "no error"
    except TypeError as error:
        ended = str(error)
    print(json.dumps([name, ended]))
assert type(model[0].weight) is torch.nn.Parameter, "untouched"
default, _ = torch.get_default_dtype(), torch.set_default_dtype(torch.bfloat16)
try:
    full((2,), 1.0, device_mesh=mesh)
except TypeError as error:
    print(json.dumps(["default dtype", str(error)]))
torch.set_default_dtype(default)

# float16 does what bfloat16 does elsewhere.
torch.manual_seed(0)
layer = torch.nn.Linear(4, 4).half()
x = torch.randn(2, 4).half()
wanted = layer(x.float().half())
layer_tp = parallelize_module(layer, mesh, ColwiseParallel(output_layouts=Replicate()))
got = layer_tp(x.npu())
assert got.dtype is torch.float16
torch.testing.assert_close(got.cpu(), wanted, rtol=1e-3, atol=1e-3)
got.sum().backward()
print(json.dumps(["float16", "no error"]))
"""

NOT_COLLECTIVES = ("distribute", "on the device", "from_local", "module", "factory", "default dtype")


def run_on(chip: str, ranks: int) -> list[dict[str, str]]:
    """The output of each rank of a job on NPUs of this kind."""
    outputs = run_ranks(PROGRAM, ranks, SIMULATED_NPU_SOC=chip)
    return [dict(json.loads(line) for line in out.splitlines() if line.startswith("[")) for out in outputs]


def run_ranks(program: str, ranks: int, **variables: str) -> list[str]:
    """The output of each rank of a job of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {**variables, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert not any(process.returncode for process in processes), outputs
    return [out for out, _ in outputs]


@pytest.mark.parametrize(("chip", "ranks"), [("Ascend310P3", 2), ("Ascend910A", 1)])
def test_bfloat16_is_refused(chip: str, ranks: int) -> None:
    first, *others = run_on(chip, ranks)
    assert all(other == first for other in others), "the same on all ranks"
    assert first.pop("float16") == "no error"
    if ranks == 1:  # nothing to communicate, so it is up to the kernels
        first = {name: first[name] for name in NOT_COLLECTIVES}
    assert len(first) == (12 if ranks > 1 else 6)
    for name, error in first.items():
        assert f"dtype torch.bfloat16, which this NPU ({chip}) does not support: use torch.float16" in error, name
    assert "a tensor of shape (4, 4) is to be distributed" in first["distribute"]
    if ranks > 1:
        for name in first.keys() - set(NOT_COLLECTIVES):
            assert first[name].startswith(f"{name} of a tensor of shape "), first[name]


def test_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, where coverage sees it."""
    platform = get_platform()
    monkeypatch.setitem(vars(platform), "_has_bfloat16", False)
    with pytest.raises(TypeError, match=r"empty of shape \(2,\) with dtype torch\.bfloat16, which this NPU"):
        platform.factory("empty", (2,), None, torch.bfloat16)
