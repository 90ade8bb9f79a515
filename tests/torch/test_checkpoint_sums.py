"""Checksums of checkpoints: the effect of a changed bit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hyper_parallel.checkpoint import CheckpointError, latest, load, load_pretrained, save, save_pretrained
from hyper_parallel.checkpoint.__main__ import main
from hyper_parallel.testing.indexes import change_index

WEIGHTS = "rank-00000.safetensors"


def job(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if seed == 0:
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": 4 - seed}


def values(state: dict[str, Any]) -> list[Any]:
    return [*state["model"].parameters(), state["step"], len(state["optimizer"].state)]


@pytest.mark.parametrize("file", ["index.json", WEIGHTS])
def test_a_changed_bit(tmp_path: Path, file: str) -> None:
    """An error that names the file, and nothing has changed; spaces around the header of the weights mean nothing."""
    path = save(job(0), tmp_path / "step-4")
    wanted, content = values(load(job(1), path)), (path / file).read_bytes()
    draw, state = random.Random(1), job(2)
    before = [x.clone() if isinstance(x, torch.Tensor) else x for x in values(state)]
    for _ in range(200):
        changed = bytearray(content)
        at = draw.randrange(len(content))
        changed[at] ^= 1 << draw.randrange(8)
        (path / file).write_bytes(changed)
        try:
            found = load(state, path)
        except CheckpointError as error:
            assert str(path / file) in str(error)
            assert all(map(_equal, values(state), before)), at
        else:
            assert content[at] in b" " and all(map(_equal, values(found), wanted)), at
            state = job(2)


@pytest.mark.parametrize("limit", ["1GB", 64])
def test_a_changed_bit_of_weights(tmp_path: Path, limit: Any) -> None:
    """The same of files for Hugging Face, of which an index means less: names of entries there are not read."""
    model = job(0)["model"]
    save_pretrained(model, tmp_path, max_shard_size=limit)
    wanted, draw = [x.clone() for x in model.parameters()], random.Random(2)
    for path in sorted(tmp_path.iterdir()):
        content = path.read_bytes()
        for _ in range(200):
            changed, state = bytearray(content), job(2)["model"]
            at = draw.randrange(len(content))
            changed[at] ^= 1 << draw.randrange(8)
            path.write_bytes(changed)
            before = [x.clone() for x in state.parameters()]
            try:
                load_pretrained(state, tmp_path)
            except CheckpointError as error:
                assert path.name in str(error)
                assert all(map(_equal, state.parameters(), before)), at
            else:
                assert all(map(_equal, state.parameters(), wanted)), at
        path.write_bytes(content)


def test_files_of_two_saves(tmp_path: Path) -> None:
    for name in ("one", "other"):
        save_pretrained(job(0)["model"], tmp_path / name, max_shard_size=64)
    names = sorted(path.name for path in (tmp_path / "one").glob("*.safetensors"))
    (tmp_path / "one" / names[0]).write_bytes((tmp_path / "other" / names[0]).read_bytes())
    with pytest.raises(
        CheckpointError, match=rf"the files of {tmp_path / 'one'} come from different saves: {names[0]}"
    ):
        load_pretrained(job(1)["model"], tmp_path / "one")


def test_weights_without_checksums(tmp_path: Path) -> None:
    """Weights of other programs have no checksums; those programs read ours."""
    weights = {"x": torch.arange(5.0), "y": torch.ones(2, 2)}
    save_file(weights, tmp_path / "model.safetensors")
    x = {name: torch.zeros_like(x) for name, x in weights.items()}
    load_pretrained(x, tmp_path)
    with pytest.raises(ValueError, match="was saved without checksums"):
        load_pretrained(x, tmp_path, verify=True)
    save_pretrained(weights, tmp_path / "without", checksums=False)
    save_pretrained(weights, tmp_path / "ours")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("without", "ours")]
    assert sizes[0] < sizes[1]
    for name in ("without", "ours"):
        found = load_file(tmp_path / name / "model.safetensors")
        assert all(torch.equal(found[name], x) for name, x in weights.items())
    path = tmp_path / "ours" / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: entry 'y' is damaged: its checksum differs"):
        load_pretrained(x, tmp_path / "ours")
    load_pretrained(x, tmp_path / "ours", verify=False)
    load_pretrained({"x": x["x"]}, tmp_path / "ours", strict=False)
    path.write_bytes(content.replace(b'crc32":"', b'crc32":"0', 1))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load_pretrained(x, tmp_path / "ours")


def _equal(x: Any, y: Any) -> bool:
    return torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def test_what_other_readers_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`latest` leaves out an index that was changed, and `convert` writes nothing of data that was."""
    path, out = save(job(0), tmp_path / "run" / "step-4"), tmp_path / "weights.safetensors"
    content = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(content[:-1] + bytes([content[-1] ^ 4]))
    assert main(["convert", str(path), "--to", "one-file", "--out", str(out)]) != 0
    assert "its checksum differs" in capsys.readouterr().err and not out.exists()
    (path / WEIGHTS).write_bytes(content)
    text = (path / "index.json").read_text()
    (path / "index.json").write_text(text.replace('"step":4', '"step":5'))
    assert latest(path.parent) is None
    (path / "index.json").write_text(text)
    assert latest(path.parent) == path


def test_an_index_of_version_1(tmp_path: Path) -> None:
    """Checkpoints of before there were checksums of the index load."""
    path = save({"x": torch.ones(2)}, tmp_path / "step-1", checksums=False)
    content = json.loads((path / "index.json").read_text())
    del content["sum"]
    (path / "index.json").write_text(json.dumps(content | {"version": 1}))
    assert torch.equal(load({"x": torch.zeros(2)}, path)["x"], torch.ones(2))


def test_a_checksum_less(tmp_path: Path) -> None:
    path = save({"x": torch.ones(2), "y": torch.ones(3)}, tmp_path / "step-1")
    change_index(path, lambda content: content["checksums"][WEIGHTS].pop("x"))
    with pytest.raises(CheckpointError, match="entry 'x' is damaged: its checksum differs"):
        load({"x": torch.zeros(2)}, path)
    assert torch.equal(load({"y": torch.zeros(3)}, path)["y"], torch.ones(3))
    with pytest.raises(CheckpointError, match="entry 'x' is damaged"):
        load({"y": torch.zeros(3)}, path, verify=True)


def test_a_file_that_is_cut_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is cut while checksums are computed."""
    path = save({"x": torch.ones(2)}, tmp_path / "step-1")
    monkeypatch.setattr("os.preadv", lambda *_: 0)
    with pytest.raises(CheckpointError, match="became shorter while it was being read"):
        load({"x": torch.zeros(2)}, path)
