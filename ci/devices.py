"""Devices of the backends: the real device or its stand-in, and the folders of tests for each."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from reporter import Part

__all__ = ["DEVICES", "device_of", "folders_of", "is_faked", "launcher", "places_of", "why_not"]

#: backend -> (module that simulates its device, environment variable that is set where the real device is)
SIMULATORS = {"torch-npu": ("tests.simulated_npu", "ASCEND_HOME_PATH")}
#: backend -> (folder of the tests on a fake device, program that exits with 0 if the real device can be used)
FAKES = {
    "torch-cuda": (
        "fake_cuda",
        "from hyper_parallel.platform.torch.cuda import TorchCudaPlatform as platform\n"
        "raise SystemExit(platform.unavailable_reason())",
    )
}
#: backend -> (name of the real device, name of its stand-in), as in the table
DEVICES = {"torch-cuda": ("GPU", "fake GPU"), "torch-npu": ("NPU", "simulated NPU")}


def launcher(backend: str, python: str) -> list[str]:
    """Return the command that starts Python for the tests of ``backend``, in a simulator if the device is simulated."""
    module, real = SIMULATORS.get(backend, ("", ""))
    simulated = module and not os.environ.get(real)
    return [python, "-m", module, "run", python] if simulated else [python]


def why_not(root: Path, backend: str, python: str) -> str:
    """Return why the tests of ``backend`` cannot run here, or an empty string."""
    if shutil.which(python) is None:
        return f"its environment could not be made: there is no {python}"
    command = launcher(backend, python)
    if len(command) == 1:
        return ""
    check = [*command[: command.index("run")], "check"]
    done = subprocess.run(check, cwd=root, check=False, capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""


def is_faked(root: Path, backend: str, python: str, part: Part) -> bool:
    """Return whether the tests of ``backend`` run on a fake device here."""
    if backend not in FAKES:
        return False
    question = subprocess.run([python, "-c", FAKES[backend][1]], cwd=root, check=False, capture_output=True, text=True)
    if question.returncode:
        reason = question.stderr.strip().splitlines()[-1]
        part.say(f"== {backend}: on a fake device, since {reason}")
    return bool(question.returncode)


def device_of(backend: str, command: list[str], faked: bool) -> str:
    """Return the table's name for the device on which the tests of ``backend`` run."""
    if backend == "mindspore":  # MindSpore uses the Ascend device wherever CANN is set up
        return "NPU" if os.environ.get("ASCEND_HOME_PATH") else "CPU"
    real, stand_in = DEVICES.get(backend, ("CPU", "CPU"))
    return stand_in if faked or len(command) > 1 else real


def folders_of(root: Path, backend: str, faked: bool) -> list[str]:
    """Return the test folders for ``backend``: for torch-npu conformance/, torch/ and npu/."""
    names = [FAKES[backend][0]] if faked else ["conformance", *backend.split("-")]
    return [f"tests/{name}" for name in names if (root / "tests" / name).is_dir()]


def places_of(root: Path, backend: str) -> list[str]:
    """Return all test folders for ``backend``, for the real device and for a fake one."""
    faked = folders_of(root, backend, True) if backend in FAKES else []
    return [*folders_of(root, backend, False), *faked]
