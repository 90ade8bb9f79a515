"""Checks that damaged, truncated, foreign and outdated files raise an error on all ranks. The error names the file and
the entry."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel import Replicate, Shard, distribute_tensor
from hyper_parallel.checkpoint import CheckpointError, async_save, disk, latest, load, loading, save
from hyper_parallel.checkpoint.ranks import Collective
from hyper_parallel.checkpoint.tensor_files import TensorFile
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.indexes import change_index

FIRST, SECOND = "rank-00000.safetensors", "rank-00001.safetensors"


class OfRank:
    """An object with a different state on each rank."""

    per_rank = True

    def state_dict(self) -> dict[str, Any]:
        return {"value": 1}

    def load_state_dict(self, state: Any) -> None:
        assert state == {"value": 1}


def state_of(mesh: Any, scale: int = 1) -> dict[str, Any]:
    adapter = get_adapter()
    whole = np.arange(24, dtype=np.float32).reshape(6, 4) * scale
    return {
        "a": distribute_tensor(adapter.tensor(whole), mesh, [Shard(0)]),
        "b": adapter.tensor(np.arange(3, dtype=np.float32) * scale),
        "step": 3,
        "nest": {"bytes": b"123", "tuple": (1, 2), 5: 1.0, "inf": float("inf"), "array": np.ones(2)},
        "own": OfRank(),
    }


# ---------------------------------------------------------------------- how to damage a checkpoint
def index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Return a function that applies a change to the parsed index of a checkpoint."""
    return lambda path: change_index(path, change)


def put(*keys: Any) -> Callable[[Path], None]:
    """Return a function that sets an entry of the index. The last of ``keys`` is the value, and the others are its
    path."""
    *way, last, value = keys

    def change(content: Any) -> None:
        for key in way:
            content = content[key]
        content[last] = value

    return index(change)


def without(*keys: Any) -> Callable[[Path], None]:
    """Return a function that removes an entry of the index."""
    *way, last = keys

    def change(content: Any) -> None:
        for key in way:
            content = content[key]
        del content[last]

    return index(change)


def text(content: bytes, file: str = "index.json") -> Callable[[Path], None]:
    """Return a function that replaces the content of a file."""
    return lambda path: (path / file).write_bytes(content) and None  # type: ignore[func-returns-value]


def other(old: str, new: str) -> Callable[[Path], None]:
    """Return a function that replaces some text in the index."""

    def damage(path: Path) -> None:
        content = (path / "index.json").read_text()
        assert content.count(old) == 1
        (path / "index.json").write_text(content.replace(old, new))

    return damage


def cut(file: str, count: int) -> Callable[[Path], None]:
    """Return a function that removes bytes at the end of a file."""
    return lambda path: (path / file).write_bytes((path / file).read_bytes()[:-count]) and None  # type: ignore[func-returns-value]


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Return a function that changes the header of the first file of tensors, but not its size."""

    def damage(path: Path) -> None:
        content = (path / FIRST).read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        parsed = json.loads(content[8 : 8 + length])
        changed = change(parsed)
        new = json.dumps(parsed if changed is None else changed, separators=(",", ":")).encode()
        new += b" " * (length - len(new))
        (path / FIRST).write_bytes(struct.pack("<Q", len(new)) + new + content[8 + length :])
        put("files", FIRST, (path / FIRST).stat().st_size)(path)

    return damage


def entry(name: str, key: str, value: Any) -> Callable[[Path], None]:
    """Return a function that changes an entry of a header."""
    return header(lambda parsed: parsed[name].__setitem__(key, value))


def swap(path: Path) -> None:
    """Exchange the files of two ranks."""
    first = (path / FIRST).read_bytes()
    shutil.copy(path / SECOND, path / FIRST)
    (path / SECOND).write_bytes(first)
    index(lambda content: content.__setitem__("files", dict.fromkeys((FIRST, SECOND), 0)))(path)
    for name in (FIRST, SECOND):
        put("files", name, (path / name).stat().st_size)(path)


def flip(path: Path, file: str) -> None:
    """Return a function that flips one bit of the data."""
    content = bytearray((path / file).read_bytes())
    content[-1] ^= 1
    (path / file).write_bytes(content)


def replaced_by(name: str) -> Callable[[Path], None]:
    """Return a function that puts a file in place of a directory, or a directory in place of a file."""

    def damage(path: Path) -> None:
        target = path / name if name else path
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        target.write_bytes(b"x") if not name else target.mkdir()

    return damage


def foreign(*names: str) -> Callable[[Path], None]:
    """Return a function that replaces the checkpoint by a directory with only files of these names."""

    def damage(path: Path) -> None:
        shutil.rmtree(path)
        path.mkdir()
        for name in names:
            (path / name).write_bytes(b"x")

    return damage


def nested(path: Path) -> None:
    """Move the checkpoint into a subdirectory of itself."""
    path.rename(path.with_name(f"{path.name}-moved"))
    path.mkdir()
    path.with_name(f"{path.name}-moved").rename(path / "step-3")


CHANGED = ("index.json is damaged", "its checksum differs")
PARTS = ("tensors", "a", "parts")
#: name -> (how it is damaged, words of the error besides the path of the checkpoint)
DAMAGES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "nothing there": (shutil.rmtree, ("there is no checkpoint", "does not exist")),
    "a file": (replaced_by(""), ("is a file", "is a directory")),
    "an empty directory": (foreign(), ("has no index.json", "never completed")),
    "never completed": (lambda path: (path / "index.json").unlink(), ("has no index.json", "never completed")),
    "of torch": (foreign(".metadata", "__0_0.distcp"), ("another format", "torch.distributed.checkpoint")),
    "of Hugging Face": (foreign("model.safetensors"), ("in another format",)),
    "the directory above": (nested, ("holds 1 checkpoint(s)", "step-3", "latest")),
    "index is a directory": (replaced_by("index.json"), ("index.json cannot be read", "directory")),
    "index empty": (text(b""), ("index.json is damaged", "not JSON")),
    "index cut off": (cut("index.json", 20), ("index.json is damaged", "not JSON")),
    "index of zeros": (text(bytes(100)), ("index.json is damaged", "not JSON")),
    "index not UTF-8": (text(b"\xff\xfe{}"), ("index.json is damaged", "not JSON")),
    "index too deep": (text(b"[" * 100_000), ("index.json is damaged", "not JSON")),
    "index a list": (text(b"[]"), ("index.json is not the index of a checkpoint",)),
    "index of something else": (put("format", "other"), ("index.json is not the index of a checkpoint",)),
    "index without format": (without("format"), ("index.json is not the index of a checkpoint",)),
    "a later version": (put("version", 3), ("index.json is of version 3", "load it with the release")),
    "a version that is a truth": (put("version", True), ("index.json is of version True",)),
    "version 0": (put("version", 0), ("index.json is of version 0",)),
    "version 1, which has no checksum": (put("version", 1), CHANGED),
    "another step": (other('"step":3', '"step":7'), CHANGED),
    "another checksum": (other('"sum":"', '"sun":"'), CHANGED),
    "a tensor of another name": (other('"b":{"dtype"', '"c":{"dtype"'), CHANGED),
    "no version": (without("version"), ("index.json is of version None",)),
    "no tensors": (without("tensors"), ("index.json is damaged", "tensors")),
    "no files": (without("files"), ("index.json is damaged", "files")),
    "no values": (without("values"), ("index.json is damaged", "values")),
    "no time": (without("time"), ("index.json is damaged", "time")),
    "time is no number": (put("time", "noon"), ("index.json is damaged", "noon")),
    "tensors a list": (put("tensors", []), ("index.json is damaged",)),
    "no shape": (without("tensors", "a", "shape"), ("index.json is damaged", "shape")),
    "negative shape": (put("tensors", "a", "shape", [-6, 4]), ("index.json is damaged", "[-6, 4]")),
    "shape of fractions": (put("tensors", "a", "shape", [6.5, 4]), ("index.json is damaged", "[6.5, 4]")),
    "shape a text": (put("tensors", "a", "shape", "64"), ("index.json is damaged", "'64'")),
    "larger shape": (put("tensors", "a", "shape", [2**62, 4]), ("index.json is damaged", "'a'", "do not cover it")),
    "unknown dtype": (put("tensors", "a", "dtype", "float7"), ("index.json is damaged", "'a'", "'float7'")),
    "a part in no file": (put(*PARTS, 0, 2, 7), ("index.json is damaged",)),
    "a part in a negative file": (put(*PARTS, 0, 2, -1), ("index.json is damaged", "-1")),
    "a part outside": (put(*PARTS, 1, 0, [4, 0]), ("index.json is damaged", "'a'", "sizes (3, 4) at offsets (4, 0)")),
    "a part of other dimensions": (put(*PARTS, 1, [[3], [3], 1, "a"]), ("index.json is damaged", "'a'", "(3,)")),
    "a part less": (without(*PARTS, 1), ("index.json is damaged", "'a'", "do not cover it")),
    "a part twice": (index(lambda c: c["tensors"]["a"]["parts"].__setitem__(1, c["tensors"]["a"]["parts"][0])),
                     ("index.json is damaged", "'a'", "overlap")),
    "parts overlap": (put(*PARTS, 1, 0, [2, 0]), ("index.json is damaged", "'a'", "overlap")),
    "part without a name": (put(*PARTS, 0, [[0, 0], [3, 4], 0]), ("index.json is damaged",)),
    "another name of nothing": (put("aliases", "c", "nothing"), ("index.json is damaged", "'nothing'")),
    "a file outside": (put("files", "../evil", 3), ("index.json is damaged", "outside")),
    "a hidden file": (put("files", ".evil", 3), ("index.json is damaged", "outside")),
    "size is no number": (put("files", FIRST, "many"), ("index.json is damaged", "many")),
    "checksums a list": (put("checksums", []), ("index.json is damaged", "checksums")),
    "unknown kind of value": (put("values", "step", {"$": "code"}), ("index.json is damaged", "'code'")),
    "value without data": (put("values", "nest", {"$": "bytes"}), ("index.json is damaged", "bytes")),
    "a pair of three": (put("values", "nest", {"$": "dict", "items": [[1, 2, 3]]}), ("index.json is damaged", "dict")),
    "an optimizer without groups": (put("values", "step", {"$": "optimizer", "groups": [3], "numbers": {}}),
                                    ("index.json is damaged", "optimizer")),
    "a state of a rank is missing": (put("values", "own", "of", [0, 5]), ("index.json is damaged", "[0, 5]")),
    "bytes that are none": (put("values", "nest", {"$": "bytes", "data": "!"}), ("value in the index is damaged", "!")),
    "an array of objects": (put("values", "nest", {"$": "array", "dtype": "|O", "shape": [1], "data": "AAAAAAAAAAA="}),
                            ("value in the index is damaged", "|O")),
    "an array of another size": (put("values", "nest", {"$": "array", "dtype": "<f4", "shape": [3], "data": "AAA="}),
                                 ("value in the index is damaged", "[3]")),
    "a place for a tensor": (put("values", "step", {"$": "tensor", "name": "lost"}), ("'lost'", "does not list")),
    "a file is missing": (lambda path: (path / SECOND).unlink(), (f"{SECOND} cannot be read", "No such file")),
    "a file is a directory": (replaced_by(SECOND), (SECOND, "directory")),
    "a file is cut off": (cut(SECOND, 1), (SECOND, "bytes instead of", "truncated")),
    "a file is longer": (lambda path: (path / FIRST).open("ab").write(b"x") and None, (FIRST, "bytes instead of")),
    "a file is empty": (text(b"", SECOND), (SECOND, "0 bytes instead of")),
    "files are swapped": (swap, (FIRST, "has no entry 'a[0:3, :]'")),
    "the header is too long": (lambda path: header_length(path, 2**40), (FIRST, "header should have")),
    "the header is no JSON": (lambda path: header_length(path, 16), (FIRST, "header is not JSON")),
    "the header is a list": (header(lambda parsed: []), (FIRST, "header is not a JSON object")),
    "an entry of an unknown dtype": (entry("a[0:3, :]", "dtype", "F7"), (FIRST, "'a[0:3, :]'", "F7")),
    "an entry of another dtype": (entry("a[0:3, :]", "dtype", "I32"), (FIRST, "'a[0:3, :]'", "int32", "float32")),
    "an entry of another shape": (entry("a[0:3, :]", "shape", [4, 3]), (FIRST, "'a[0:3, :]'", "(4, 3)", "(3, 4)")),
    "an entry of another size": (entry("a[0:3, :]", "shape", [3, 5]), (FIRST, "'a[0:3, :]'", "(3, 5)")),
    "an entry that ends before it begins": (entry("a[0:3, :]", "data_offsets", [48, 0]), (FIRST, "'a[0:3, :]'")),
    "an entry behind the end": (entry("a[0:3, :]", "data_offsets", [999, 1047]), (FIRST, "'a[0:3, :]'", "the file at")),
    "an entry without offsets": (header(lambda parsed: parsed["a[0:3, :]"].pop("data_offsets") and None),
                                 (FIRST, "'a[0:3, :]'")),
    "an entry is missing": (header(lambda parsed: parsed.pop("a[0:3, :]") and None), (FIRST,)),
}  # fmt: skip


def header_length(path: Path, length: int) -> None:
    content = (path / FIRST).read_bytes()
    (path / FIRST).write_bytes(struct.pack("<Q", length) + content[8:])


def load_error(path: Path, mesh: Any, **options: Any) -> str:
    """Return the error message of a load. Check that the load changed nothing."""
    adapter, state = get_adapter(), state_of(mesh, 0)
    try:
        load(state, path, mesh=mesh, **options)
    except CheckpointError as error:
        assert not adapter.numpy(state["a"]).any() and not adapter.numpy(state["b"]).any()
        return str(error)
    raise AssertionError(f"{path.name}: no error")


@spmd.on_mesh()
def damaged(mesh: Any, directory: str) -> dict[str, str]:
    """Damage a checkpoint in each way, and return the error of each load."""
    ranks, whole = Collective(mesh), Path(directory) / "whole"
    save(state_of(mesh), whole, mesh=mesh)
    found = {}
    for number, (name, (damage, _)) in enumerate(DAMAGES.items()):
        path = Path(directory) / str(number) / "step-3"
        if mesh.get_rank() == 0:
            shutil.copytree(whole, path)
            damage(path)
        ranks.gather(None)
        found[name] = load_error(path, mesh)
        assert latest(path.parent) in (None, path), name
    assert load(state_of(mesh, 0), whole, mesh=mesh)["step"] == 3
    return found


@spmd.on_mesh()
def flipped(mesh: Any, directory: str) -> list[str]:
    """Check that a flipped bit is found if checksums were saved and are compared."""
    ranks, path = Collective(mesh), Path(directory) / "flipped"
    save(state_of(mesh), path, mesh=mesh, checksums=False)
    with pytest.raises(ValueError, match="was saved without checksums"):
        load(state_of(mesh), path, mesh=mesh, verify=True)
    assert load(state_of(mesh, 0), path, mesh=mesh)["step"] == 3
    path = save(state_of(mesh), path, mesh=mesh, overwrite=True)
    load(state_of(mesh, 0), path, mesh=mesh)
    found = []
    for file in (SECOND, FIRST):
        ranks.gather(None)
        if mesh.get_rank() == 0:
            flip(path, file)
        ranks.gather(None)
        assert load(state_of(mesh, 0), path, mesh=mesh, verify=False)["step"] == 3
        found += [load_error(path, mesh), load_error(path, mesh, verify=True)]
        # Nothing damaged is asked for.
        assert load({"step": 0}, path, mesh=mesh)["step"] == 3
        ranks.gather(None)
        if mesh.get_rank() == 0:
            flip(path, file)
    return found


@spmd.on_mesh()
def shared_out(mesh: Any, directory: str) -> list[list[str]]:
    """Return the entries whose checksums this rank compares. If all ranks load the same entries, these are its share of
    them. Otherwise the rank compares all entries that it loads."""
    adapter, names = get_adapter(), [f"x{i}" for i in range(6)]
    whole = {name: adapter.tensor(np.full(5, i, np.float32)) for i, name in enumerate(names)}
    path = save(whole, Path(directory) / "shared-out", mesh=mesh)
    seen, summed = [], TensorFile.checksum
    for asked in (names, names[: 2 + mesh.get_local_rank()]):
        compared: list[str] = []

        def checksum(file: TensorFile, entry: str, compared: list[str] = compared) -> int:
            compared.append(entry)
            return summed(file, entry)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TensorFile, "checksum", checksum)
            state = {name: adapter.tensor(np.zeros(5, np.float32)) for name in asked}
            load(state, path, mesh=mesh)
        assert all((adapter.numpy(x) == names.index(name)).all() for name, x in state.items())
        seen.append(sorted(compared))
    return seen


@spmd.on_mesh()
def late(mesh: Any, directory: str) -> list[str]:
    """Return the errors on all ranks if another program saves under the same name before this save ends.

    Ordinary and asynchronous saves are tried.
    """
    ranks, other, path = Collective(mesh), Path(directory) / "other", Path(directory) / "late" / "step-3"
    save({"step": 4}, other, mesh=mesh)
    found = []

    def put(kind: str, about: Path) -> None:
        if kind == "rename" and not path.exists():
            shutil.copytree(other, path)

    for call in (save, async_save):
        ranks.gather(None)
        with pytest.MonkeyPatch.context() as patch:
            if mesh.get_rank() == 0:
                shutil.rmtree(path, ignore_errors=True)
                patch.setattr(disk, "watcher", put)
            with pytest.raises(CheckpointError) as error:
                under_way = call(state_of(mesh), path, mesh=mesh)
                under_way.result()  # type: ignore[union-attr]
        found.append(str(error.value))
        assert load({"step": 0}, path, mesh=mesh) == {"step": 4}
        ranks.gather(None)
        assert [x.name for x in path.parent.iterdir() if not x.name.endswith(".ranks")] == ["step-3"]
    return found


@spmd.on_mesh()
def cut(mesh: Any, directory: str) -> list[str]:
    """Return the errors on all ranks if a file is truncated after all ranks opened it, for each placement."""
    adapter, ranks = get_adapter(), Collective(mesh)
    whole = np.arange(3 * 2**13, dtype=np.float32).reshape(6, 2**12)
    found = []
    for number, placement in enumerate([Shard(0), Shard(1), Replicate()]):
        path = Path(directory) / str(number) / "step-3"
        save({"a": distribute_tensor(adapter.tensor(whole), mesh, [Shard(0)])}, path, mesh=mesh, checksums=True)
        x, original = distribute_tensor(adapter.tensor(whole * 0), mesh, [placement]), loading.read_into

        def read_into(*arguments: Any, path: Path = path, original: Any = original) -> None:
            os.truncate(path / SECOND, 2**12)
            original(*arguments)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as error:
            patch.setattr(loading, "read_into", read_into)
            load({"a": x}, path, mesh=mesh)
        ranks.gather(None)
        found.append(str(error.value))
    return found


def test_cut_during_a_load(pool: Any, tmp_path: Path) -> None:
    """Check that truncated files raise an error. With memory-mapped files, missing pages would kill the ranks by a
    signal."""
    messages, others = pool.run(2, cut, str(tmp_path))
    assert messages == others
    for number, message in enumerate(messages):
        file = tmp_path / str(number) / "step-3" / SECOND
        assert f"{file} became shorter while it was being read: it now ends inside entry 'a[3:6, :]'" in message, (
            message
        )


def test_late(pool: Any, tmp_path: Path) -> None:
    found = pool.run(2, late, str(tmp_path))
    assert found[0] == found[1]
    for message in found[0]:
        assert "on rank 0" in message and str(tmp_path / "late" / "step-3") in message
        assert re.search(r"process \d+ on .* \(run [0-9a-f]+\) created or removed this path", message), message


@pytest.mark.parametrize("world_size", [2])
def test_damaged(pool: Any, tmp_path: Path, world_size: int) -> None:
    assert len(DAMAGES) >= 40
    found = pool.run(world_size, damaged, str(tmp_path))
    for number, (name, (_, words)) in enumerate(DAMAGES.items()):
        message = found[0][name]
        assert all(of_rank[name] == message for of_rank in found), name
        missing = [word for word in (str(tmp_path / str(number)), *words) if word not in message]
        assert not missing, f"{name}: {missing} not in {message}"


def test_what_is_compared(pool: Any, tmp_path: Path) -> None:
    """Check that ranks that need the same entries divide the comparison of checksums."""
    first, second = pool.run(2, shared_out, str(tmp_path))
    assert len(first[0]) == len(second[0]) == 3
    assert sorted(first[0] + second[0]) == [f"x{i}" for i in range(6)]
    assert (first[1], second[1]) == (["x0", "x1"], ["x0", "x1", "x2"])


def test_checksums(pool: Any, tmp_path: Path) -> None:
    messages = pool.run(2, flipped, str(tmp_path))
    assert messages[0] == messages[1]
    damages = [(SECOND, "a[3:6, :]")] * 2 + [(FIRST, "b")] * 2
    for message, (file, piece) in zip(messages[0], damages, strict=True):
        assert f"{file}: entry {piece!r} is damaged: its checksum differs" in message
