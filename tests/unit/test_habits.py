"""Texts for people who work on the project fit the repository: its commands, pins and pages."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import hyper_parallel
from tests.unit.test_makefile import make

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "gates.yml"


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def pins(path: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+)==([\w.]+)", text(path), re.MULTILINE))


def commands_of_workflow() -> list[str]:
    """Read without a YAML parser, which not every environment has: one command a line."""
    runs = re.findall(r"^\s+- run: (.+)$", WORKFLOW.read_text(encoding="utf-8"), re.MULTILINE)
    matrix = re.search(r"^( +)command:\n((?:\1  - .+\n)+)", WORKFLOW.read_text(encoding="utf-8"), re.MULTILINE)
    assert matrix is not None and runs.count("${{ matrix.command }}") == 1
    return [run for run in runs if "${{" not in run] + [line.strip()[2:] for line in matrix.group(2).splitlines()]


@pytest.mark.parametrize("command", commands_of_workflow())
def test_hosted_ci_calls_make(command: str) -> None:
    program, *words = command.split()
    assert program == "make"
    done = make(*words)
    assert done.returncode == 0, done.stderr


def test_hosted_ci_runs_the_gates_for_every_change() -> None:
    assert {"make lint", "make test"} <= set(commands_of_workflow())
    assert re.search(r"^on:\n  push:\n    branches: \[main\]\n  pull_request:\n", WORKFLOW.read_text(), re.MULTILINE)


def test_pre_commit_runs_what_make_lint_runs() -> None:
    wanted = pins("ci/requirements-lint.txt")
    config = text(".pre-commit-config.yaml")
    revisions = dict(re.findall(r"repo: https://github.com/[\w-]+/([\w-]+)\n\s+rev: v([\d.]+)\n", config))
    assert revisions == {"ruff-pre-commit": wanted["ruff"], "mirrors-mypy": wanted["mypy"]}
    assert f"additional_dependencies: [numpy=={wanted['numpy']}]" in config


def test_pages_name_files_and_targets_that_are_there() -> None:
    targets = set(re.findall(r"^\.PHONY: (.+)$", text("Makefile"), re.MULTILINE)[0].split())
    folders = "hyper_parallel|tests|ci|docs|examples|platform|benchmarks"
    for page in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"):
        written = text(page)
        paths = re.findall(rf"(?<![\w/.])(?:{folders})/[\w./-]*[\w/]", written)
        assert [path for path in paths if not (ROOT / path).exists()] == [], page
        assert set(re.findall(r"(?:`|^    )make ([a-z][\w-]*)", written, re.MULTILINE)) <= targets, page
        links = [link for link in re.findall(r"\]\(([^)#]+)", written) if "://" not in link]
        assert [link for link in links if not (ROOT / link).exists()] == [], page


def test_the_first_day_shows_the_test_that_runs() -> None:
    shown = re.findall(r"```python\n(.*?)```", text("CONTRIBUTING.md"), re.DOTALL)
    (job,) = (block for block in shown if block.startswith("@on_mesh()"))
    assert job in text("tests/conformance/test_first_day.py")
    for block in shown:
        ast.parse(block if not block.startswith("    ") else f"class Verb:\n{block}")


def test_the_rule_of_the_first_day_is_where_the_page_says() -> None:
    assert "whole(named(x), range(batch, len(x)))" in text("hyper_parallel/core/rules/norm.py")


def test_changelog_has_the_usual_form() -> None:
    """The form is that of keepachangelog.com."""
    headings = re.findall(r"^## (.+)$", text("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])
    kinds = re.findall(r"^### (.+)$", text("CHANGELOG.md"), re.MULTILINE)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    released = re.fullmatch(r"\d+\.\d+\.\d+", hyper_parallel.__version__)
    assert not released or headings[1].startswith(f"[{hyper_parallel.__version__}]")
