"""The pictures of the documentation, docs/pictures/*.svg, drawn by the library.

    HYPER_PARALLEL_PLATFORM=torch-cpu python -m tests.torch.pictures

draws them anew; a test fails where the committed ones differ from those that the library draws.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    PackedShard,
    Partial,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    explain,
    init_device_mesh,
    parallelize_module,
    visualize_plan,
    visualize_sharding,
    zeros,
)
from hyper_parallel.core.rules.sequence_cut import balanced_ranges, natural_ranges
from hyper_parallel.debug.svg import COLOURS, Svg
from hyper_parallel.planning import search
from hyper_parallel.planning.llama import MODELS, llama_plan
from hyper_parallel.platform.dry import dry_world

__all__ = ["FOLDER", "drawn", "main"]

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"

#: name -> title, shape of the mesh, shape of the tensor, placements
SHARDINGS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], list[Any]]] = {
    "mesh": ("a mesh (dp=2, tp=4): rows are dp, columns tp", (2, 4), (2, 4), [Shard(0), Shard(1)]),
    "replicate": ("Replicate()", (4,), (4, 8), [Replicate()]),
    "shard0": ("Shard(0)", (4,), (4, 8), [Shard(0)]),
    "shard1": ("Shard(1)", (4,), (4, 8), [Shard(1)]),
    "uneven": ("Shard(0) of 7 rows over 4 ranks", (4,), (7, 8), [Shard(0)]),
    "packed": ("PackedShard(0, (4, 2, 2)): queries, keys, values", (2,), (8, 8), [PackedShard(0, (4, 2, 2))]),
    "partial": ("Partial(): each rank has a summand of all", (4,), (4, 8), [Partial()]),
    "two_dimensions": ("(Shard(0), Shard(1)) on (dp=2, tp=2)", (2, 2), (4, 8), [Shard(0), Shard(1)]),
}


def drawn() -> dict[str, str]:
    """File name -> SVG."""
    found = {f"{name}.svg": _sharding(*given) for name, given in SHARDINGS.items()}
    found["plan.svg"] = _plan()
    found["step.svg"] = _step()
    found["ways.svg"] = _ways()
    found["positions.svg"] = _positions()
    found["experts.svg"] = _experts()
    return found


def _experts() -> str:
    """Two ranks, four experts: tokens go to the rank of their expert and come back."""
    own = [{"a": 0, "b": 0, "c": 2, "d": 3}, {"p": 1, "q": 3, "r": 3}]  # token -> expert, of each rank
    expert_of = {**own[0], **own[1]}
    held = [sorted((t for t in expert_of if expert_of[t] // 2 == rank), key=expert_of.__getitem__) for rank in (0, 1)]
    picture, side, tops = Svg(), 28.0, (40.0, 150.0)
    columns = [(130.0, "tokens, by expert", own), (330.0, "at the experts", held), (530.0, "back", own)]
    places: list[dict[str, tuple[float, float]]] = []
    for left, title, ranks in columns:
        picture.text(left, 24, title)
        places.append({t: (left + i * side, tops[rank]) for rank in (0, 1) for i, t in enumerate(ranks[rank])})
    for here, there in pairwise(places):
        for token, (x, y) in here.items():
            to_x, to_y = there[token]
            if to_y != y:  # a token of an expert here stays
                foot, to_foot = (side, 0.0) if to_y > y else (0.0, side)
                picture.line(x + side / 2, y + foot, to_x + side / 2, to_y + to_foot)
    for rank, top in enumerate(tops):
        picture.text(12, top + 14, f"rank {rank}")
        picture.text(12, top + 30, f"experts {2 * rank}, {2 * rank + 1}")
        for placed in places:
            for token, (x, y) in placed.items():
                if y == top:
                    picture.box(x, y, side, side, COLOURS[expert_of[token]], token)
    for expert in range(4):
        picture.box(130 + expert * 110, 215, 14, 14, COLOURS[expert])
        picture.text(150 + expert * 110, 227, f"expert {expert}")
    return str(picture)


def _sharding(title: str, mesh: tuple[int, ...], shape: tuple[int, ...], placements: list[Any]) -> str:
    with dry_world(8) as platform, platform.without_data(), tempfile.TemporaryDirectory() as folder:
        device_mesh = init_device_mesh("cpu", mesh)
        if placements == [Partial()]:
            summand = platform.factory("full", shape, 0.0, platform.dtypes["float32"])
            x = DTensor.from_local(summand, device_mesh, placements)
        else:
            x = zeros(shape, device_mesh=device_mesh, placements=placements)
        path = os.path.join(folder, "x.svg")
        with contextlib.redirect_stdout(io.StringIO()):
            visualize_sharding(x, title, path=path)
        return Path(path).read_text(encoding="utf-8")


def _mlp() -> Any:
    parts = {"norm": nn.LayerNorm(16), "up": nn.Linear(16, 32), "act": nn.GELU(), "down": nn.Linear(32, 16)}
    model = nn.Sequential()
    for name, module in parts.items():
        model.add_module(name, module)
    return model


def _plan() -> str:
    with dry_world(4) as platform, platform.without_data(), tempfile.TemporaryDirectory() as folder:
        model = _mlp()
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        path = os.path.join(folder, "x.svg")
        visualize_plan(model, path=path)
        return Path(path).read_text(encoding="utf-8")


def _step() -> str:
    """Sequence parallelism around an MLP: one collective of each kind forward and backward, and two gradients."""
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return explain(_mlp(), {"tp": 4}, plan, torch.ones(2, 8, 16, requires_grad=True)).to_svg()


def _ways() -> str:
    with dry_world(1) as platform, platform.without_data():
        model = platform.make_decoder(MODELS["llama-3-8b"])
    tokens = torch.zeros(64, 4096, dtype=torch.int64, device="meta")
    plans = {"tp": llama_plan(False), "tp + sequence": llama_plan()}
    return search(model, 64, plans, tokens, mixed_precision=True).to_svg()


def _positions() -> str:
    """Draw who holds which of 16 positions, one after the other and balanced, and how many pairs each rank computes."""
    side, length, ranks, picture = 26, 16, 4, Svg()
    y = 20
    for title, ranges in (
        ("balance=False: the last rank has most to do", natural_ranges(length, ranks)),
        ("balance=True: a piece of the beginning and one of the end", balanced_ranges(length, ranks)),
    ):
        picture.text(8, y, title, bold=True)
        for rank, own in enumerate(ranges):
            for start, n in own:
                for i in range(start, start + n):
                    picture.box(8 + i * side, y + 10, side, side, COLOURS[rank], str(i))
            seen = sum(i + 1 for start, n in own for i in range(start, start + n))
            foot = y + 58 + 18 * rank
            picture.box(8, foot - 11, 14, 14, COLOURS[rank])
            picture.text(28, foot, f"rank {rank}: {sum(n for _, n in own)} positions, {seen} pairs of query and key")
        y += 160
    return str(picture)


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, picture in drawn().items():
        (FOLDER / name).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
