"""A rank that ends or hangs on NPUs: the others say which, where HCCL raises."""

from __future__ import annotations

import json

import pytest

from hyper_parallel import get_platform
from hyper_parallel.testing.extent import in_gate
from tests.npu.test_without_bfloat16 import run_ranks
from tests.simulated_npu import preload

pytestmark = pytest.mark.skipif(not preload.is_simulated(), reason="real HCCL waits in the background")

PROGRAM = """
import json, os, sys, time
import torch
from hyper_parallel import CollectiveError, DTensor, Partial, Replicate, get_platform, init_device_mesh

get_platform().init_process_group()
mesh = init_device_mesh(mesh_shape=(3,), mesh_dim_names=("tp",))
x = DTensor.from_local(torch.ones(2, 8), mesh, [Partial()], run_check=False)
x.redistribute(placements=[Replicate()])
if get_platform().rank() == 1:
    time.sleep(float(os.environ["HANG"]))
    print("[]", flush=True)
    os._exit(0)
try:
    x.redistribute(placements=[Replicate()])
except CollectiveError as error:
    print(json.dumps([str(error), error.missing]), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("hang", in_gate(["0", "9"], ["0"]))
def test_lost_rank_is_named(hang: str) -> None:
    first, lost, last = map(json.loads, run_ranks(PROGRAM, 3, HANG=hang, SIMULATED_NPU_TIMEOUT="2"))
    assert lost == []
    for rank, (message, missing) in ((0, first), (2, last)):
        assert missing == [1]
        assert message.startswith("all_reduce of a torch.float32 tensor of shape (2, 8) along mesh dimension 0 ('tp')")
        assert f"failed on rank {rank}: rank 1 did not take part, and has ended, or hangs" in message
        assert "HcclAllreduce, error code is 9" in message


def test_other_errors_of_hccl_are_no_lost_rank() -> None:
    """Wrong arguments are the program's."""
    platform = get_platform()
    for code, lost in ((1, False), (5, False), (9, True), (14, True), (21, True), (90, False)):
        error = RuntimeError(f"OPS function error: HcclAllreduce, error code is {code}\n")
        assert platform.is_communication_failure(error) is lost
