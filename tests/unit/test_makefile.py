"""The environments that the targets make, and with which release of torch."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_make(*words: str) -> subprocess.CompletedProcess[str]:
    # A make above the tests hands its own variables down.
    handed_down = ("MAKELEVEL", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "PLATFORM", "TORCH", "FILES")
    own = {name: value for name, value in os.environ.items() if name not in handed_down}
    return subprocess.run(["make", *words], cwd=ROOT, env=own, capture_output=True, text=True, check=False)


def make(*words: str) -> subprocess.CompletedProcess[str]:
    """Print the commands of make, if nothing had been made yet (-B)."""
    return run_make("-nB", *words)


@pytest.mark.parametrize(
    ("words", "environment", "pins"),
    [
        (("test", "PLATFORM=torch-cpu"), "torch-cpu", ""),
        (("test", "PLATFORM=torch-cpu", "TORCH=2.14.1"), "torch-cpu-2.14.1", "2.14.1"),
        (("test", "PLATFORM=torch-npu", "TORCH=2.13.0"), "torch-npu-2.13.0", "2.13.0"),
        (("demo", "PLATFORM=torch-cpu", "TORCH=2.14.1"), "torch-cpu-2.14.1", "2.14.1"),
        (("demo",), "torch-cpu-2.13.0", "2.13.0"),
        (("demo", "PLATFORM=mindspore"), "mindspore", ""),
    ],
)
def test_environment(words: tuple[str, ...], environment: str, pins: str) -> None:
    done = make(*words)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"-m venv (\S+)", done.stdout) == [f".venv/{environment}"]
    assert re.findall(r"torch\|torch-npu\)==\.\*/\\1==(\S+?)/'", done.stdout) == ([pins] if pins else [])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("test", "TORCH=2.14.1"), "set PLATFORM too, to one of: torch-cpu torch-cuda torch-npu"),
        (("test", "PLATFORM=mindspore", "TORCH=2.14.1"), "set PLATFORM too, to one of: torch-cpu torch-cuda torch-npu"),
        (("demo", "PLATFORM=mindspore", "TORCH=2.14.1"), "TORCH=2.14.1 chooses the torch of one backend"),
        (("test", "PLATFORM=torch-cpu", "TORCH=newest"), "TORCH=newest is no release of torch, such as 2.14.1"),
        (("test", "PLATFORM=tpu"), "PLATFORM=tpu is none of: "),
    ],
)
def test_what_is_refused(words: tuple[str, ...], sentence: str) -> None:
    done = make(*words)
    assert done.returncode != 0
    assert sentence in done.stderr


@pytest.mark.parametrize(
    ("words", "environments", "command"),
    [
        (("test",), ["all", "torch-npu"], "ci/all "),
        (("test", "FILES=tests/unit/test_gate.py ./tests/mindspore/test_calls.py"), ["all"], "ci/all --files FILES"),
        (("test", "FILES=tests/unit/test_gate.py ./tests/npu"), ["all", "torch-npu"], "ci/all --files FILES"),
        (("test", "FILES=tests/torch/test_calls.py"), ["all", "torch-npu"], "ci/all --files FILES"),
        (("test", "PLATFORM=torch-cpu", "FILES=tests/npu"), ["torch-cpu"], "ci/torch-cpu --files FILES"),
    ],
)
def test_some_files(words: tuple[str, ...], environments: list[str], command: str) -> None:
    """The gate gets the files, and only the environments are made that it may need for them."""
    done = make(*words)
    assert done.returncode == 0, done.stderr
    assert sorted(set(re.findall(r"-m venv .venv/(\S+)", done.stdout))) == environments
    assert done.stdout.rstrip("\n").endswith(command.replace("FILES", words[-1].partition("=")[2]))


@pytest.mark.parametrize("words", [("test",), ("test", "PLATFORM=torch-cpu", "TORCH=2.14.1"), ("lint",), ("docs",)])
def test_nothing_is_silent(words: tuple[str, ...]) -> None:
    """Long commands run below a program that says so every ten seconds; the gate does it itself."""
    lines = make(*words).stdout.replace("\\\n", "").splitlines()
    long = [line for line in lines if re.search(r"-m (venv|pip)|mypy|mkdocs", line)]
    assert len(long) >= 2 and all("ci/heartbeat.py " in line for line in long)


def test_make_alone_lists_the_targets() -> None:
    """Each target that is no file, in the order in which the Makefile has them."""
    listed, helped = run_make().stdout, run_make("help").stdout
    assert listed == helped
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert targets is not None
    assert set(re.findall(r"^make ([\w-]+)", listed, re.MULTILINE)) == set(targets[1].split())


def test_pins_are_replaced() -> None:
    """Pins of torch and torch_npu are replaced, nothing else, as the rule for another torch does it."""
    pattern = re.search(r"sed -E '([^']+)'", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert pattern is not None
    script = pattern.group(1).replace("$(2)", "2.13.0")
    before = (ROOT / "platform/torch-npu/requirements.txt").read_text(encoding="utf-8")
    done = subprocess.run(["sed", "-E", script], input=before, capture_output=True, text=True, check=True)
    after = dict(line.split("==") for line in done.stdout.split() if "==" in line)
    assert (after["torch"], after["torch-npu"], after["safetensors"]) == ("2.13.0", "2.13.0", "0.8.0")
