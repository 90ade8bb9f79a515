"""Small files that ask for much memory: it is bounded by the bytes in them, and by the tensors that are wanted."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import resource
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hyper_parallel.checkpoint import CheckpointError, RandomState, latest, load, load_pretrained, save
from hyper_parallel.checkpoint.tilings import is_tiling
from hyper_parallel.testing.indexes import change_index

FORK = multiprocessing.get_context("fork")
#: Bytes that a call may take at most, and those that the process may have, beyond its present ones.
TAKEN, ALLOWED = 64 << 20, 3 << 30


def used(call: Callable[[], Any]) -> tuple[str, str]:
    """Call in a process that may not take much; returns the kind of the error, and its message."""
    told = FORK.SimpleQueue()

    def run() -> None:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + ALLOWED, now + ALLOWED))
        tracemalloc.start()
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        try:
            call()
            kind, text = "nothing", ""
        except BaseException as error:
            kind, text = type(error).__name__, str(error)
        took = max(
            tracemalloc.get_traced_memory()[1],
            1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before),
        )
        told.put((kind, text, took, time.monotonic() - began))
        os._exit(0)

    process = FORK.Process(target=run)
    process.start()
    process.join(120)
    assert process.exitcode == 0 and not told.empty(), "killed"
    kind, text, took, seconds = told.get()
    assert took < TAKEN, f"{took >> 20} MiB were taken"
    assert seconds < 20
    return kind, text


def put(path: Path, *keys: Any) -> None:
    *way, last, value = keys

    def change(content: Any) -> None:
        for key in way:
            content = content[key]
        content[last] = value

    change_index(path, change)


def refused(path: Path, words: str) -> None:
    """`load` refuses a checkpoint, `latest` leaves it out, and neither takes much memory."""
    kind, text = used(lambda: load({"x": torch.zeros(2)}, path, strict=False))
    assert kind == "CheckpointError" and words in text, (kind, text)
    kind, text = used(lambda: print(latest(path.parent)))
    assert kind == "nothing", (kind, text)
    assert latest(path.parent) is None


def tensor(shape: list[int], parts: list[Any]) -> dict[str, Any]:
    return {"dtype": "float32", "shape": shape, "placement": "plain", "parts": parts}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save({"x": torch.ones(2), "step": 1}, tmp_path / "run" / "step-1")


@pytest.mark.parametrize("dimensions", [2, 3, 5])
def test_parts_without_elements(path: Path, dimensions: int) -> None:
    """Empty parts may have any offsets: no grid is made of them."""
    side = 1 << 20
    empty = [
        [[0, *(i * 7 + d for d in range(1, dimensions))], [0, *[1] * (dimensions - 1)], 0, "x"] for i in range(400)
    ]
    halves = [[[at, *[0] * (dimensions - 1)], [1, *[side] * (dimensions - 1)], 0, "x"] for at in (0, 1)]
    put(path, "tensors", "y", tensor([2, *[side] * (dimensions - 1)], [*empty, *halves]))
    kind, _ = used(lambda: load({"x": torch.zeros(2)}, path, strict=False))
    assert kind == "nothing"


@pytest.mark.parametrize("dimensions", [3, 5, 12])
def test_parts_that_lie_wildly(path: Path, dimensions: int) -> None:
    """The parts have as many elements as the tensor, but form no grid."""
    draw, count = random.Random(dimensions), 150
    side = 10 * count
    sizes = [[draw.randint(1, 9) for _ in range(dimensions)] for _ in range(count)]
    parts = [[[draw.randint(0, side - 9) for _ in range(dimensions)], n, 0, "x"] for n in sizes]
    left = side**dimensions - sum(int(np.prod([int(x) for x in n], dtype=object)) for n in sizes)
    row = [[[0] * dimensions, [*[side] * (dimensions - 1), left // side ** (dimensions - 1)], 0, "x"]]
    rest = left - side ** (dimensions - 1) * (left // side ** (dimensions - 1))
    for d in range(dimensions - 1):  # the elements that are still missing, as boxes of one row, one element
        unit = side ** (dimensions - 2 - d)
        size = [1] * (d + 1) + [side] * (dimensions - 2 - d) + [1]
        if rest // unit:
            size[d] = rest // unit
            row.append([[0] * dimensions, size, 0, "x"])
            rest %= unit
    put(path, "tensors", "y", tensor([side] * dimensions, [*parts, *row]))
    refused(path, f"index.json is damaged: ValueError {'its shards divide' if dimensions > 5 else 'the parts'}")


def test_a_tensor_that_no_file_has(path: Path) -> None:
    """A missing entry is reported before a new tensor is made for it."""
    put(path, "tensors", "y", tensor([1 << 33], [[[0], [1 << 33], 0, "y"]]))
    put(path, "values", "step", {"$": "tensor", "name": "y"})
    kind, text = used(lambda: load({"x": torch.zeros(2), "step": 0}, path))
    assert kind == "CheckpointError" and "rank-00000.safetensors has no entry 'y'" in text, (kind, text)


@pytest.mark.parametrize("count", [6_000_000_000, [0] * 10, None, "abc"])
def test_bytes_of_a_generator(tmp_path: Path, count: Any) -> None:
    """A number would be so many zeros; no generator is changed."""
    path = save({"random": RandomState()}, tmp_path / "step-1")
    put(path, "values", "random", "values", 0, "device", {"bytes": count})
    before = torch.get_rng_state()
    first = random.getstate()
    kind, text = used(lambda: load({"random": RandomState()}, path))
    assert kind == "CheckpointError" and "state of a generator in the checkpoint is damaged: its bytes are" in text, (
        text
    )
    with pytest.raises(CheckpointError, match="its bytes are"):
        RandomState().load_state_dict(RandomState().state_dict() | {"device": {"bytes": 3}})
    assert torch.equal(torch.get_rng_state(), before) and random.getstate() == first


@pytest.mark.parametrize("length", [1 << 30, 100_000_000, (1 << 33) - 100])
def test_a_header_of_zeros(tmp_path: Path, length: int) -> None:
    """The header is a hole in the file, so it takes no bytes on the disk."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length))
    os.truncate(file, 1 << 33)
    kind, text = used(lambda: load_pretrained({"x": torch.zeros(2)}, file))
    assert kind == "CheckpointError" and "is damaged, or is not a safetensors file: " in text, (kind, text)


def test_an_index_of_zeros(path: Path) -> None:
    os.truncate(path / "index.json", 0)
    os.truncate(path / "index.json", 1 << 34)
    refused(path, "index.json is damaged: it is not JSON")


def boxes_of_grid(cuts: list[list[int]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All cells between these places, of each dimension."""
    sides = [[(a, b - a) for a, b in itertools.pairwise(places)] for places in cuts]
    return [(tuple(at for at, _ in cell), tuple(n for _, n in cell)) for cell in itertools.product(*sides)]


def test_tilings() -> None:
    """Compare with a painted array. The cases are grids, cells that are cut again, and boxes that are moved, twice or
    missing."""
    draw = random.Random(7)
    wrong = 0
    for _ in range(400):
        shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(0, 4)))
        cuts = [sorted({0, n, *(draw.randint(0, n) for _ in range(draw.randint(0, 3)))}) for n in shape]
        boxes = boxes_of_grid(cuts)
        for i, (offsets, sizes) in enumerate(boxes):
            wide = [d for d, n in enumerate(sizes) if n > 1]
            if wide and draw.random() < 0.4:
                d = draw.choice(wide)
                moved = tuple(o + (j == d) for j, o in enumerate(offsets))
                boxes[i] = offsets, tuple(1 if j == d else n for j, n in enumerate(sizes))
                boxes.append((moved, tuple(n - (j == d) for j, n in enumerate(sizes))))
        change = draw.choice(["none", "none", "move", "twice", "less"])
        at = draw.randrange(len(boxes))
        if change == "move":
            offsets, sizes = boxes[at]
            boxes[at] = tuple(draw.randint(0, s - n) for s, n in zip(shape, sizes, strict=True)), sizes
        elif change == "twice":
            boxes.append(boxes[at])
        elif change == "less":
            del boxes[at]
        draw.shuffle(boxes)
        painted = np.zeros(shape, int)
        for offsets, sizes in boxes:
            painted[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
        expected = bool((painted == 1).all())
        wrong += not expected
        assert is_tiling(shape, boxes) is expected, (shape, boxes)
    assert 50 < wrong < 300


def test_large_grids_are_known_soon() -> None:
    """Cells of many ranks in many dimensions are cut again."""
    for cuts in ([[*range(65)]] * 2, [[0, 2, 4]] * 11, [[*range(0, 8193, 2)]], [[*range(0, 17, 2)]] * 4):
        cells = boxes_of_grid(cuts)
        again = [
            (tuple(o + (d == 0) * half for d, o in enumerate(at)), (1, *n[1:]))
            for at, n in cells
            for half in range(n[0])
        ]
        shape = tuple(places[-1] for places in cuts)
        began = time.process_time()
        assert is_tiling(shape, cells) and is_tiling(shape, again) and not is_tiling(shape, cells[1:])
        assert time.process_time() - began < 10  # of the processor, whatever else runs
