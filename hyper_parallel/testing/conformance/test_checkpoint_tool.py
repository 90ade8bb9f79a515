"""The command line tool for checkpoints, the bytes that each rank reads, and the sampler on a mesh.

The tool needs no framework.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel import PackedShard, Replicate, Shard, distribute_tensor, get_platform
from hyper_parallel.checkpoint import StatefulDistributedSampler, load, save, tool
from hyper_parallel.checkpoint.__main__ import main
from hyper_parallel.checkpoint.index import read_index
from hyper_parallel.checkpoint.ranks import Collective
from hyper_parallel.checkpoint.tensor_files import TensorFile
from hyper_parallel.core.layouts.rectangles import held_rectangles
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.extent import on_ranks


@spmd.on_mesh()
def save_all(mesh: Any, path: str) -> dict[str, Any]:
    """Save a checkpoint with every kind of content; return the weights of its model."""
    adapter = get_adapter()
    made = adapter.load(adapter.Tied(7, 4), np.random.default_rng(5))
    sampler = StatefulDistributedSampler(10, mesh=mesh)
    assert (sampler.num_replicas, sampler.rank) == (mesh.size(), mesh.get_local_rank(0))
    next(iter(sampler))
    x = adapter.tensor(np.arange(12, dtype=np.float32).reshape(4, 3))
    state = {
        "model": made,
        "step": 7,
        "sampler": sampler,
        "name": "x" * 200,
        "packed": distribute_tensor(x, mesh, [PackedShard(0, (1, 3))]),
        "columns": distribute_tensor(x, mesh, [Shard(1)]),
        "scalar": adapter.tensor(np.float32(3)),
    }
    optimizer = getattr(adapter, "optimizer", lambda *_: (None,))(made, "adamw", 0.1)[0]
    if get_platform().is_optimizer(optimizer):
        state["optimizer"] = optimizer
    save(state, path, mesh=mesh)
    return {name: adapter.numpy(x) for name, x in get_platform().saved_tensors(made)}


def run_without_frameworks(*arguments: str) -> str:
    """Run the command in a process that cannot import any framework."""
    program = (
        "import sys\nsys.modules.update(torch=None, mindspore=None, safetensors=None)\n"
        "from hyper_parallel.checkpoint.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("world_size", [2])
def test_show_and_convert(pool: Any, tmp_path: Path, world_size: int, monkeypatch: Any, capsys: Any) -> None:
    path = tmp_path / "step-7"
    weights = pool.run(world_size, save_all, str(path))[0]
    shown = run_without_frameworks("show", str(path))
    assert f"{tool.show(path)}\n" == shown
    lines = {line.split("  ")[0].strip(): line for line in shown.splitlines()}
    assert lines["step = 7"] and "2 files" in shown and f'name = "{"x" * 99}...' in shown
    assert "(4, 3)" in lines["packed"] and "float32" in lines["packed"] and " 48 " in lines["packed"]
    assert "PackedShard" in lines["packed"] and "Shard(dim=1)" in lines["columns"] and "plain" in lines["scalar"]
    first, second = weights
    assert f"the same tensor as model.{first}" in lines[f"model.{second}"]
    assert "sampler.position = 2" in shown
    # On a narrow terminal nothing is cut, and only words that are longer stand out.
    narrow = tool.show(path, 40)
    assert not [line for line in narrow.splitlines() if len(line) > 40 and len(line.split()) > 1]
    assert "\npacked\n    (4, 3) float32, 48 bytes,\n" in narrow and "\n    the same tensor as\n" in narrow
    words, of_the_head = ({word.strip(",") for word in text.split()} for text in (shown, lines["tensor"]))
    assert words - of_the_head <= {word.strip(",") for word in narrow.split()}
    assert f"{tool.show(path, 1000)}\n" == shown
    found = json.loads(run_without_frameworks("show", str(path), "--json"))
    assert found["tensors"]["packed"] == {
        "shape": [4, 3], "dtype": "float32", "bytes": 48, "placement": str(lines["packed"].split("  ")[-1])
    }  # fmt: skip
    assert found["aliases"] == {f"model.{second}": f"model.{first}"} and found["files"] == 2
    assert found["values"]["name"] == "x" * 200 and found["values"]["sampler.position"] == 2
    # All of it as one file.
    one = tmp_path / "all.safetensors"
    assert run_without_frameworks("convert", str(path), "--to", "one-file", "--out", str(one)) == f"{one}\n"
    file = TensorFile(one)
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    for name in ("packed", "columns"):
        assert (file.array(name).view(np.float32) == x).all()
    assert file.array("scalar").view(np.float32) == 3 and f"model.{first}" in file.names()
    # The model as Hugging Face has it: in one file, and in several.
    assert main(["convert", str(path), "--to", "huggingface", "--out", str(tmp_path / "hf"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"files": [str(tmp_path / "hf" / "model.safetensors")]}
    file = TensorFile(tmp_path / "hf" / "model.safetensors")
    assert [*file.names()] == [first] and (file.array(first).view(np.float32) == weights[first]).all()
    monkeypatch.setattr(tool, "SHARD", 60)
    written = tool.convert(path, "huggingface", tmp_path / "several", "")
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    assert len(written) == len({*index["weight_map"].values()}) + 1 > 3
    for name, file_name in index["weight_map"].items():
        assert TensorFile(tmp_path / "several" / file_name).kind(name)[0] == "float32"
    assert index["metadata"]["total_size"] == sum(path.stat().st_size for path in written[:-1]) - sum(
        TensorFile(path)._start for path in written[:-1]
    )
    capsys.readouterr()
    for arguments, words in (
        (["show", str(tmp_path / "none")], "there is no checkpoint"),
        (["convert", str(path), "--to", "one-file", "--out", str(one)], "exists already"),
        (["convert", str(path), "--to", "one-file", "--out", str(tmp_path / "b"), "--part", "x"], "under the key 'x'"),
        (["convert", str(path), "--to", "one-file", "--out", str(tmp_path / "no" / "b")], "cannot be written"),
    ):
        assert main(arguments) == 1 and words in capsys.readouterr().err, arguments


@spmd.on_mesh()
def no_module(mesh: Any, path: str) -> None:
    adapter = get_adapter()
    save({"x": adapter.tensor(np.ones(2, np.float32))}, path, mesh=mesh)
    a, c = (adapter.load(adapter.linear_module(2, 2), np.random.default_rng(0)) for _ in range(2))
    save({"a": a, "b": {"c": c}}, f"{path}-two", mesh=mesh)


def test_which_module(pool: Any, tmp_path: Path) -> None:
    pool.run(1, no_module, str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"has 0 modules \(none\)"):
        tool.convert(tmp_path / "none", "huggingface", tmp_path / "out")
    with pytest.raises(ValueError, match=r"has 2 modules \('a', 'b.c'\).*--part NAME"):
        tool.convert(tmp_path / "none-two", "huggingface", tmp_path / "out")
    written = tool.convert(tmp_path / "none-two", "huggingface", tmp_path / "out", "b.c")
    assert sorted(TensorFile(written[0]).names()) == ["bias", "weight"]


@spmd.on_mesh()
def only_what_it_needs(mesh: Any, directory: str) -> None:
    """Check that each rank can load from a copy in which only the bytes that it needs are intact."""
    adapter, ranks = get_adapter(), Collective(mesh)
    whole = np.arange(60, dtype=np.float32).reshape(10, 6) + 1
    kinds = [Replicate(), Shard(0), Shard(1), PackedShard(0, (6, 4))]
    path = save({str(i): distribute_tensor(adapter.tensor(whole), mesh, [p]) for i, p in enumerate(kinds)},
                f"{directory}/all", mesh=mesh)  # fmt: skip
    index = read_index(path)
    for i, p in enumerate(kinds):
        for q in kinds:
            x = distribute_tensor(adapter.tensor(whole * 0), mesh, [q])
            mine = np.zeros(whole.shape, bool)
            for r in held_rectangles(x._layout, mesh.get_coordinate()):
                mine[tuple(slice(o, o + n) for o, n in zip(r.offsets, r.sizes, strict=True))] = True
            copy = Path(directory) / f"{mesh.get_rank()}-{p}-{q}"
            copy.mkdir()
            (copy / "index.json").write_bytes((path / "index.json").read_bytes())
            contents = {name: bytearray((path / name).read_bytes()) for name in index.files}
            files = {name: TensorFile(path / name) for name in index.files}
            for name, content in contents.items():
                for entry in files[name].names():
                    start, size = files[name]._start + files[name]._entries[entry][2], files[name].array(entry).nbytes
                    content[start : start + size] = b"\xff" * size
            for part in index.tensors[str(i)].parts:
                box = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))
                kept = np.where(mine[box], whole[box], np.float32(np.nan)).astype(np.float32)
                start = files[part.file]._start + files[part.file]._entries[part.entry][2]
                contents[part.file][start : start + kept.nbytes] = kept.tobytes()
            for name, content in contents.items():
                (copy / name).write_bytes(content)
            load({str(i): x}, copy, mesh=mesh, verify=False)
            assert (adapter.numpy(x) == whole).all(), (p, q)
    ranks.gather(None)


@on_ranks(2, 3)
def test_a_rank_reads_only_what_it_needs(pool: Any, tmp_path: Path, world_size: int) -> None:
    pool.run(world_size, only_what_it_needs, str(tmp_path))
