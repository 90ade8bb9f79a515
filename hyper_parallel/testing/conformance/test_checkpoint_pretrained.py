"""Hugging Face's files of full tensors: written by ranks that hold shards, and loaded into models on the meta
device."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    PackedShard,
    Replicate,
    RowwiseParallel,
    Shard,
    StridedShard,
    distribute_tensor,
    fully_shard,
    get_platform,
    parallelize_module,
)
from hyper_parallel.checkpoint import CheckpointError, disk, load_pretrained, save_pretrained
from hyper_parallel.checkpoint.tensor_files import Entry, TensorFile, write_tensors
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.conformance.test_checkpoint import MODELS
from hyper_parallel.testing.conformance.test_checkpoint_state import array, fails

SHAPES: list[tuple[int, ...]] = [(1,), (2,), (4,), (2, 2)]


def whole_values(name: str) -> dict[str, np.ndarray]:
    """Return the values of the model on one device. Tied values appear under their first name."""
    adapter, seen = get_adapter(), set()
    found = {}
    for path, x in get_platform().saved_tensors(adapter.load(MODELS[name][0](adapter), np.random.default_rng(5))):
        if id(x) not in seen:
            seen.add(id(x))
            found[path] = adapter.numpy(x)
    return found


def mesh_of(shape: tuple[int, ...]) -> Any:
    return spmd.device_mesh(*shape, names=("tp",) if len(shape) == 1 else ("dp", "tp"))


def spread(model: Any, mesh: Any, name: str) -> Any:
    model = parallelize_module(model, mesh if mesh.ndim == 1 else mesh["tp"], MODELS[name][2])
    return model if mesh.ndim == 1 else fully_shard(model, mesh=mesh["dp"])


def save_model(shape: tuple[int, ...], name: str, directory: str, limit: int | str) -> None:
    mesh = mesh_of(shape)
    if mesh is not None:
        model = get_adapter().load(MODELS[name][0](get_adapter()), np.random.default_rng(5))
        save_pretrained(spread(model, mesh, name), directory, max_shard_size=limit, mesh=mesh)


def load_model(shape: tuple[int, ...], name: str, path: str, without_values: bool) -> None:
    """Check that values are loaded into the same objects with the same placements.

    The model then computes the single device's result.
    """
    mesh, adapter, platform = mesh_of(shape), get_adapter(), get_platform()
    if mesh is None:
        return
    make = MODELS[name][0]
    if without_values and hasattr(adapter, "without_values"):
        with adapter.without_values():
            model = make(adapter)
    else:
        model = adapter.load(make(adapter), np.random.default_rng(6))
    model = spread(model, mesh, name)
    before = {path: (x, getattr(x, "placements", None)) for path, x in platform.saved_tensors(model)}
    load_pretrained(model, path, mesh=mesh)
    wanted, found = whole_values(name), dict(platform.saved_tensors(model))
    assert found.keys() >= wanted.keys()
    for called, values in wanted.items():
        x, placements = before[called]
        assert found[called] is x and getattr(x, "placements", None) == placements, called
        got = adapter.numpy(x)
        assert got.dtype == values.dtype and got.tobytes() == values.tobytes(), called
    single = adapter.load(make(adapter), np.random.default_rng(5))
    rows = MODELS[name][1]
    x = np.arange(4) % rows if isinstance(rows, int) else array(4, *rows) / 97
    x = adapter.tensor(x.astype(np.int64 if isinstance(rows, int) else np.float32))
    y = adapter.call(model, x)
    got = adapter.numpy(y.full_tensor() if isinstance(y, DTensor) else y)
    np.testing.assert_allclose(got, adapter.numpy(adapter.call(single, x)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", range(len(MODELS)), ids=[*MODELS])
def test_models(pool: Any, tmp_path: Path, number: int) -> None:
    name = [*MODELS][number]
    wanted = pool.run(1, whole_values, name)[0]
    for i, shape in enumerate(SHAPES):
        directory = tmp_path / str(i)
        pool.run(4, save_model, shape, name, str(directory), "50GB" if (i + number) % 2 else 100)
        files = sorted(directory.iterdir())
        weights = [TensorFile(file) for file in files if file.suffix == ".safetensors"]
        assert {n: f.array(n).view(wanted[n].dtype).tolist() for f in weights for n in f.names()} == {
            n: x.tolist() for n, x in wanted.items()
        }
        if len(weights) == 1:
            assert [file.name for file in files] == ["model.safetensors"]
        else:
            index = json.loads((directory / "model.safetensors.index.json").read_text())
            assert index["weight_map"] == {n: f.path.name for f in weights for n in f.names()}
            assert index["metadata"]["total_size"] == sum(x.nbytes for x in wanted.values())
        pool.run(4, load_model, SHAPES[(i + 1 + number) % len(SHAPES)], name, str(directory), i % 2 == 0)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def tensors(mesh: Any, directory: str) -> None:
    """Check that a dict of tensors is saved in one file, and loaded with other placements and dtypes."""
    adapter, platform = get_adapter(), get_platform()
    kinds = {
        "rows": ((7, 5), [Shard(0), Shard(0)]),
        "both": ((7, 5), [Shard(1), Shard(0)]),
        "strided": ((9, 2), [StridedShard(0, split_factor=2), Shard(0)]),
        "packed": ((13, 3), [StridedShard(0, split_factor=2), PackedShard(0, (6, 7))]),
        "packed columns": ((3, 9), [Replicate(), PackedShard(1, (4, 5))]),
        "deep": ((2, 3, 5, 2), [Shard(1), Shard(2)]),
        "large": ((640, 512), [Replicate(), Shard(1)]),
        "number": ((), [Replicate(), Replicate()]),
        "nothing": ((0, 3), [Replicate(), Shard(0)]),
    }
    wanted = {name: adapter.tensor(array(*shape)) for name, (shape, _) in kinds.items()}
    for name in ("int64", "float16", "bfloat16"):
        if name in platform.dtypes:
            kinds[name] = ((6, 3), [Shard(0), Shard(1)])
            wanted[name] = platform.to_dtype(adapter.tensor(array(6, 3)), platform.dtypes[name])
    state: dict[str, Any] = {name: distribute_tensor(wanted[name], mesh, p) for name, (_, p) in kinds.items()}
    save_pretrained({**state, "plain": adapter.tensor(array(3))}, directory, mesh=mesh)
    file = TensorFile(Path(directory) / "model.safetensors")
    for name, x in wanted.items():
        assert file.array(name).tobytes() == platform.bytes_of(x), name
        empty = platform.to_dtype(adapter.tensor(array(*kinds[name][0]) * 0), x.dtype)
        ndim = len(kinds[name][0])
        again = distribute_tensor(
            empty, mesh, [Shard(0) if ndim else Replicate(), Shard(ndim - 1) if ndim else Replicate()]
        )
        rename = {name: "x"}.get
        load_pretrained({"x": again}, directory, rename=rename, mesh=mesh)
        assert platform.bytes_of(again.full_tensor()) == platform.bytes_of(x), name
    # Another dtype, where it is asked for.
    if "bfloat16" in wanted:
        x = distribute_tensor(adapter.tensor(array(6, 3) * 0), mesh, [Shard(1), Shard(0)])
        with fails(ValueError, "x has dtype ", "bfloat16 in the checkpoint", "convert_dtypes=True"):
            load_pretrained({"x": x}, directory, rename={"bfloat16": "x"}.get, mesh=mesh)
        load_pretrained({"x": x}, directory, rename={"bfloat16": "x"}.get, convert_dtypes=True, mesh=mesh)
        assert (adapter.numpy(x) == array(6, 3)).all()


def meet(mesh: Any) -> None:
    """Wait until all ranks have called this."""
    distribute_tensor(get_adapter().tensor(array(2)), mesh, [Replicate()]).redistribute(
        placements=[Shard(0)]
    ).full_tensor()


@spmd.on_mesh(2)
def misfits(mesh: Any, directory: str) -> None:
    """Check that all mismatches are listed on all ranks, and that nothing is changed."""
    adapter = get_adapter()
    folder = Path(directory)

    def written(name: str, **arrays: np.ndarray) -> Path:
        path = folder / name
        if mesh.get_rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            entries = [
                Entry(n, str(x.dtype), x.shape, lambda x=x: x.reshape(-1).view(np.uint8).data)
                for n, x in arrays.items()
            ]
            write_tensors(path, entries, False, lambda _: None)
        meet(mesh)
        return path

    model = parallelize_module(
        adapter.load(adapter.Mlp(4, 6), np.random.default_rng(0)),
        mesh,
        {"up": ColwiseParallel(), "down": RowwiseParallel()},
    )
    before = {name: adapter.numpy(x).copy() for name, x in get_platform().saved_tensors(model)}
    up, down = array(6, 4), array(4, 6)
    path = written(
        "a/wrong.safetensors",
        **{
            "up.weight": up.T.copy(),
            "down.weight": down.astype(np.float64),
            "down.bais": array(4),
            "up.bias": array(6),
        },
    )
    with fails(
        ValueError,
        "up.weight has shape (6, 4) in the state and (4, 6)",
        "missing: down.bias (the checkpoint has 'down.bais')",
        "unexpected: down.bais",
        "down.weight has dtype",
    ):
        load_pretrained(model, path, mesh=mesh)
    assert all((adapter.numpy(x) == before[name]).all() for name, x in get_platform().saved_tensors(model))
    with fails(ValueError, "get the same name 'x'", "'up.weight'"):
        load_pretrained(model, path, rename=lambda name: "x", mesh=mesh)
    load_pretrained(model, path, rename={"up.bias": "up.bias", "down.bais": "down.bias"}.get, strict=False, mesh=mesh)
    assert (adapter.numpy(model.up.bias) == array(6)).all() and (adapter.numpy(model.down.bias) == array(4)).all()
    with fails(CheckpointError, "has neither model.safetensors nor", "wrong.safetensors", "pass the path of the file"):
        load_pretrained(model, folder / "a", mesh=mesh)
    with fails(CheckpointError, "the path does not exist"):
        load_pretrained(model, folder / "b", mesh=mesh)
    index = folder / "a" / "model.safetensors.index.json"
    for text, words in (
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"weight_map": {"x": "../y"}}', "outside of"),
        ('{"weight_map": {"x": "y.safetensors"}}', "names the file 'y.safetensors', which does not exist"),
    ):
        meet(mesh)
        if mesh.get_rank() == 0:
            index.write_text(text)
        meet(mesh)
        with fails(CheckpointError, words):
            load_pretrained(model, folder / "a", mesh=mesh)
    with fails(ValueError, "max_shard_size", "'5GB'", "'much'"):
        save_pretrained(model, folder / "c", max_shard_size="much", mesh=mesh)
    with fails(ValueError, "save different states", "up.weight"):
        save_pretrained({"up.weight": adapter.tensor(array(3) + mesh.get_rank())}, folder / "c", mesh=mesh)
    # Older weights of the same kind are replaced.
    save_pretrained(model, folder / "d", max_shard_size="1kb", mesh=mesh)
    save_pretrained(model, folder / "d", max_shard_size=40, mesh=mesh)
    several = sorted(p.name for p in (folder / "d").iterdir())
    assert len(several) == 5 and several[-1] == "model.safetensors.index.json", several
    meet(mesh)
    save_pretrained(model, folder / "d", mesh=mesh)
    assert [p.name for p in (folder / "d").iterdir()] == ["model.safetensors"]
    # A disk that has room for the header alone, on one of the ranks.
    steps: list[str] = []

    def full(kind: str, path: Path) -> None:
        if kind == "write" and "sync" in steps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        steps.append(kind)

    meet(mesh)
    with pytest.MonkeyPatch.context() as patch:
        if mesh.get_rank() == 0:
            patch.setattr(disk, "watcher", full)
        with fails(
            CheckpointError, "on rank 0", "/.model.safetensors.", ".incomplete cannot be written: No space left"
        ):
            save_pretrained(model, folder / "d", mesh=mesh)
    meet(mesh)
    assert [p.name for p in (folder / "d").iterdir()] == ["model.safetensors"]
    # A path that cannot be made.
    meet(mesh)
    with fails(CheckpointError, "failed"):
        save_pretrained(model, path / "below", mesh=mesh)


class Peak:
    """Context manager that measures the largest growth of the memory of this process, without mapped files."""

    def _now(self) -> int:
        text = Path("/proc/self/status").read_text()
        return 1024 * int(text.split("RssAnon:")[1].split()[0])

    def _watch(self) -> None:
        while not self._ended:
            self._most = max(self._most, self._now())
            time.sleep(0.001)

    def __enter__(self) -> Peak:
        self._ended, self._before = False, self._now()
        self._most = self._before
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join()
        self.grown = max(self._most, self._now()) - self._before


COUNT, FEATURES, HIDDEN = 6, 1024, 2048
MATRIX = 4 * FEATURES * HIDDEN


@spmd.on_mesh()
def memory(mesh: Any, directory: str) -> None:
    """Check the memory of a load and of a save.

    A load into a model without values needs at most the memory of this rank's shards and one tensor. A save needs less
    than one tensor.
    """
    adapter, size = get_adapter(), mesh.size()
    path = Path(directory) / "model.safetensors"
    if mesh.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = []
        for i in range(COUNT):
            for name, shape in (("up", (HIDDEN, FEATURES)), ("down", (FEATURES, HIDDEN))):
                values = memoryview(bytearray(MATRIX))
                entries.append(Entry(f"{i}.{name}.weight", "float32", shape, lambda values=values: values))
        write_tensors(path, entries, False, lambda _: None)
        del entries, values
    meet(mesh)
    models: dict[str, Any] = {}
    for i in range(COUNT):
        with adapter.without_values():
            models[str(i)] = adapter.Mlp(FEATURES, HIDDEN, bias=False)
    # The first load of a process imports modules, which take tens of megabytes: that is not to be measured.
    with adapter.without_values():
        small = adapter.Mlp(4, 8, bias=False)
    parallelize_module(small, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    values = {"up.weight": adapter.tensor(array(8, 4)), "down.weight": adapter.tensor(array(4, 8))}
    save_pretrained(values, f"{directory}/small", mesh=mesh)
    load_pretrained(small, f"{directory}/small", mesh=mesh)
    memory_at_once = not get_platform().keeps_meta  # distributed tensors get memory then
    with Peak() as peak:
        for model in models.values():
            parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if not memory_at_once:
            assert peak._most - peak._before < MATRIX
        load_pretrained(models, path, mesh=mesh)
    own = 2 * COUNT * MATRIX // size
    # Half a tensor is left for the allocator and for threads of the framework; a second tensor would not fit.
    assert own // 2 < peak.grown < own + MATRIX + MATRIX // 2, (peak.grown, own, MATRIX)
    assert all((adapter.numpy(x) == 0).all() for _, x in get_platform().saved_tensors(models["0"]))
    with Peak() as peak:
        save_pretrained(models, f"{directory}/again", mesh=mesh)
    assert peak.grown < MATRIX, peak.grown


def test_memory(pool: Any, tmp_path: Path) -> None:
    if not hasattr(get_adapter(), "without_values"):
        pytest.skip("every model of this framework has values")
    if get_platform().device_type == "cuda":
        pytest.skip("the memory of this process is not where a GPU has its tensors")
    pool.run(4, memory, str(tmp_path / "files"))


@pytest.mark.parametrize(("job", "world_size"), [(tensors, 4), (misfits, 2)], ids=lambda x: getattr(x, "__name__", ""))
def test_files(pool: Any, tmp_path: Path, job: Any, world_size: int) -> None:
    pool.run(world_size, job, str(tmp_path / "files"))
