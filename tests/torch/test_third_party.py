"""A backend in a package of its own: installed, found through its entry points, checked by the conformance kit.

Everything is installed into a folder of the test and run from there, as an author of a backend has it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "examples/third_party_backend"
#: Styles and redistributions on two ranks: every collective, forward and backward.
SELECTION = ["--world-sizes", "2", "-k", "test_linear or test_one_dimensional_mesh or test_other_reductions"]

pytestmark = pytest.mark.skipif(
    os.environ["HYPER_PARALLEL_PLATFORM"] != "torch-cpu", reason="the backends here are torch-cpu's; its run has them"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library and the example installed."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # Copies: a build leaves files beside the sources, and takes in those that an earlier one left.
    for name in ("hyper_parallel", EXAMPLE):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    site = tmp_path_factory.mktemp("site")
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", site, source, source / EXAMPLE]
    subprocess.run(command, check=True, cwd=source, stdout=subprocess.DEVNULL, timeout=180)
    return site


def run_kit(site: Path, folder: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Run the kit outside the repository; returns exit status, output and the report, if one was written."""
    report = folder / "report.json"
    environment = {k: v for k, v in os.environ.items() if k not in ("HYPER_PARALLEL_PLATFORM", "HYPER_PARALLEL_LAB")}
    completed = subprocess.run(
        [sys.executable, "-m", "hyper_parallel.testing.conformance", *arguments, "--report", str(report)],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(site)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )
    return completed.returncode, completed.stdout, json.loads(report.read_text()) if report.exists() else {}


def test_example_conforms(site: Path, tmp_path: Path) -> None:
    markdown = tmp_path / "report.md"
    status, output, report = run_kit(site, tmp_path, "torch-gather-only", *SELECTION, "--report", str(markdown))
    assert status == 0, output
    assert (report["backend"], report["lab"], report["ok"]) == ("torch-gather-only", "torch_gather_only.lab", True)
    groups = {group["name"]: group for group in report["groups"]}
    assert groups["styles"] == {"name": "styles", "passed": 4, "failed": 0, "skipped": 12}
    assert groups["redistribute"]["passed"] == 3
    assert report["skip_reasons"]["4 ranks were not asked for"] > 0
    assert not report["complete"]
    assert "| styles | 4 | 0 | 12 |" in markdown.read_text()
    assert "torch-gather-only passes the checks that were asked for; not all were" in output


BROKEN = """
from hyper_parallel.platform.torch.cpu import TorchCpuPlatform

class Broken(TorchCpuPlatform):
    name = "torch-broken"

    def all_reduce(self, local, op, group):
        return super().all_reduce(local, op, group) * 1.001
"""


def install_by_hand(site: Path, name: str, module: str, entry_points: str) -> None:
    """What an installer leaves of a package of one module."""
    (site / f"{name}.py").write_text(module)
    information = site / f"{name}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(entry_points)


def test_kit_catches_a_backend_that_adds_wrongly(site: Path, tmp_path: Path) -> None:
    entry = "[hyper_parallel.platforms]\ntorch-broken = torch_broken:Broken\n"
    install_by_hand(site, "torch_broken", BROKEN, entry)
    # No lab: neither in the package nor on the command line.
    status, output, report = run_kit(site, tmp_path, "torch-broken", *SELECTION)
    assert (status, report) == (2, {}), output
    assert "the backend 'torch-broken' has no lab" in output
    assert "--lab package.module" in output
    lab = "hyper_parallel.testing.labs.torch_lab"
    status, output, report = run_kit(site, tmp_path, "torch-broken", "--lab", lab, *SELECTION)
    assert status == 1, output
    assert "torch-broken does not conform" in output
    assert not report["ok"]
    failed = {failure["check"].split("::")[1].split("[")[0]: failure["message"] for failure in report["failures"]}
    # Reductions by "avg" and the others gather or scatter; the tests of sums must fail, and say by how much.
    assert {"test_linear", "test_one_dimensional_mesh"} <= set(failed)
    assert "relative error 1.00e-03" in failed["test_linear"]
