"""The overhead of an operation on distributed activations over the same operation on plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.report import Goal, Result, Table
from benchmarks.timing import Effort, Step, interleaved, spread
from benchmarks.torch_groups import fake_group
from benchmarks.torch_versions import HYPER_PARALLEL, LIBRARIES, TORCH

__all__ = ["run"]

RANKS = 4
PLAIN = "plain"
#: Global shape and sharded dimension of each operand; None is replicated.
OPERANDS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "x": ((2, 8, 64), 2),
    "y": ((2, 8, 64), 2),
    "heads": ((2, 8, 16, 4), 2),
    "query": ((2, 16, 8, 4), 1),
    "key": ((2, 16, 4, 8), 1),
    "scores": ((2, 16, 8, 8), 1),
    "whole": ((2, 8, 64), None),
    "column": ((64, 64), 0),
    "row": ((64, 64), 1),
    "part": ((2, 32, 64), 1),
    "scale": ((64,), None),
}
LEAVES = ("column", "row", "scale")
Operands = dict[str, Any]
OPERATIONS: dict[str, Callable[[Operands], Any]] = {
    "add": lambda t: t["x"] + t["y"],
    "mul": lambda t: t["x"] * t["y"],
    "relu": lambda t: F.relu(t["x"]),
    "silu": lambda t: F.silu(t["x"]),
    "view": lambda t: t["x"].view(2, 8, -1, 4),
    "transpose": lambda t: t["heads"].transpose(1, 2),
    "matmul": lambda t: t["query"] @ t["key"],
    "softmax": lambda t: F.softmax(t["scores"], -1),
    "linear, row-parallel": lambda t: F.linear(t["x"], t["row"]),
    "linear, column-parallel, of an input that others read too": lambda t: F.linear(t["whole"], t["column"]),
    "view and column-parallel linear of it": lambda t: F.linear(t["whole"].view(16, 64), t["column"]),
    "rms_norm on a shard of the sequence": lambda t: F.rms_norm(t["part"], (64,), t["scale"]),
}


def _operands(library: Any | None) -> Operands:
    """Local tensors that need gradients, or DTensors of them. Only parameters are leaves."""
    generator = torch.Generator().manual_seed(0)
    mesh = None if library is None else library.init_device_mesh("cpu", (RANKS,))
    operands = {}
    for name, (shape, dim) in OPERANDS.items():
        local = list(shape)
        if dim is not None:
            local[dim] //= dist.get_world_size()
        value = torch.randn(local, generator=generator)
        if library is not None:
            value = library.DTensor.from_local(
                value, mesh, [library.Replicate() if dim is None else library.Shard(dim)]
            )
        value.requires_grad_()
        operands[name] = value if name in LEAVES else value * 1.0
    return operands


def run(effort: Effort) -> Result:
    """Forward with gradients enabled: each operation next to the plain one on the local tensors."""
    result = Result(
        "operators",
        f"Forward of one operation with gradients enabled, on local tensors of about 256 elements; {RANKS} ranks of a "
        "fake process group. Microseconds above: difference to the plain operation in the same round.",
    )
    table = Table("Operations", ["operation", "plain, microseconds", f"{HYPER_PARALLEL}, above", f"{TORCH}, above"])
    result.tables.append(table)
    with fake_group(RANKS):
        operands = {PLAIN: _operands(None), **{name: _operands(library) for name, library in LIBRARIES.items()}}
        for name, operation in OPERATIONS.items():
            times = interleaved(
                {kind: Step(partial(operation, own), repeats=20) for kind, own in operands.items()}, effort
            )
            above = {
                kind: spread([t - plain for t, plain in zip(times[kind], times[PLAIN], strict=True)])
                for kind in (HYPER_PARALLEL, TORCH)
            }
            table.rows.append([name, spread(times[PLAIN]), above[HYPER_PARALLEL], above[TORCH]])
            result.goals.append(Goal(f"{name}: microseconds above plain", above[HYPER_PARALLEL]["median"], 3.0))
    return result
