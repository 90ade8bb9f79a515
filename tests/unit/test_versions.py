"""Releases of frameworks: those that are tested, and the word about others."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from hyper_parallel.platform import versions

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_warned", set())


@pytest.mark.parametrize(
    ("framework", "version"),
    [
        ("torch", "2.13.0+cpu"),
        ("torch", "2.14.1"),
        ("torch", "2.14.9"),
        ("torch", "2.15.0+cu132"),
        ("torch_npu", "2.14.0.post2"),
        ("mindspore", "2.10.0"),
    ],
)
def test_tested_versions_are_silent(framework: str, version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_of_untested(framework, version)


@pytest.mark.parametrize(
    ("framework", "version"),
    [
        ("torch", "2.12.1"),
        ("torch", "2.16.0"),
        ("torch", "3.0"),
        ("torch", "2.15.0a0+git1234"),
        ("torch_npu", "2.15.0"),
        ("mindspore", "2.1.0"),
        ("mindspore", "what?"),
    ],
)
def test_other_versions_are_mentioned_once(framework: str, version: str) -> None:
    with pytest.warns(RuntimeWarning, match=re.escape(f"but the installed version is {version}")) as seen:
        versions.warn_of_untested(framework, version)
        versions.warn_of_untested(framework, version)
    (warning,) = seen
    newest = versions.TESTED[framework][-1]
    assert f"pip install '{framework.replace('_', '-')}=={newest}'" in str(warning.message)


def test_several_versions_in_words() -> None:
    assert versions.tested_versions("torch") == "2.13.0, 2.14.0, 2.14.1 and 2.15.0"
    assert versions.tested_versions("mindspore") == "2.10.0"


@pytest.mark.parametrize(
    ("backend", "package", "framework"),
    [
        ("torch-cpu", "torch", "torch"),
        ("torch-cuda", "torch", "torch"),
        ("torch-npu", "torch-npu", "torch_npu"),
        ("mindspore", "mindspore", "mindspore"),
    ],
)
def test_gates_run_the_newest(backend: str, package: str, framework: str) -> None:
    pins = (ROOT / "platform" / backend / "requirements.txt").read_text(encoding="utf-8")
    assert re.findall(rf"^{package}==(\S+)", pins, re.MULTILINE) == [versions.TESTED[framework][-1]]


def test_torch_of_torch_npu() -> None:
    """torch_npu is built against the torch of its own number."""
    pins = (ROOT / "platform/torch-npu/requirements.txt").read_text(encoding="utf-8")
    both = dict(re.findall(r"^(torch|torch-npu)==(\S+)", pins, re.MULTILINE))
    assert both["torch"] == both["torch-npu"]
    assert both["torch"] in versions.TESTED["torch"]
