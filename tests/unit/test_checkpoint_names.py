"""Names that mean something to a shell or to a file system: of checkpoints, and those that an index says."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.checkpoint import CheckpointError, disk, jobs, latest, load, save, tool
from hyper_parallel.checkpoint.index import read_index
from hyper_parallel.checkpoint.ranks import Alone
from hyper_parallel.platform import get_platform
from hyper_parallel.testing.indexes import change_index

NAMES = [
    "lr[0.1]",
    "[!a]*",
    "*",
    "?",
    "a*b",
    "**",
    "step-1.replaced",
    "~",
    "$HOME",
    "a\nb",
    "ä",
    " ",
    "-r",
    "a.b-1-1.draft",
]


def put(path: Path, key: str, value: Any) -> None:
    change_index(path, lambda content: content.update({key: value}))


@pytest.mark.parametrize("name", NAMES)
def test_names_of_checkpoints(tmp_path: Path, name: str, monkeypatch: Any) -> None:
    """An overwritten one leaves nothing, and one that was being replaced at a crash is found."""
    path, other = tmp_path / name, tmp_path / "a0b"
    save({"step": 0}, other)
    for step in range(3):
        save({"step": step}, path, overwrite=True)
        assert {x.name for x in tmp_path.iterdir()} == {name, "a0b"}
    assert load({"step": 0}, path)["step"] == 2 and latest(tmp_path) == path
    crashed = tmp_path / "crashed"
    draft: list[Path] = []

    def crash(kind: str, about: Path) -> None:
        """The process ends here: only the bytes on the disk are left."""
        if kind == "rename" and about.name.startswith(".") and about.name.endswith(".draft") and not draft:
            draft.append(about)
            shutil.copytree(tmp_path, crashed, ignore=lambda folder, names: [x for x in names if x == "crashed"])

    monkeypatch.setattr(disk, "watcher", crash)
    save({"step": 3}, path, overwrite=True)
    monkeypatch.setattr(disk, "watcher", None)
    assert not (crashed / name).exists()
    assert load({"step": 0}, crashed / name)["step"] == 2
    found = latest(crashed)
    assert found is not None and load({"step": 0}, found)["step"] == 2
    assert load({"step": 0}, path)["step"] == 3


@pytest.mark.parametrize(
    "run", ["*", "a/b", "[a]", "", ".", "..", "a\nb", "a" * 65, 3, None, ["a"], {"a": 1}, "a b", "ä"]
)
def test_what_an_index_says_of_the_run(tmp_path: Path, run: Any) -> None:
    """A checkpoint of a run that no program has is not loaded. Later saves work, and leave the others' drafts alone."""
    other = tmp_path / ".step-9.0123456789ab-cd.draft"
    other.mkdir()
    path = save({"step": 1}, tmp_path / "step-1")
    job = jobs.prepare({"step": 5}, tmp_path / "step-5", Alone(), get_platform(), None, False, False, False)
    put(path, "run", run)
    for call in (lambda: load({"step": 0}, path), lambda: tool.show(path)):
        with pytest.raises(CheckpointError, match=r"index\.json is damaged: .* is not the identifier of a run"):
            call()
    assert latest(tmp_path) is None
    assert latest(save({"step": 2}, tmp_path / "step-2", keep=1).parent) == tmp_path / "step-2"
    jobs.write(job, Alone())
    assert {x.name for x in tmp_path.iterdir()} == {other.name, "step-1", "step-2", "step-5"}


@pytest.mark.parametrize(
    "name", ["a\0b", "\ud800", "", ".", "..", "a/b", "a\\b", ".hidden", "C:evil", "a" * 300, "a\nb", "*", "-r"]
)
def test_what_an_index_says_of_files(tmp_path: Path, name: str) -> None:
    """File names in an index are those that a save gives; nothing else is opened or looked for."""
    path = save({"step": 1}, tmp_path / "step-1")
    put(path, "files", {name: 3})
    with pytest.raises(
        CheckpointError, match=r"index\.json is damaged: .*is not the name of a file of a checkpoint"
    ) as error:
        load({"step": 0}, path)
    assert str(error.value).isprintable()
    assert latest(tmp_path) is None
    save({"step": 2}, tmp_path / "step-2", keep=1)


@pytest.mark.parametrize("writer", ["process 1 on \x1b[2Ja", "a" * 201, 3, ["a"]])
def test_what_an_index_says_of_its_writer(tmp_path: Path, writer: Any) -> None:
    """The writer in an index is shown in messages if it has the form that a save writes."""
    path = save({"step": 1}, tmp_path / "step-1")
    put(path, "writer", writer)
    assert read_index(path).writer == ""
    put(path, "writer", "process 1 on node-7")
    assert read_index(path).writer == "process 1 on node-7"
