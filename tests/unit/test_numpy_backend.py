"""The NumPy backend, a package of its own: installed, found through its entry points, checked by the conformance kit.

Everything is installed into a folder of the test and run from there. An author of a backend has it so. The backend
brings only the requirements of the contract, so any use in core beyond them fails here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.contract.members import TensorMembers
from hyper_parallel.testing.extent import everything

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "examples/numpy_backend"
#: Three ranks, of which some have empty shards; without repetitions, and without three files that call what others call
#: in more combinations. `make nightly` has the whole kit.
SIZES = [] if everything() else ["--world-sizes", "3", "--quick"]
if SIZES:
    SIZES += ["-k", "not (test_style_matrix or test_views or test_kept_parameters)"]
#: Styles and redistributions on two ranks: every collective, forward and backward.
SELECTION = ["--world-sizes", "2", "-k", "test_linear or test_one_dimensional_mesh or test_other_reductions"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library and the example installed."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # Copies: a build leaves files next to the sources, and takes in those that an earlier one left.
    for name in ("hyper_parallel", EXAMPLE):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    site = tmp_path_factory.mktemp("site")
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", site, source, source / EXAMPLE]
    subprocess.run(command, check=True, cwd=source, stdout=subprocess.DEVNULL, timeout=180)
    return site


def environment(site: Path) -> dict[str, str]:
    """The environment of a user who has installed both, and chosen no platform."""
    kept = {k: v for k, v in os.environ.items() if k not in ("HYPER_PARALLEL_PLATFORM", "HYPER_PARALLEL_ADAPTER")}
    return {**kept, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}


def run_kit(site: Path, folder: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Run the kit outside the repository; returns exit status, output and the report, if one was written."""
    report = folder / "report.json"
    completed = subprocess.run(
        [sys.executable, "-m", "hyper_parallel.testing.conformance", *arguments, "--report", str(report)],
        cwd=folder,
        env=environment(site),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    return completed.returncode, completed.stdout, json.loads(report.read_text()) if report.exists() else {}


def test_conforms(site: Path, tmp_path: Path) -> None:
    """Forward and backward."""
    markdown = tmp_path / "report.md"
    status, output, report = run_kit(site, tmp_path, "numpy", *SIZES, "--report", str(markdown))
    assert status == 0, output
    assert (report["backend"], report["adapter"], report["ok"]) == ("numpy", "numpy_backend.adapter", True)
    assert report["complete"] == (not SIZES)
    assert ("numpy passes the checks that were asked for" if SIZES else "numpy conforms") in output
    # Short ways, dry runs and tensors without data are torch's and MindSpore's.
    skipped = {
        "tensors of this framework have no hooks",
        "every model of this framework has values",
        "this platform does not differentiate by itself",
        "this platform has no short ways",
        "this platform does not support optimizers",
    }
    if SIZES:
        skipped |= {f"{n} ranks were not asked for" for n in (1, 2, 4)} | {"random programs need 4 ranks"}
    else:
        skipped |= {"programs for this framework do not have this"}
    assert set(report["skip_reasons"]) == skipped
    assert sum(group["passed"] for group in report["groups"]) > (250 if SIZES else 900)
    assert ("| styles | 16 | 0 | 0 |" if SIZES else "| styles | 64 | 0 | 0 |") in markdown.read_text()


MEMBERS = """
import json
from numpy_backend.array import Array
import numpy_backend.platform as p
print(json.dumps([sorted(vars(Array)), [n for n in p.NumpyPlatform.__dict__ if not n.startswith("_")]]))
"""
#: Python's own, and the attributes that the backend keeps in an array.
OF_PYTHON = {"__doc__", "__module__", "__init__", "__slots__", "__hash__", "__repr__", "__annotations__"}
OWN = {"value", "node", "writes", "_grad", "__dict__", "__weakref__", "__static_attributes__", "__firstlineno__"}
OPERATORS = """add radd sub rsub mul rmul truediv rtruediv mod pow neg invert matmul gt ge lt le eq ne and or iadd isub
imul"""


def test_arrays_have_the_members_of_the_contract_and_no_others(site: Path) -> None:
    command = [sys.executable, "-c", MEMBERS]
    done = subprocess.run(command, env=environment(site), cwd=site, capture_output=True, text=True, check=True)
    members, verbs = map(set, json.loads(done.stdout))
    declared = {name for name, x in vars(TensorMembers).items() if isinstance(x, (property, FunctionType))}
    declared = declared - {"__init__", "__subclasshook__"} | {f"__{name}__" for name in OPERATORS.split()}
    assert members - OF_PYTHON - OWN == declared
    # It brings all required members; the rest answers for itself, but for members that are kept for later.
    assert Platform.__abstractmethods__ <= verbs


def test_the_page_shows_the_example() -> None:
    page = (ROOT / "docs/writing_a_backend.md").read_text(encoding="utf-8")
    code = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / EXAMPLE).rglob("*.*") if path.suffix in (".py", ".toml")
    )
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    blocks += [
        textwrap.dedent(block) for block in re.findall(r"(?:^    .*\n)+", page, re.MULTILINE) if "numpy =" in block
    ]
    assert len(blocks) == 11
    for block in blocks:
        assert block in code, block


BROKEN = """
from numpy_backend.array import Array
from numpy_backend.platform import NumpyPlatform

class Broken(NumpyPlatform):
    name = "numpy-broken"

    def all_gather(self, local, group, size):
        return Array(super().all_gather(local, group, size).value * 1.001)
"""


def install_by_hand(site: Path, name: str, module: str, entry_points: str) -> None:
    """Write the files that an installer leaves of a package of one module."""
    (site / f"{name}.py").write_text(module)
    information = site / f"{name}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(entry_points)


def test_kit_catches_a_backend_that_adds_wrongly(site: Path, tmp_path: Path) -> None:
    entry = "[hyper_parallel.platforms]\nnumpy-broken = numpy_broken:Broken\n"
    install_by_hand(site, "numpy_broken", BROKEN, entry)
    # No adapter: neither in the package nor on the command line.
    status, output, report = run_kit(site, tmp_path, "numpy-broken", *SELECTION)
    assert (status, report) == (2, {}), output
    assert "the backend 'numpy-broken' has no adapter" in output
    assert "--adapter package.module" in output
    status, output, report = run_kit(site, tmp_path, "numpy-broken", "--adapter", "numpy_backend.adapter", *SELECTION)
    assert status == 1, output
    assert "numpy-broken does not conform" in output
    assert not report["ok"] and not report["complete"]
    assert report["skip_reasons"]["4 ranks were not asked for"] > 0
    failed = {failure["check"].split("::")[1].split("[")[0]: failure["message"] for failure in report["failures"]}
    assert {"test_linear", "test_one_dimensional_mesh"} <= set(failed)
    assert "relative error" in failed["test_linear"]
