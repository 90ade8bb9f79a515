"""torch_npu is installed and CANN is not: torch itself must stay usable, and the reason must be clear."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_without_cann(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in this environment, but without the simulated NPU."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SIMULATED_NPU", "HYPER_PARALLEL", "COV_CORE"))
    }
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module", autouse=True)
def no_cann() -> None:
    """Skip these tests where CANN is installed."""
    if os.environ.get("ASCEND_HOME_PATH"):
        pytest.skip("CANN is installed here (ASCEND_HOME_PATH is set)")


def test_plain_torch_fails() -> None:
    """Why anything has to be done: torch loads torch_npu by itself, and fails with it."""
    done = run_without_cann("import torch")
    assert done.returncode != 0
    assert "Failed to load the backend extension: torch_npu" in done.stderr


def test_torch_on_cpu_works() -> None:
    done = run_without_cann(
        "from hyper_parallel import get_platform\n"
        "platform = get_platform('torch')\n"
        "print(platform.name, platform.zeros((2,), platform.factory('full', (1,), 0.0, None)).tolist())"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "torch-cpu [0.0, 0.0]"


def test_the_reason_is_explained() -> None:
    done = run_without_cann("from hyper_parallel import get_platform\nget_platform('torch-npu')")
    assert done.returncode != 0
    error = done.stderr[done.stderr.rindex("PlatformError") :]
    assert "'torch-npu' was asked for, but this platform cannot be used here" in error
    assert "most likely because CANN is not installed or its set_env.sh was not sourced: " in error
    assert ".so" in error, "the library that is missing"
    assert "torch-cpu: available" in error
