"""Refusals that other tests do not come to, without a framework: damaged files, names that are taken, a namesake."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hyper_parallel.checkpoint import CheckpointError, disk, targets, values
from hyper_parallel.checkpoint.directories import Draft
from hyper_parallel.checkpoint.saving import AsyncSave
from hyper_parallel.checkpoint.tensor_files import TensorFile
from hyper_parallel.cli import launch
from hyper_parallel.cli.main import main
from hyper_parallel.core.mesh import native as native_meshes
from hyper_parallel.core.rules import counter
from hyper_parallel.namesake import refuse_namesake


def weights(path: Path, header: dict, data: bytes) -> TensorFile:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return TensorFile(path, path.stat().st_size)


def too_short(folder: Path) -> None:
    (folder / "a").write_bytes(b"1234")
    TensorFile(folder / "a", 4)


def too_long(folder: Path) -> None:
    weights(folder / "a", {"x": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, b"12345")


def taken(folder: Path) -> None:
    (folder / "a").touch()
    (folder / "b").touch()
    disk.rename(folder / "a", folder / "b")


def not_shared(folder: Path) -> None:
    Draft(folder / "step-1", "token").check()


def unknown_kind(folder: Path) -> None:
    values.decode({values.KIND: "date", "value": "today"})


def no_such_dtype(folder: Path) -> None:
    """A backend that has few dtypes."""
    index: Any = SimpleNamespace(find=lambda name: name, tensors={"x": SimpleNamespace(dtype="bfloat16")})
    filling: Any = SimpleNamespace(index=index, platform=SimpleNamespace(dtypes={}, name="mine"))
    targets.Filling.new_tensor(filling, "x", None)


def no_counter(folder: Path) -> None:
    """A backend that names no dtypes."""
    mesh: Any = SimpleNamespace(platform=SimpleNamespace(dtypes={}, name="mine"))
    counter.request(mesh, True)


def slice_elsewhere(folder: Path) -> None:
    root: Any = SimpleNamespace(get_coordinate=lambda: None, get_rank=lambda: 3)
    known: Any = SimpleNamespace(names=("tp",))
    native_meshes._slice_like(root, known)


def namesake(folder: Path) -> None:
    (folder / "hyper_parallel" / "collectives").mkdir(parents=True)
    refuse_namesake([str(folder)])


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (too_short, CheckpointError, "is damaged, or is not a safetensors file: it has 4 bytes"),
        (too_long, CheckpointError, "is damaged, or is not a safetensors file: its data ends at byte"),
        (taken, FileExistsError, "b exists already"),
        (not_shared, CheckpointError, "save to a file system that all ranks share"),
        (unknown_kind, CheckpointError, "'date' is not a known kind of value"),
        (no_such_dtype, targets._MisfitError, "tensor 'x' has dtype bfloat16, which mine does not support"),
        (no_counter, TypeError, "mine has no counter-based generator: leave parallel_rng out"),
        (slice_elsewhere, ValueError, "cannot take a slice on a rank outside of the mesh: .* does not have rank 3"),
        (namesake, ImportError, "Use a separate environment for each.*pip uninstall hyper-parallel"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_wrong(wrong: Callable[[Path], None], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        wrong(tmp_path)


def test_a_save_that_takes_longer(tmp_path: Path) -> None:
    goes_on = threading.Event()
    saving = AsyncSave(partial(goes_on.wait, 60), tmp_path / "step-1")
    with pytest.raises(TimeoutError, match=r"step-1 is still being written after 0\.01 seconds"):
        saving.result(0.01)
    goes_on.set()
    saving.result()


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = weights(tmp_path / "a", {"x": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, b"12")
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(CheckpointError, match="became shorter while it was being read"):
        file.read("x", (slice(0, 2),), np.zeros(2, np.uint8))


def test_launching_without_the_framework(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A backend in a package of its own, for which torchrun would be used."""
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(launch, "get_platform", lambda name: SimpleNamespace(name="mine"))
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    assert main(["launch", "-n", "2", str(tmp_path / "train.py")]) == 2
    assert "hyper-parallel launch: torch is not installed" in capsys.readouterr().err
