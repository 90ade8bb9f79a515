"""The container recipes fit the repository: the files that they copy exist, they install the gate's requirements, and
they run the gate. No test here builds them."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BACKENDS = sorted(path.parent.name for path in ROOT.glob("platform/*/requirements.txt"))
#: The instructions that the recipes use.
KNOWN = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}


def parse(text: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Containerfile; comments left out, continued lines joined.

    Raises:
        ValueError: for a line that is no instruction.
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    instructions = []
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, arguments = line.partition(" ")
            if word not in KNOWN or not arguments:
                raise ValueError(f"no instruction: {line!r}")
            instructions.append((word, arguments.strip()))
    return instructions


def problems(root: Path, backend: str, text: str) -> list[str]:
    """The problems of the recipe of ``backend``."""
    try:
        instructions = parse(text)
    except ValueError as error:
        return [str(error)]
    words = [word for word, _ in instructions]
    found = []
    declared: set[str] = set()
    installed: set[str] = set()
    copied: set[str] = set()
    for i, (word, arguments) in enumerate(instructions):
        if word == "ARG":
            declared.add(arguments.partition("=")[0])
            continue
        if word in ("FROM", "RUN"):
            found += [
                f"{name} is not declared" for name in re.findall(r"\$\{(\w+)\}", arguments) if name not in declared
            ]
        if word == "FROM":
            declared = set()  # an ARG from above is not known in the stage
        elif word == "COPY":
            *sources, target = shlex.split(arguments)
            found += [f"{source} is not there" for source in sources if not (root / source).exists()]
            copied |= {f"{target}{Path(source).name}" if target != "." else source for source in sources}
        elif word == "RUN" and "pip install" in arguments:
            asked = set(re.findall(r"-r (\S+)", arguments))
            found += [f"{file} is not copied before it is installed" for file in asked - copied if "." not in copied]
            installed |= asked
        elif word == "CMD":
            command = json.loads(arguments)
            script = f"ci/{backend}"
            if command[-1] != script and not command[-1].endswith(f"; exec {script}"):
                found.append(f"it does not run {script}")
            if not (root / script).exists():
                found.append(f"{script} is not there")
            if i != len(instructions) - 1:
                found.append("CMD is not the last instruction")
    wanted = {f"platform/{backend}/requirements.txt", "ci/requirements-test.txt"}
    found += [f"{file} is not installed" for file in sorted(wanted - installed)]
    found += [f"there is no {word}" for word in sorted({"FROM", "CMD", "WORKDIR"} - set(words))]
    if ("COPY", ". .") not in instructions:
        found.append("the project is not copied")
    if not any(word == "ENV" and "CI=yes" in arguments for word, arguments in instructions):
        found.append("a gate that cannot run would not fail: CI is not set")
    return found


def recipe(backend: str) -> str:
    return (ROOT / "platform" / backend / "Containerfile").read_text(encoding="utf-8")


@pytest.mark.parametrize("backend", BACKENDS)
def test_recipe(backend: str) -> None:
    assert problems(ROOT, backend, recipe(backend)) == []


@pytest.mark.parametrize("backend", ["torch-npu", "mindspore"])
def test_base_with_cann(backend: str) -> None:
    """The base image is an argument, so that one recipe serves the stand-in and the hardware."""
    instructions = parse(recipe(backend))
    assert instructions[:2] == [("ARG", "BASE=python:3.11-slim"), ("FROM", "${BASE}")]
    assert "set_env.sh; exec" in instructions[-1][1]


def test_simulated_npu_can_be_compiled() -> None:
    (system,) = (arguments for word, arguments in parse(recipe("torch-npu")) if "apt-get" in arguments)
    assert {"gcc", "libc6-dev"} <= set(system.split())


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("COPY ci/requirements-test.txt ci/\n", "", "ci/requirements-test.txt is not copied before it is installed"),
        ("COPY ci/requirements-test.txt", "COPY ci/requirements-tests.txt", "ci/requirements-tests.txt is not there"),
        (" -r ci/requirements-test.txt", "", "ci/requirements-test.txt is not installed"),
        ('["ci/torch-cpu"]', '["ci/torch-cuda"]', "it does not run ci/torch-cpu"),
        ("COPY . .\n", "", "the project is not copied"),
        ("ENV CI=yes ", "ENV ", "a gate that cannot run would not fail: CI is not set"),
        ("ARG PIP_ARGS", "ARG PIP_ARG", "PIP_ARGS is not declared"),
        ("WORKDIR", "WORKDIRECTORY", "no instruction: 'WORKDIRECTORY /hyper-parallel'"),
        ("FROM python:3.11-slim\n", "", "there is no FROM"),
    ],
)
def test_what_is_wrong_is_seen(old: str, new: str, problem: str) -> None:
    text = recipe("torch-cpu")
    assert old in text
    assert problem in problems(ROOT, "torch-cpu", text.replace(old, new))


def test_what_is_made_here_stays_out() -> None:
    """Environments and build output are not sent to the builder; the history is, for the commit in the table."""
    ignored = [line for line in (ROOT / ".dockerignore").read_text().split() if not line.startswith("#")]
    for name in (".venv", "build", "rank_0"):
        assert any(fnmatch.fnmatch(name, pattern.rstrip("/")) for pattern in ignored), name
    assert not any(fnmatch.fnmatch(".git", pattern.rstrip("/")) for pattern in ignored)
