"""``hyper-parallel test``: check that this machine computes right on several ranks."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.cli.output import UsageError, show
from hyper_parallel.debug.text import TERMINAL, format_seconds, format_table
from hyper_parallel.platform import available_platforms, get_platform
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.pool import JobError, WorkerPool
from hyper_parallel.testing.spmd import device_mesh

__all__ = ["check_block", "check_checkpoint", "check_collectives", "run"]


def check_collectives() -> str:
    """Check every redistribution between replicated, sharded and partial tensors against NumPy."""
    from hyper_parallel import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh, adapter = device_mesh(), get_adapter()
    if mesh is None:
        return ""  # a rank that does not take part
    whole = np.arange(7 * 5, dtype=np.float32).reshape(7, 5)
    checked = 0
    for given in (Replicate(), Shard(0), Shard(1)):
        x = distribute_tensor(adapter.tensor(whole), mesh, [given])
        for wanted in (Replicate(), Shard(0), Shard(1)):
            y = x.redistribute(placements=[wanted]).full_tensor()
            np.testing.assert_allclose(adapter.numpy(y), whole)
            checked += 1
    summands = DTensor.from_local(adapter.tensor(whole), mesh, [Partial()])
    for wanted in (Replicate(), Shard(0)):
        y = summands.redistribute(placements=[wanted]).full_tensor()
        np.testing.assert_allclose(adapter.numpy(y), whole * mesh.size())
        checked += 1
    return f"{checked} redistributions"


def check_block() -> str:
    """Check output and gradients of a tensor and sequence parallel transformer block against a single device."""
    from hyper_parallel.testing.comparisons import block

    mesh = device_mesh()
    if mesh is None:
        return ""
    counts = block(True, 4 * mesh.size())
    forward, backward = (_listed(counts[direction]) for direction in ("forward", "backward"))
    return f"forward: {forward}; backward: {backward}"


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in counts.items()) or "nothing sent"


def check_checkpoint(folder: str) -> str:
    """Check that tensors saved in one sharding can be loaded in another."""
    from hyper_parallel import Replicate, Shard, distribute_tensor

    checkpoint = importlib.import_module("hyper_parallel.checkpoint")
    mesh, adapter = device_mesh(), get_adapter()
    whole = np.arange(7 * 5, dtype=np.float32).reshape(7, 5)
    saved = {"x": distribute_tensor(adapter.tensor(whole), mesh, [Shard(0)])}
    checkpoint.save(saved, folder)
    for placement in (Shard(1), Replicate()):
        target = {"x": distribute_tensor(adapter.tensor(whole * 0), mesh, [placement])}
        checkpoint.load(target, folder)
        np.testing.assert_array_equal(adapter.numpy(target["x"].full_tensor()), whole)
    return "saved by rows, loaded by columns and whole"


def run(arguments: argparse.Namespace) -> int:
    """Run the checks on each requested backend; return 0 if all succeed."""
    if arguments.processes < 1:
        raise UsageError(f"-n {arguments.processes}: the number of ranks must be at least 1")
    names = arguments.platform or [get_platform().name]
    if names == ["all"]:
        names = [name for name, reason in available_platforms().items() if reason is None]
    results = [result for name in names for result in _check(get_platform(name).name, arguments.processes)]
    rows = [
        (r["platform"], r["check"], "right" if r["right"] else "WRONG", r["what"], format_seconds(r["seconds"]))
        for r in results
    ]
    right = all(r["right"] for r in results)
    text = format_table(("backend", "check", "", "", "time"), rows, right=[4], width=TERMINAL)
    text += f"\n\n{arguments.processes} ranks: {'all is right' if right else 'something is wrong, see above'}"
    for r in results:
        if not r["right"]:
            text += f"\n\n{r['platform']}, {r['check']}:\n{r['error']}"
    show(text, {"right": right, "ranks": arguments.processes, "results": results}, arguments.json)
    return 0 if right else 1


def _check(name: str, processes: int) -> list[dict[str, Any]]:
    checks: list[tuple[str, Callable[..., str], tuple]] = [
        ("collectives", check_collectives, ()),
        ("parallel block", check_block, ()),
    ]
    results = []
    with tempfile.TemporaryDirectory() as folder, WorkerPool(name, size=processes) as pool:
        if importlib.util.find_spec("hyper_parallel.checkpoint") is not None:
            checks.append(("checkpoint", check_checkpoint, (str(Path(folder) / "checkpoint"),)))
        for title, check, given in checks:
            began = time.perf_counter()
            result = {"platform": name, "check": title, "right": True, "what": "", "error": ""}
            try:
                result["what"] = pool.run(processes, check, *given)[0]
            except JobError as error:
                result |= {"right": False, "error": str(error)}
            results.append({**result, "seconds": time.perf_counter() - began})
    return results
