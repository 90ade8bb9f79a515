"""A pipe in the place of a file is an error: a reader does not wait for a writer."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from hyper_parallel.checkpoint import latest, load, load_pretrained, save
from hyper_parallel.testing.indexes import change_index
from tests.support.in_processes import ended


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def test_pipes_in_a_checkpoint(tmp_path: Path) -> None:
    """A pipe as index or file does not wait for a writer, whatever size the index gives."""
    for number, size in enumerate((None, 0)):
        path = save({"x": torch.ones(2), "step": 1}, tmp_path / str(number) / "step-1")
        file = path / "rank-00000.safetensors"
        pipe(file)
        if size is not None:
            change_index(path, lambda content, file=file, size=size: content["files"].update({file.name: size}))
        kind, text = ended(lambda path=path: load({"x": torch.zeros(2), "step": 0}, path))
        assert kind == "CheckpointError" and f"{file} cannot be read: it is not a regular file" in text, text
        assert ended(lambda path=path: latest(path.parent)) == ("nothing", "None")
        pipe(path / "index.json")
        kind, text = ended(lambda path=path: load({"step": 0}, path))
        assert kind == "CheckpointError" and "index.json cannot be read: it is not a regular file" in text, text
        assert ended(lambda path=path: latest(path.parent)) == ("nothing", "None")


def test_pipes_among_the_files_of_weights(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.safetensors.index.json", "part.safetensors"):
        directory = tmp_path / name.replace(".", "-")
        directory.mkdir()
        os.mkfifo(directory / name)
        if name == "part.safetensors":
            (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
        for path in (directory, directory / name):
            kind, text = ended(lambda path=path: load_pretrained({"x": torch.zeros(2)}, path))
            assert kind == "CheckpointError" and str(directory) in text, text
