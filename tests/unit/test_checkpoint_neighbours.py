"""Damage in a neighbour stays there: `latest` and the saves next to it go on."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.checkpoint import CheckpointError, latest, load, save, tool
from hyper_parallel.checkpoint.directories import set_run
from hyper_parallel.checkpoint.index import LATEST, read_index
from hyper_parallel.checkpoint.tensor_files import TensorFile
from hyper_parallel.testing.indexes import change_index

RUN = "a" * 32


def text(content: str) -> Callable[[Path], Any]:
    return lambda path: (path / "index.json").write_text(content)


def put(*keys: Any) -> Callable[[Path], None]:
    """Put the last of ``keys`` where the others lead to, as JSON that is written there as it is."""
    *way, last, value = keys

    def change(content: Any) -> None:
        for key in way:
            content = content[key]
        content[last] = "here"

    return lambda path: change_index(path, change, lambda text: text.replace('"here"', value))


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def pipe(path: Path) -> None:
    (path / "index.json").unlink()
    os.mkfifo(path / "index.json")


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "an infinite time": put("time", "1e999"),
    "a negative infinite time": put("time", "-1e999"),
    "a time that is none": put("time", "NaN"),
    "a time of many digits": put("time", "9" * 4000),
    "a time before": put("time", "-1"),
    "a time that is a truth": put("time", "true"),
    "a time that is a fraction": put("time", "1.5"),
    "a time in a text": put("time", '"1764034216000000000"'),
    "an infinite size": put("files", '{"a": 1e999}'),
    "a size that is none": put("files", '{"a": NaN}'),
    "a negative size": put("files", '{"a": -1}'),
    "a size of many digits": put("files", f'{{"a": {"9" * 4000}}}'),
    "files that are a text": put("files", '"abc"'),
    "nested deep": put("values", nested(5_000)),
    "nested very deep": put("values", nested(1_000_000)),
    "tables nested deep": put("values", '{"a":' * 5_000 + "1" + "}" * 5_000),
    "only brackets": text("[" * 1_000_000),
    "sizes of many digits": put("tensors", '{"x": {"dtype": "int8", "shape": [9e9], "placement": "", "parts": []}}'),
    "a pipe": pipe,
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_neighbour(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    set_run(tmp_path, RUN)
    save({"step": 1}, tmp_path / "step-1")
    neighbour = save({"step": 2}, tmp_path / "step-2")
    damage(neighbour)
    assert latest(tmp_path) == tmp_path / "step-1"
    newest = save({"step": 3}, tmp_path / "step-3", keep=2)
    assert latest(tmp_path) == newest and read_index(newest).time < LATEST
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "step-2", "step-3"}
    for call in (lambda: load({"step": 0}, neighbour), lambda: tool.show(neighbour), lambda: read_index(neighbour)):
        with pytest.raises(CheckpointError, match=r"step-2/index\.json"):
            call()
    save({"step": 4}, neighbour, overwrite=True)
    assert load({"step": 0}, neighbour)["step"] == 4


def test_nested_deeper_than_python_calls(tmp_path: Path, monkeypatch: Any) -> None:
    """Some Pythons read JSON with another limit than that of calls."""
    set_run(tmp_path, RUN)
    save({"step": 1}, tmp_path / "step-1")
    put("values", nested(3_000))(save({"step": 2}, tmp_path / "step-2"))
    original, limit = json.loads, sys.getrecursionlimit()

    def loads(text: Any) -> Any:
        sys.setrecursionlimit(20_000)
        try:
            return original(text)
        finally:
            sys.setrecursionlimit(limit)

    monkeypatch.setattr(json, "loads", loads)
    assert latest(tmp_path) == tmp_path / "step-1"
    save({"step": 3}, tmp_path / "step-3", keep=2)
    with pytest.raises(CheckpointError, match=r"step-2/index\.json is damaged: RecursionError"):
        load({"step": 0}, tmp_path / "step-2")


def test_a_neighbour_of_the_last_moment(tmp_path: Path) -> None:
    """A checkpoint saved after it can be read all the same."""
    put("time", str(LATEST))(save({"step": 1}, tmp_path / "step-1"))
    save({"step": 2}, tmp_path / "step-2")
    assert read_index(tmp_path / "step-2").time == LATEST and load({"step": 0}, tmp_path / "step-2")["step"] == 2
    assert tool.show(tmp_path / "step-2")


def test_hidden_names_that_mean_nothing(tmp_path: Path) -> None:
    for name in ("...0123456789ab-1-1-01234567.replaced", "..replaced", ".a.0123456789ab-1-1-01234567.other"):
        (tmp_path / name).mkdir()
    assert latest(tmp_path) is None
    assert latest(save({"step": 1}, tmp_path / "step-1").parent) == tmp_path / "step-1"


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("pipe", "it is not a regular file"), (".", "Is a directory"), ("lost", "No such file")):
        with pytest.raises(CheckpointError, match=f"cannot be read: {words}"):
            TensorFile(tmp_path / name)
