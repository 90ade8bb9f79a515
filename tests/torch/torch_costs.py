"""Communication of operations on DTensors, next to torch's own DTensor: the same calls and placements, over a fake
group.

    HYPER_PARALLEL_PLATFORM=torch-cpu python -m tests.torch.torch_costs

writes the tables of docs/communication_costs.md. Counted are the collectives that rank 0 issues in forward, and the
bytes that leave it. Collectives go around in rings. Backward is left out: torch leaves gradients as partial sums that
are not reduced yet. Here they have the placements of the tensors whose gradients they are.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.tensor as native
import torch.nn.functional as F

import hyper_parallel as ours
from benchmarks.torch_groups import fake_group
from benchmarks.torch_traffic import count_collectives
from benchmarks.traffic import Traffic

__all__ = ["BEFORE", "DIFFERENT", "OPERATIONS", "PAGE", "Compared", "compare", "page"]

#: Markers of the generated part of `PAGE`.
BEGIN, END = "<!-- begin -->\n", "<!-- end -->"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "communication_costs.md"
RANKS = 4
#: A placement's letter -> (ours, torch's)
PLACEMENTS: dict[str, tuple[Any, Any]] = {
    "R": (ours.Replicate(), native.Replicate()),
    "S0": (ours.Shard(0), native.Shard(0)),
    "S1": (ours.Shard(1), native.Shard(1)),
    "S2": (ours.Shard(2), native.Shard(2)),
    "P": (ours.Partial(), native.Partial()),
}
LIBRARIES = (
    (ours.DTensor, ours.init_device_mesh, ours.distribute_tensor),
    (native.DTensor, native.init_device_mesh, native.distribute_tensor),
)
_INDEX = torch.arange(16 * 8).reshape(16, 8) % 8
#: name -> (the call, shapes of the operands, a replicated operand of whole numbers after them)
OPERATIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], torch.Tensor | None]] = {
    "x + y": (lambda x, y: x + y, [(16, 8), (16, 8)], None),
    "x * y": (lambda x, y: x * y, [(16, 8), (16, 8)], None),
    "x @ y": (lambda x, y: x @ y, [(16, 8), (8, 12)], None),
    "bmm": (torch.bmm, [(8, 4, 12), (8, 12, 4)], None),
    "linear": (F.linear, [(4, 16, 8), (12, 8)], None),
    "where": (lambda x, y: torch.where(x > 0, x, y), [(16, 8), (16, 8)], None),
    "cat along 0": (lambda x, y: torch.cat([x, y], 0), [(16, 8), (16, 8)], None),
    "cat along 1": (lambda x, y: torch.cat([x, y], 1), [(16, 8), (16, 8)], None),
    "stack": (lambda x, y: torch.stack([x, y]), [(16, 8), (16, 8)], None),
    "gather along 0": (lambda x, i: torch.gather(x, 0, i), [(16, 8)], _INDEX),
    "gather along 1": (lambda x, i: torch.gather(x, 1, i), [(16, 8)], _INDEX),
    "index_select along 0": (lambda x, i: torch.index_select(x, 0, i), [(16, 8)], torch.tensor([0, 3, 1])),
    "index_select along 1": (lambda x, i: torch.index_select(x, 1, i), [(16, 8)], torch.tensor([0, 3, 1])),
    "x[0]": (lambda x: x[0], [(16, 8)], None),
    "x[:, -1]": (lambda x: x[:, -1], [(16, 8)], None),
    "x[2:5]": (lambda x: x[2:5], [(16, 8)], None),
    "narrow": (lambda x: x.narrow(0, 2, 8), [(16, 8)], None),
    "embedding": (lambda w, i: F.embedding(i, w), [(16, 8)], _INDEX),
    "view(n, 2, 4) of n = 8 ranks": (lambda x: x.view(8, 2, 4), [(16, 4)], None),
    "view(n, 2, 4) of n = 3 ranks": (lambda x: x.view(3, 2, 4), [(6, 4)], None),
    "view(-1, 3)": (lambda x: x.view(-1, 3), [(8, 4, 3)], None),
    "transpose": (lambda x: x.transpose(0, 1), [(16, 8)], None),
    "expand": (lambda x: x.unsqueeze(0).expand(3, 16, 8), [(16, 8)], None),
    "chunk along 0": (lambda x: torch.chunk(x, 2, 0)[0], [(16, 8)], None),
    "split along 1": (lambda x: torch.split(x, 2, 1)[0], [(16, 8)], None),
    "x[:, 1:]": (lambda x: x[:, 1:], [(16, 8)], None),
    "sum": (lambda x: x.sum(), [(16, 8)], None),
    "sum along 0": (lambda x: x.sum(0), [(16, 8)], None),
    "mean along 1": (lambda x: x.mean(1), [(16, 8)], None),
    "var along 1": (lambda x: x.var(1), [(16, 8)], None),
    "max along 1": (lambda x: x.max(1)[0], [(16, 8)], None),
    "cumsum along 1": (lambda x: torch.cumsum(x, 1), [(16, 8)], None),
    "sort along 1": (lambda x: torch.sort(x, 1)[0], [(16, 8)], None),
    "topk along 1": (lambda x: torch.topk(x, 2, 1)[0], [(16, 8)], None),
    "softmax along 1": (lambda x: F.softmax(x, 1), [(16, 32)], None),
    "log_softmax along 1": (lambda x: F.log_softmax(x, 1), [(16, 32)], None),
    "cross_entropy": (F.cross_entropy, [(16, 32)], _INDEX[:, 0].contiguous()),
    "layer_norm": (lambda x: F.layer_norm(x, (8,)), [(16, 8)], None),
    "gelu": (F.gelu, [(16, 8)], None),
    "tril": (torch.tril, [(16, 8)], None),
    "repeat": (lambda x: x.repeat(2, 1), [(16, 8)], None),
}
#: (operation, placements) -> why more is sent here than torch sends
DIFFERENT: dict[tuple[str, str], str] = {
    (
        "linear",
        "R, S1",
    ): "the whole product now; torch's is a sum to be reduced, and its gradient of the input a shard: see below",
    ("view(-1, 3)", "S1"): "torch's strided shard is in no order of cuts: see below",
    (
        "softmax along 1",
        "S1",
    ): "two small reductions in place of gathering the tensor: more messages, fewer bytes; see below",
    ("log_softmax along 1", "S1"): "as softmax",
    ("cross_entropy", "S1"): "as softmax",
}

#: Torch since -> (operation, placements) -> its communication, where that differs from the page.
BEFORE: dict[str, dict[tuple[str, str], tuple[int, float]]] = {
    "2.13": {
        ("cat along 0", "S0, P"): (2, 1152),
        ("cat along 0", "P, S0"): (2, 1152),
        ("cat along 1", "S1, P"): (2, 1152),
        ("cat along 1", "P, S1"): (2, 1152),
        ("gather along 0", "P"): (1, 384),
        ("gather along 1", "P"): (1, 384),
        ("cumsum along 1", "P"): (1, 768),
        ("sort along 1", "P"): (1, 384),
        ("topk along 1", "P"): (1, 384),
        ("cross_entropy", "S0"): (0, 0),
    },
    "2.14": {},
}


@dataclass(frozen=True)
class Sent:
    """The communication of rank 0: collectives, and bytes that leave it."""

    messages: int
    bytes: float

    @classmethod
    def of(cls, traffic: Traffic, ranks: int) -> Sent:
        """The cost of collectives over this many ranks that go around in rings."""
        others = ranks - 1
        per_byte = {"all_gather": float(others), "all_reduce": 2 * others / ranks, "broadcast": 1.0, "scatter": 1.0}
        return cls(
            traffic.total, sum(size * per_byte.get(kind, others / ranks) for kind, size in traffic.sizes.items())
        )

    def __str__(self) -> str:
        return f"{self.messages} ({self.bytes:g} B)" if self.messages else "-"


@dataclass(frozen=True)
class Compared:
    """One call; torch's is None where torch cannot do it."""

    name: str
    placements: str
    ours: Sent
    torch: Sent | None

    @property
    def is_more(self) -> bool:
        """Return whether more messages or more bytes are sent here."""
        theirs = self.torch
        return theirs is not None and (
            self.ours.messages > theirs.messages or self.ours.bytes > theirs.bytes * (1 + 1e-9)
        )


def _made(library: int, mesh: Any, names: Sequence[str], shape: tuple[int, ...]) -> Any:
    """A DTensor of one of the `LIBRARIES`, with nothing sent for it."""
    dtensor, _, distribute = LIBRARIES[library]
    whole = torch.zeros(shape)
    # A tensor of which every rank has one summand is as large on each as one that all have.
    lying = [PLACEMENTS["R" if name == "P" else name][library] for name in names]
    local = distribute(whole, mesh, lying, src_data_rank=None).to_local()
    wanted = [PLACEMENTS[name][library] for name in names]
    return dtensor.from_local(local, mesh, wanted, run_check=False, shape=whole.shape, stride=whole.stride())


def _sent(call: Callable[[], Any], ranks: int) -> Sent | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            with count_collectives() as traffic:
                call()
        except Exception:  # torch refuses it; ours must not, and the caller looks
            return None
        finally:
            logging.disable(logging.NOTSET)
    return Sent.of(traffic, ranks)


def _both(name: str, placements: str, calls: Sequence[Callable[[], Any]], ranks: int) -> Compared:
    mine, theirs = (_sent(call, ranks) for call in calls)
    if mine is None:
        calls[0]()  # raises
        raise AssertionError(f"{name} of {placements} fails only while collectives are counted")
    return Compared(name, placements, mine, theirs)


def compare_operations() -> Iterator[Compared]:
    """Compare each of `OPERATIONS` with every choice of placements, inside a fake group of `RANKS` ranks."""
    meshes = [make("cpu", (RANKS,)) for _, make, _ in LIBRARIES]
    for name, (function, shapes, index) in OPERATIONS.items():
        for names in itertools.product(("R", "S0", "S1", "P"), repeat=len(shapes)):
            calls = []
            for library, mesh in enumerate(meshes):
                operands = [_made(library, mesh, [own], shape) for own, shape in zip(names, shapes, strict=True)]
                if index is not None:
                    replicated = [PLACEMENTS["R"][library]]
                    operands.append(LIBRARIES[library][2](index, mesh, replicated, src_data_rank=None))
                calls.append(lambda function=function, operands=operands: function(*operands))
            yield _both(name, ", ".join(names), calls, RANKS)


def compare_redistributions(shape: tuple[int, ...], size: tuple[int, ...]) -> Iterator[Compared]:
    """Every redistribution of a tensor of this size on a mesh of this shape. It runs inside a fake group of `RANKS`
    ranks."""
    dims = ("a", "b")[: len(shape)]
    meshes = [make("cpu", shape, mesh_dim_names=dims) for _, make, _ in LIBRARIES]
    assert math.prod(shape) == RANKS
    ways = list(itertools.product(("R", "S0", "S1", "S2", "P"), repeat=len(shape)))
    for source, target in itertools.product(ways, ways):
        if source == target or any(b == "P" != a for a, b in zip(source, target, strict=True)):
            continue
        calls = []
        for library, mesh in enumerate(meshes):
            x, wanted = _made(library, mesh, source, size), [PLACEMENTS[name][library] for name in target]
            calls.append(lambda x=x, mesh=mesh, wanted=wanted: x.redistribute(mesh, wanted))
        yield _both("redistribute", f"({', '.join(source)}) to ({', '.join(target)})", calls, shape[-1])


#: (mesh, size of the tensor): even, and such that shards differ
REDISTRIBUTED = [(mesh, size) for mesh in ((4,), (2, 2)) for size in ((8, 12, 16), (6, 5, 7))]


def _count(found: Sequence[Compared]) -> str:
    known = [c for c in found if c.torch is not None]
    less = sum(not c.is_more and c.ours != c.torch for c in known)
    more = sum(c.is_more for c in known)
    return f"| {len(found)} | {len(found) - len(known)} | {len(known) - less - more} | {less} | {more} |"


def compare() -> dict[str, list[Compared]]:
    """Every comparison: those of `REDISTRIBUTED` by their texts, and ``"operations"``."""
    with fake_group(RANKS):
        found = {str(of): list(compare_redistributions(*of)) for of in REDISTRIBUTED}
        return {**found, "operations": list(compare_operations())}


def page(found: dict[str, list[Compared]]) -> str:
    """The generated part of `PAGE`, of the results of `compare`."""
    lines = [
        "| what | calls | torch refuses | the same | less here | more here |",
        "|---|---|---|---|---|---|",
    ]
    for mesh, size in REDISTRIBUTED:
        lines.append(f"| `redistribute` of {size} on a mesh {mesh} {_count(found[str((mesh, size))])}")
    lines += [f"| operations {_count(found['operations'])}", ""]
    lines += ["| operation | placements | here | torch | |", "|---|---|---|---|---|"]
    for c in found["operations"]:
        if c.torch is not None and c.ours != c.torch:
            why = DIFFERENT.get((c.name, c.placements), "")
            lines.append(f"| `{c.name}` | {c.placements} | {c.ours} | {c.torch} | {why} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page; with ``--json``, print every comparison of it instead."""
    found = compare()
    if sys.argv[1:] == ["--json"]:
        print(json.dumps({what: [asdict(c) for c in compared] for what, compared in found.items()}))
        return
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}{page(found)}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
