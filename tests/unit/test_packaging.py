"""The installed package: the wheel, its version, and the names that type checkers and users see."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import hyper_parallel
from hyper_parallel import mindspore
from hyper_parallel.platform import PlatformError
from hyper_parallel.public_names import HOME_OF

ROOT = Path(__file__).parents[2]


def parsed(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built as pip builds it, from a copy of its sources; nothing is downloaded."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "hyper_parallel", source / "hyper_parallel", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "platform", source / "platform")  # must stay out
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    program = f"import setuptools.build_meta; setuptools.build_meta.build_wheel({str(target)!r})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=source, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    (built,) = target.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_holds_the_package_and_its_marker_of_types(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert "hyper_parallel/py.typed" in names
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "hyper_parallel").rglob("*.py")}
    assert modules <= names
    assert {name.split("/")[0] for name in names} == {"hyper_parallel", f"hyper_parallel-{version(wheel)}.dist-info"}


def version(wheel: zipfile.ZipFile) -> str:
    metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    lines = wheel.read(metadata).decode().splitlines()
    return next(line.removeprefix("Version: ") for line in lines if line.startswith("Version: "))


def test_one_version(wheel: zipfile.ZipFile) -> None:
    assert version(wheel) == hyper_parallel.__version__
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in settings and hyper_parallel.__version__ not in settings


def test_type_checkers_see_the_names_that_are_there() -> None:
    """The imports under ``TYPE_CHECKING`` are those of ``HOME_OF``: a name must be entered in both."""
    blocks = [
        node
        for node in parsed("hyper_parallel/__init__.py").body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {
        alias.asname: (node.module, alias.name)
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {name: (home, name) for name, home in HOME_OF.items()}


def test_the_program_that_is_type_checked_imports_every_public_name() -> None:
    path = "tests/unit/typed_program.py"
    imports = [node for node in parsed(path).body if isinstance(node, ast.ImportFrom)]
    imported = {alias.name for node in imports if node.module == "hyper_parallel" for alias in node.names}
    assert imported == set(hyper_parallel.__all__)
    assert f'"{path}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8"), "mypy is not told to look at it"


def test_importing_the_functions_for_mindspore_imports_no_framework() -> None:
    code = (
        "import sys; from hyper_parallel.mindspore import grad, value_and_grad\n"
        "assert not {'torch', 'mindspore'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", ["grad", "value_and_grad"])
def test_on_another_platform_they_say_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mindspore, "get_platform", lambda: SimpleNamespace(name="torch-cpu"))
    with pytest.raises(PlatformError, match=f"hyper_parallel.mindspore.{name} .* HYPER_PARALLEL_PLATFORM=mindspore"):
        getattr(mindspore, name)(lambda x: x)


def test_the_commands_need_no_pytest() -> None:
    """A plain install has no pytest: only the conformance kit imports it."""
    code = (
        "import sys; sys.modules['pytest'] = None\n"
        "import hyper_parallel.testing.comparisons, hyper_parallel.testing.plan_check\n"
        "from hyper_parallel.cli import checking, environment, launch, main, planning, selftest\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("theirs", ["collectives", "core/fully_shard"])
@pytest.mark.parametrize("first", [True, False])
def test_another_package_of_the_name_is_refused(tmp_path: Path, theirs: str, first: bool) -> None:
    """Whichever of the two Python would import, where it is this one."""
    (tmp_path / "hyper_parallel" / theirs).mkdir(parents=True)  # without __init__.py Python goes on to this package
    places = [str(tmp_path), str(ROOT)] if first else [str(ROOT), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, "-c", "import hyper_parallel"]
    done = subprocess.run(command, cwd=tmp_path.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    sentence = f"ImportError: {tmp_path}/hyper_parallel holds files of mindspore-ai/hyper-parallel, another package"
    assert sentence in done.stderr and "pip uninstall hyper-parallel" in done.stderr


def test_metadata(wheel: zipfile.ZipFile) -> None:
    """The metadata that an index shows of the package."""
    metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    text = wheel.read(metadata).decode()
    fields = [line.partition(": ")[::2] for line in text.split("\n\n")[0].splitlines()]
    assert {("License-Expression", "Apache-2.0"), ("Requires-Python", ">=3.10")} <= set(fields)
    assert {"Author", "Keywords", "Summary", "Description-Content-Type"} <= {name for name, _ in fields}
    classifiers = {value for name, value in fields if name == "Classifier"}
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)} <= classifiers
    assert {value for name, value in fields if name == "Provides-Extra"} >= {"torch", "mindspore", "npu", "cli", "docs"}
