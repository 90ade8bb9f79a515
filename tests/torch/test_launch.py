"""Reading the environment of a launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyper_parallel.platform.torch.processes.launch import BACKEND_VARIABLE, Launch, chosen_backend, read_environment
from hyper_parallel.testing.pool import WorkerPool, free_port
from tests.conftest import PLATFORM
from tests.support.listening import listening_at
from tests.support.programs import run_each, run_ranks


def test_torchrun() -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    assert read_environment(environ) == Launch(5, 8, 1, "env://")


def test_msrun() -> None:
    environ = {
        "MS_ROLE": "MS_WORKER",
        "MS_WORKER_NUM": "4",
        "RANK_ID": "3",
        "DEVICE_ID": "3",
        "MS_SCHED_HOST": "127.0.0.1",
        "MS_SCHED_PORT": "8118",
    }
    assert read_environment(environ) == Launch(3, 4, 3, "tcp://127.0.0.1:8119")


def test_nobody() -> None:
    assert read_environment({}) == Launch(0, 1, 0, None)


def test_half_an_environment() -> None:
    with pytest.raises(RuntimeError, match="MASTER_ADDR, MASTER_PORT"):
        read_environment({"RANK": "0", "WORLD_SIZE": "1"})


@pytest.mark.parametrize(
    ("environ", "wanted"), [({}, "nccl"), ({BACKEND_VARIABLE: " Gloo "}, "gloo"), ({BACKEND_VARIABLE: ""}, "nccl")]
)
def test_backend(environ: dict[str, str], wanted: str) -> None:
    assert chosen_backend("nccl", environ) == wanted


def test_backend_that_torch_does_not_have() -> None:
    with pytest.raises(ValueError, match="HYPER_PARALLEL_TORCH_BACKEND=glue: this torch does not have this backend"):
        chosen_backend("nccl", {BACKEND_VARIABLE: "glue"})


PROGRAM = """
from hyper_parallel import get_platform
platform = get_platform()
platform.init_process_group()
rank, size = platform.rank(), platform.world_size()
# No rank leaves before all have met: gloo's connections are made by each rank at its own pace.
group = platform.new_group([range(size)])
print(rank, size, platform.all_gather_object(rank, group, size))
platform.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", ["torchrun", "msrun"])
def test_two_processes(launcher: str) -> None:
    program = ["-c", PROGRAM]
    if launcher == "torchrun":
        ended = run_ranks(program, 2)
    else:
        common = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1"}
        common["MS_SCHED_PORT"] = str(free_port())
        ended = run_each(program, [{**common, "RANK_ID": rank} for rank in "01"])
    assert [rank.out.strip() for rank in ended] == ["0 2 [0, 1]", "1 2 [0, 1]"], ended


ENDING = """
import atexit, pathlib, torch
from hyper_parallel import get_platform

def count():
    return sum(path.read_text().startswith("pt_gloo") for path in pathlib.Path("/proc/self/task").glob("*/comm"))

atexit.register(lambda: print(count()))  # before the group is made, so that it runs after the group's end
get_platform().init_process_group()
torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
print(count() > 0)
"""


@pytest.mark.skipif(PLATFORM != "torch-cpu", reason="gloo is the backend of torch-cpu")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts the threads of a process in /proc")
@pytest.mark.nightly
def test_no_thread_of_gloo_outlives_a_program() -> None:
    """A thread of gloo that outlives a program aborts it now and then. Any optimizer has torch import functions that
    keep a group."""
    (ended,) = run_ranks(["-c", ENDING], 1)
    assert ended.out.split() == ["True", "0"], ended


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"RANK": "x"}, "RANK='x' is invalid: the variable must be an integer of at least 0"),
        ({"RANK": "-1"}, "RANK='-1' is invalid: the variable must be an integer of at least 0"),
        ({"RANK": "2"}, "RANK=2 and WORLD_SIZE=2: ranks are 0 to 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' is invalid: the variable must be an integer of at least 1"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK='' is invalid"),
        ({"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "two"}, "MS_WORKER_NUM='two' is invalid"),
    ],
)
def test_numbers_that_no_launcher_sets(wrong: dict[str, str], words: str) -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.raises(ValueError, match=words):
        read_environment(wrong if "MS_ROLE" in wrong else torchrun | wrong)


@pytest.mark.skipif(PLATFORM != "torch-cpu", reason="NCCL and HCCL choose their interfaces")
def test_workers_listen_on_loopback() -> None:
    """No other machine can reach the workers of `hyper-parallel test`, which exchange pickles."""
    with WorkerPool(PLATFORM, size=2) as pool:
        found = [address for rank in pool.run(2, listening_at) for address in rank]
    assert found and {*found} == {"0100007F"}, found
