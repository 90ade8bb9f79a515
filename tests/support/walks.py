"""The walks through the code in docs/architecture.md, compared with those of a real step.

A walk lists the functions on the call stack at a few moments: who called whom, from the user's call to there. Calls
that have returned by then (checks of the plan, look-ups in caches) are not in the walk. The page lists their files.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import hyper_parallel
from hyper_parallel import ColwiseParallel, RowwiseParallel, Shard, distribute_tensor, parallelize_module
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
PACKAGE = Path(hyper_parallel.__file__).parent
#: Most files that a reader of a walk has to open. On MindSpore the user calls a function of ours for gradients.
MOST = {"torch": 8, "mindspore": 9}

Walk = dict[str, list[str]]


def _file_of(frame: FrameType) -> str | None:
    """The file of the package that a function stands in; None for another one, and for files of tests."""
    path = Path(frame.f_code.co_filename)
    known = PACKAGE in path.parents and PACKAGE / "testing" not in path.parents
    return path.relative_to(PACKAGE).as_posix() if known else None


@contextmanager
def walking(walk: Walk, *moments: tuple[str, str, int], ran: set[str] | None = None) -> Iterator[None]:
    """Add to ``walk`` the functions of the package on the stack when a moment's function is entered. A moment names it
    by the ends of its file and of its qualified name. It also says how often it was entered until then. Add to ``ran``
    the files of all functions that run."""
    waiting = [[*moment] for moment in moments]

    def enter(frame: FrameType | None, event: str, _: Any) -> None:
        if event != "call" or frame is None:
            return
        here = (frame.f_code.co_filename, frame.f_code.co_qualname)
        if ran is not None and (file := _file_of(frame)):
            ran.add(file)
        entered = [m for m in waiting if here[0].endswith(m[0]) and here[1].endswith(m[1])]
        for moment in entered:
            moment[2] -= 1
        if all(moment[2] for moment in entered):
            return
        waiting[:] = [moment for moment in waiting if moment[2]]
        stack = []
        while frame is not None:
            if file := _file_of(frame):
                stack.append((file, frame.f_code.co_name))
            frame = frame.f_back
        for file, name in reversed(stack):
            names = walk.setdefault(file, [])
            if name not in names:
                names.append(name)

    sys.setprofile(enter)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert not waiting, f"not entered: {waiting}"


@contextmanager
def nobody_watches(folder: str) -> Iterator[None]:
    """Inside, units of earlier tests that still live are not told of a backward."""
    module = import_module(f"hyper_parallel.platform.{folder}.gradients.autograd")
    with pytest.MonkeyPatch().context() as patch:
        if hasattr(module, "_WATCHERS"):
            patch.setattr(module, "_WATCHERS", [])
        yield


@spmd.on_mesh()
def of_a_plan(mesh: Any, folder: str) -> tuple[Walk, list[str]]:
    """The walk from `parallelize_module` to the all-reduce in backward, in the second step of a model."""
    adapter = get_adapter()
    walk: Walk = {}
    model, x = adapter.load(adapter.Mlp(6, 12), np.random.default_rng(0)), np.ones((3, 6), np.float32)
    with walking(walk, ("autograd.py" if folder == "mindspore" else "fast.py", ".linear_view", 1)):
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def loss(x: Any) -> tuple[Any, Any]:
        y = adapter.call(model, x)
        return adapter.sum(y), y

    def step() -> None:
        adapter.model_value_and_grads(model, loss, x)

    step()
    # The first all-reduce is that of the outputs of `down`, in forward.
    ran: set[str] = set()
    moments = (".py", ".view", 1), (f"{folder}/processes/collectives.py", ".all_reduce", 2)
    with nobody_watches(folder), walking(walk, *moments, ran=ran):
        step()
    return walk, sorted(ran - set(walk))


@spmd.on_mesh()
def of_an_operation(mesh: Any, folder: str) -> tuple[Walk, list[str]]:
    """The walk from ``dtensor + dtensor`` to the result, for the first call and for a repeated one."""
    walk: Walk = {}
    x = distribute_tensor(get_adapter().tensor(np.ones((5, 11), np.float32)), mesh, [Shard(1)])
    local = ("platform/arguments.py", "call_elementwise", 1)
    plan = (("rules/elementwise.py", "add", 1), ("strategy.py", "solve", 1))
    with walking(walk, *plan, local, (".py", "wrap", 1)):
        x + x
    ran: set[str] = set()
    with walking(walk, local, (".py", "wrap", 1), ran=ran):
        x + x
    return walk, sorted(ran - set(walk))


@spmd.on_mesh()
def of_an_index(mesh: Any, folder: str) -> tuple[Walk, list[str]]:
    """The walk from ``dtensor[2:5]`` along the sharded dimension to the result."""
    walk: Walk = {}
    x = distribute_tensor(get_adapter().tensor(np.ones((7, 4), np.float32)), mesh, [Shard(0)])
    plan = (("rules/indexing.py", "getitem", 1), ("platform/indexing.py", "region_of", 1), ("strategy.py", "solve", 1))
    local = (
        ("rules/own_part.py", "Cut.take", 1),
        (f"{folder}/op_table/{'index' if folder == 'torch' else 'shape'}.py", "_call_getitem", 1),
    )
    with walking(walk, *plan, *local, (".py", "wrap", 1)):
        x[2:5]
    ran: set[str] = set()
    with walking(walk, *local, (".py", "wrap", 1), ran=ran):
        x[2:5]
    return walk, sorted(ran - set(walk))


def described(title: str) -> tuple[Walk, list[str]]:
    """The walk that the page has under this first line of a block, and the files outside of it."""
    block = re.search(rf"```text\n{re.escape(title)}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None, f"no walk {title!r} in {PAGE}"
    walk = {file: names.split(", ") for file, names in (line.split(": ") for line in block[1].strip().splitlines())}
    beside = walk.pop("also", [])
    return walk, beside


def check(pool: Any, folder: str) -> None:
    """Compare the walks with the page, on two ranks."""
    titles = {
        "parallelize_module to the all-reduce in backward": of_a_plan,
        "x + x": of_an_operation,
        "x[2:5]": of_an_index,
    }
    for title, walked in titles.items():
        wanted = described(f"{title}, {folder}")
        assert len(wanted[0]) <= MOST[folder]
        for walk, beside in pool.run(2, walked, folder):
            lines = [f"{file}: {', '.join(names)}" for file, names in (*walk.items(), ("also", beside))]
            assert (walk, beside) == wanted, "\n".join(lines)
