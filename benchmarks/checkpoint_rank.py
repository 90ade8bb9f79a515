"""One rank of the case `checkpoint`.

``python -m benchmarks.checkpoint_rank RANK RANKS FOLDER ROUNDS MEGABYTES PLACE``
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh as torch_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Shard as TorchShard

from benchmarks.ranks import write_result
from benchmarks.report import Goal, Result, Table
from benchmarks.timing import ratios, spread
from hyper_parallel import DTensor, Shard, init_device_mesh
from hyper_parallel.checkpoint import load, save

#: Megabytes of a large tensor, and how many small ones accompany each.
LARGE, SMALL = 64, 4
#: Seconds between a save and a load from the disk: the disk may still be flushing its cache.
SETTLING = 10
OURS, UNSUMMED = "hyper_parallel", "hyper_parallel without checksums"
DCP, PLAIN, DD = "torch DCP", "safetensors of each shard", "dd of all of it"


class Ranks:
    """Ranks of a run, from the view of one, and a directory that all have."""

    def __init__(self, rank: int, size: int, place: Path) -> None:
        self.rank, self.size, self.place = rank, size, place

    def meet(self) -> None:
        dist.barrier()

    def slowest(self, value: float) -> float:
        found = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)


def locals_of(megabytes: int, ranks: Ranks, seed: int) -> dict[str, torch.Tensor]:
    """The part of every tensor that this rank has, all cut along their rows."""
    generator = torch.Generator().manual_seed(seed * 1000 + ranks.rank)
    found = {}
    for i in range(max(1, megabytes // LARGE)):
        rows = LARGE * 2**20 // 4096 // 4 // ranks.size
        found[f"layer{i}.weight"] = torch.rand(rows, 4096, generator=generator)
        for j in range(SMALL):
            found[f"layer{i}.small{j}"] = torch.rand(64, generator=generator)
    return found


def checksum(tensors: dict[str, torch.Tensor]) -> int:
    """A checksum of all bytes: equal values have equal checksums."""
    return sum(int(x.view(torch.int32).sum(dtype=torch.int64)) * (i + 1) for i, x in enumerate(tensors.values()))


class RssAnon:
    """The peak size of this process's own memory in the block, above its size at entry, in bytes."""

    def __enter__(self) -> RssAnon:
        gc.collect()
        self.before = self.peak = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.grown = self.peak - self.before

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
        return 0


def forget(path: Path) -> None:
    """Drop the system's cached pages of these files: the next load reads the disk."""
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def read_once(path: Path) -> None:
    """A virtual machine gets its memory when it is first used. So the system's cache is filled once before a load is
    timed: whether a save has gone through the cache makes no difference then."""
    for file in path.rglob("*"):
        if file.is_file():
            with open(file, "rb", buffering=0) as opened:
                while opened.read(8 << 20):
                    pass


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class Way:
    """A way in which all ranks save and load."""

    def __init__(self, name: str, ranks: Ranks, wrap: Callable[[torch.Tensor], Any]) -> None:
        self.name, self.ranks, self._wrap = name, ranks, wrap
        self.path = ranks.place / name.split()[-1]

    def save(self, tensors: dict[str, torch.Tensor]) -> None:
        state = {name: self._wrap(x) for name, x in tensors.items()}
        if self.name in (OURS, UNSUMMED):
            save(state, self.path, checksums=self.name == OURS)
        elif self.name == DCP:
            dcp.save(state, checkpoint_id=str(self.path))
        elif self.name == PLAIN:
            self.path.mkdir(exist_ok=True)
            save_file(tensors, self._file())
            sync(self._file())

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        state = {name: self._wrap(x) for name, x in tensors.items()}
        if self.name in (OURS, UNSUMMED):
            load(state, self.path)
        elif self.name == DCP:
            dcp.load(state, checkpoint_id=str(self.path))
        else:
            with safe_open(self._file(), "pt") as file:
                for name, x in tensors.items():
                    x.copy_(file.get_tensor(name))

    def _file(self) -> Path:
        return self.path / f"{self.ranks.rank}.safetensors"


def dd(ranks: Ranks, megabytes: int) -> None:
    """One process writes as many bytes as all ranks save."""
    if ranks.rank == 0:
        command = ["dd", "if=/dev/zero", f"of={ranks.place / 'dd'}", "bs=8M", f"count={megabytes // 8}", "conv=fsync"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def clear(ranks: Ranks) -> None:
    ranks.meet()
    if ranks.rank == 0:
        for path in ranks.place.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()
    ranks.meet()


def timed(ranks: Ranks, run: Callable[[], None]) -> float:
    """Milliseconds of the slowest rank."""
    ranks.meet()
    start = time.perf_counter()
    run()
    return ranks.slowest((time.perf_counter() - start) * 1000)


def main(rank: int, size: int, folder: str, rounds: int, megabytes: int, place: str) -> None:
    """Save and load in every way, in turns."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    ranks = Ranks(rank, size, Path(place))
    mesh, other = init_device_mesh("cpu", (size,)), torch_mesh("cpu", (size,))
    wraps: dict[str, Callable[[torch.Tensor], Any]] = {
        OURS: lambda x: DTensor.from_local(x, mesh, [Shard(0)]),
        UNSUMMED: lambda x: DTensor.from_local(x, mesh, [Shard(0)]),
        DCP: lambda x: TorchDTensor.from_local(x, other, [TorchShard(0)], run_check=False),
        PLAIN: lambda x: x,
    }
    ways = [Way(name, ranks, wrap) for name, wrap in wraps.items()]
    tensors = locals_of(megabytes, ranks, 1)
    own, wanted = sum(x.nbytes for x in tensors.values()), checksum(tensors)
    times: dict[str, dict[str, list[float]]] = {"save": {}, "load, from the disk": {}, "load, from memory": {}}
    grown: dict[str, float] = {}
    for number in range(rounds + 1):
        measured: dict[str, dict[str, float]] = {kind: {} for kind in times}
        for way in (*ways[number % len(ways) :], *ways[: number % len(ways)]):
            clear(ranks)
            measured["save"][way.name] = timed(ranks, lambda way=way: way.save(tensors))  # type: ignore[misc]
            for kind in ("load, from the disk", "load, from memory"):
                if kind == "load, from the disk" and rank == 0:
                    time.sleep(SETTLING)
                    read_once(way.path)
                    forget(way.path)
                got = {name: torch.empty_like(x) for name, x in tensors.items()}
                ranks.meet()
                with RssAnon() as memory:
                    measured[kind][way.name] = timed(ranks, lambda way=way, got=got: way.load(got))  # type: ignore[misc]
                grown[way.name] = max(grown.get(way.name, 0.0), ranks.slowest(memory.grown))
                assert checksum(got) == wanted, f"{way.name} has loaded something else"
                del got
        clear(ranks)
        measured["save"][DD] = timed(ranks, lambda: dd(ranks, megabytes))
        for kind, of_ways in measured.items():
            for name, value in of_ways.items():
                if number:
                    times[kind].setdefault(name, []).append(value)
    clear(ranks)
    if rank == 0:
        write_result(
            folder, [report(times, grown, own, max(x.nbytes for x in tensors.values()) * size, megabytes, size)]
        )
    dist.barrier()
    dist.destroy_process_group()


def report(
    times: dict[str, dict[str, list[float]]], grown: dict[str, float], own: int, largest: int, megabytes: int, size: int
) -> Result:
    """Tables and goals."""
    result = Result(
        "checkpoint",
        f"{megabytes} MiB in float32, tensors of {LARGE} MiB and of 1 KiB, rows over {size} processes; all is on the "
        "disk when a save ends (fsync), and sums of all loaded bytes are compared. Milliseconds of the slowest rank; "
        f"from the disk: {SETTLING} seconds later, after the files were read once, and the system was asked to forget "
        "them.",
    )
    for kind, of_ways in times.items():
        table = Table(kind, ["way", "milliseconds", "MiB/s, median", f"time of {OURS} to this"])
        for name, values in of_ways.items():
            speed = megabytes / (sorted(values)[len(values) // 2] / 1000)
            table.rows.append([name, spread(values), round(speed, 1), spread(ratios(of_ways, name)[OURS])])
        result.tables.append(table)
    for kind, other, limit in (
        ("save", DCP, 1 / 1.5),
        ("save", DD, 1 / 0.7),
        ("load, from the disk", DCP, 1 / 1.5),
        ("load, from memory", DCP, 1 / 1.5),
    ):
        median = spread(ratios(times[kind], other)[OURS])["median"]
        result.goals.append(Goal(f"{kind}: time to that of {other}", median, limit))
    table = Table("Memory of a load", ["way", "growth of RssAnon at most, MiB", "own shards, MiB"])
    for name, value in grown.items():
        table.rows.append([name, round(value / 2**20, 1), round(own / 2**20, 1)])
    result.tables.append(table)
    what = "a load's own memory beyond own shards, to the largest tensor"
    result.goals.append(Goal(what, (grown[OURS] - own) / largest, 1.0))
    return result


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
