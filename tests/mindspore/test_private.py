"""Private parts of MindSpore are checked before they are used."""

from __future__ import annotations

import importlib
import importlib.util
import re
from types import ModuleType
from typing import Any

import mindspore
import pytest

from hyper_parallel.platform.mindspore.basics import private


def load() -> ModuleType:
    """The module once more, under another name, as it is with the MindSpore of this moment."""
    spec = importlib.util.spec_from_file_location("private_once_more", private.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tested_mindspore_has_all_of_it() -> None:
    loaded = load()
    names = [
        name for name in private.__all__ if name not in ("UnknownMindSporeError", "Casts", "nodes_below")
    ]  # its own
    assert [getattr(loaded, name) for name in names] == [getattr(private, name) for name in names]


@pytest.mark.parametrize("other", [None, 5])
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("common._grad_function", "_Function"),
        ("_c_expression", "FunctionBase"),
        ("_c_expression", "NoFallbackGuard"),
        ("common.api", "_no_grad"),
        ("common.api", "_pynative_executor"),
        ("communication._comm_helper", "GlobalComm"),
        ("_c_expression.typing", "type_id_to_type"),
    ],
)
def test_missing_or_different(monkeypatch: pytest.MonkeyPatch, module: str, name: str, other: Any) -> None:
    owner = importlib.import_module(f"mindspore.{module}")
    if other is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, other)
    expected = (
        f"mindspore.{module}.{name} is missing from MindSpore {mindspore.__version__}, or is not what HyperParallel "
        "expects. Use the version of MindSpore that is tested: 2.10.0"
    )
    with pytest.raises(RuntimeError, match=re.escape(expected)):
        load()
