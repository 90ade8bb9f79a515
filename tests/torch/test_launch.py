"""Reading the environment of a launcher."""

from __future__ import annotations

import pytest

from hyper_parallel.platform.torch.launch import Launch, read_environment


def test_torchrun() -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    assert read_environment(environ) == Launch(5, 8, 1, "host", 29500)


def test_msrun() -> None:
    environ = {
        "MS_ROLE": "MS_WORKER",
        "MS_WORKER_NUM": "4",
        "RANK_ID": "3",
        "DEVICE_ID": "3",
        "MS_SCHED_HOST": "127.0.0.1",
        "MS_SCHED_PORT": "8118",
    }
    assert read_environment(environ) == Launch(3, 4, 3, "127.0.0.1", 8119)


def test_nobody() -> None:
    assert read_environment({}) == Launch(0, 1, 0, None, 0)


def test_half_an_environment() -> None:
    with pytest.raises(RuntimeError, match="MASTER_ADDR, MASTER_PORT"):
        read_environment({"RANK": "0", "WORLD_SIZE": "1"})
