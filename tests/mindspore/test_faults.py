"""Ranks that die in the middle of a step, and how the others find out which."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.platform.mindspore.processes import lost_ranks
from tests.support.programs import run_ranks

PROGRAM = """
import os
import time
import numpy as np
from mindspore import Tensor, nn
import hyper_parallel as hp
from hyper_parallel.mindspore import value_and_grad

platform = hp.get_platform()
platform.init_process_group()
rank, mesh = platform.rank(), hp.init_device_mesh("cpu", mesh_dim_names=("tp",))
model = nn.SequentialCell(nn.Dense(8, 8), nn.ReLU(), nn.Dense(8, 8))
hp.parallelize_module(model, mesh, {"0": hp.ColwiseParallel(), "2": hp.RowwiseParallel()})
step = value_and_grad(lambda x: model(x).sum(), 0, model.trainable_params())
x = Tensor(np.ones((2, 8), np.float32))
store = platform.world().store

def together(place):  # the time-out does not count while a rank is busy elsewhere, as it is on a busy machine
    store.add(place, 1)
    while store.add(place, 0) < 3:
        time.sleep(0.01)

together("before the first step")
step(x)
together("before the second step")
if rank == 1:
    os._exit(1)
try:
    step(x)
except hp.CollectiveError as error:
    print(f"raised|{error.collective}|{error.ranks}|{error.missing}|{error}", flush=True)
begin = time.monotonic()
whole = hp.DTensor.from_local(x, mesh, [hp.Shard(0)])
for again in (lambda: step(x), whole.full_tensor):
    try:
        again()
    except hp.CollectiveError as error:
        print(f"again|{error.missing}|{error}", flush=True)
print(f"took|{time.monotonic() - begin}", flush=True)
os._exit(0)
"""


def test_lost_rank_is_named() -> None:
    """The error comes after the time-out of collectives, which differs from that of the meeting here."""
    ended = run_ranks(["-c", PROGRAM], 3, MS_CPU_COMM_OP_TIMEOUT="10")
    for rank in (0, 2):
        _, _, raised = ended[rank].out.partition("raised|")
        assert raised.startswith("all_reduce|(0, 1, 2)|(1,)|all_reduce of a Float32 tensor of shape (2, 8)"), ended
        assert f"failed on rank {rank}: rank 1 did not take part, and has ended, or hangs" in raised
        # Each further collective with that rank is refused at once.
        _, first, second = raised.split("again|")
        assert first.startswith("(1,)|all_reduce of") and second.startswith("(1,)|all_gather of"), raised
        assert "mccl is not called again" in second and float(second.split("took|")[1]) < 5, raised


class Store:
    """An in-process stand-in for `TCPStore`: `get` of a missing key fails."""

    def __init__(self, **values: Any) -> None:
        self.values: dict[str, Any] = values

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> Any:
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        self.values[key] = self.values.get(key, 0) + amount
        return int(self.values[key])


class Broken(Store):
    """A store whose server has ended."""

    def add(self, key: str, amount: int) -> int:
        raise RuntimeError("TCP add operation failed.")


class Ending(Store):
    """A store whose server ends after the first look."""

    def get(self, key: str) -> Any:
        self.add = Broken().add  # type: ignore[method-assign]
        return super().get(key)


def missing(store: Any, me: int, group: str, ranks: tuple[int, ...], report: str) -> Any:
    """Call `find_missing_ranks` on a rank that has not lost a group before."""
    return lost_ranks.find_missing_ranks(store, me, group, ranks, report, {}, {})


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_ranks, "GRACE", 0)  # an available value is found however little time there is


@pytest.mark.usefixtures("no_grace")
def test_missing_ranks() -> None:
    store = Store()
    assert missing(store, 2, "tp", (0, 1, 2), "in tp") == ({2: "in tp"}, (0, 1))
    assert missing(store, 0, "tp", (0, 2), "in tp") == ({0: "in tp", 2: "in tp"}, ())
    # Rank 0 did not fail in this group, but in another.
    assert missing(store, 1, "dp", (0, 1), "in dp") == ({1: "in dp", 0: "in tp"}, (0,))
    # The program has initialised MindSpore itself.
    assert missing(None, 1, "tp", (0, 1), "in tp") is None
    # Rank 0 serves the store.
    assert missing(Broken(), 1, "tp", (0, 1), "in tp") == ({1: "in tp"}, (0,))
    assert missing(Broken(), 1, "tp", (1, 2), "in tp") is None
    ending = Ending(**store.values)
    assert missing(ending, 1, "tp", (0, 1, 2), "in tp") == ({1: "in tp", 0: "in tp"}, (2,))


@pytest.mark.usefixtures("no_grace")
def test_groups_of_missing_ranks() -> None:
    """All groups with a rank that was missing are lost, and no others; where all ranks were there, none is."""
    groups: Any = {"world": (0, 1, 2, 3), "tp": (0, 1), "dp": (0, 2)}
    lost: Any = {}
    assert lost_ranks.find_missing_ranks(Store(), 0, "alone", (0,), "in it", groups, lost) == ({0: "in it"}, ())
    assert not lost
    found = lost_ranks.find_missing_ranks(Store(), 0, "tp", (0, 1), "in tp", groups, lost)
    assert found == ({0: "in tp"}, (1,)) == lost["world"]
    lost_ranks.check_group("dp", lost)
    for name in ("world", "tp"):
        with pytest.raises(RuntimeError, match="mccl is not called again") as caught:
            lost_ranks.check_group(name, lost)
        assert lost_ranks.is_communication_failure(caught.value)
    assert lost_ranks.find_missing_ranks(Broken(), 0, "tp", (0, 1), "again", groups, lost) == found


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("AllReduce failed.\n", True),
        ("AllGather failed.", True),
        ("Broadcast failed.", True),
        ("hcclAllReduce failed: HCCL function error", True),
        ("For 'MatMul', the shapes do not fit", False),
    ],
)
def test_errors_that_mean_a_lost_rank(text: str, lost: bool) -> None:
    assert lost_ranks.is_communication_failure(RuntimeError(text)) is lost
