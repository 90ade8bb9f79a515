"""Costs of a step of the standard models in things that can be counted, without a clock.

``python -m tests.torch.costs`` prints the table of `test_costs`, and with ``--write`` puts it there. Everything is
counted from outside: attributes of the DTensor class are wrapped, calls are seen by `sys.setprofile`, collectives below
all libraries (`benchmarks.torch_traffic`).
"""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import hyper_parallel
from benchmarks.sizes import LlamaSizes, MlpSizes
from benchmarks.torch_groups import fake_group
from benchmarks.torch_traffic import count_passes
from benchmarks.torch_versions import DTENSORS, HYPER_PARALLEL, TUNED, Version, llama_versions, mlp_versions
from benchmarks.traffic import Traffic
from hyper_parallel.core.operations.dispatch import dispatch
from hyper_parallel.core.tensor_parallel.program import uneven_shards
from hyper_parallel.platform.torch.op_table import OP_TABLE

__all__ = ["RANKS", "Cost", "Counted", "count_all"]

RANKS = 4
PACKAGE = str(Path(hyper_parallel.__file__).parent)
#: Inlined by newer Pythons, so not counted as calls by any.
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")


class Cost(NamedTuple):
    """One pass of a model, backward without forward.

    Attributes:
        dtensors: tensors that became DTensors.
        dispatches: operations on DTensors.
        calls: calls of Python functions of this package.
        nodes: nodes of the autograd graph that forward builds, leaves included; 0 in backward.
        collectives: the communication: name, number and bytes.
    """

    dtensors: int
    dispatches: int
    calls: int
    nodes: int
    collectives: str

    def __repr__(self) -> str:
        return f"Cost({self.dtensors}, {self.dispatches}, {self.calls}, {self.nodes}, {self.collectives!r})"


class Counted(NamedTuple):
    """Costs of one version of a model, and the communication of hand-written code in the same passes."""

    forward: Cost
    backward: Cost
    hand_written: tuple[str, str]


@dataclass
class _Counter:
    """Counts while it is `on`."""

    on: bool = False
    dtensors: int = 0
    dispatches: int = 0
    calls: int = 0

    def reset(self) -> None:
        self.dtensors = self.dispatches = self.calls = 0


@contextmanager
def _watched_class(counter: _Counter) -> Iterator[None]:
    """See tensors become DTensors: each is given its layout then."""
    cls: Any = _dtensor_class()

    def get(self: Any) -> Any:
        return self.__dict__.get("_layout")

    def set_(self: Any, layout: Any) -> None:
        counter.dtensors += counter.on
        self.__dict__["_layout"] = layout

    def delete(self: Any) -> None:
        self.__dict__.pop("_layout", None)

    cls._layout = property(get, set_, delete)
    try:
        yield
    finally:
        del cls._layout


@contextmanager
def _profiled(counter: _Counter) -> Iterator[None]:
    """See calls of Python functions."""
    # The function that runs operations is made for each row of the op table, of the same code.
    runs = [dispatch.bind(row) for row in (None, *OP_TABLE.values())]
    dispatches = {(run.args[0] if isinstance(run, partial) else run).__code__ for run in runs}

    def see(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not counter.on:
            return
        code = frame.f_code
        if code in dispatches:
            counter.dispatches += 1
        if code.co_filename.startswith(PACKAGE) and code.co_name not in COMPREHENSIONS:
            counter.calls += 1

    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)


def _dtensor_class() -> type:
    mesh = hyper_parallel.init_device_mesh("cpu", (RANKS,))
    return type(hyper_parallel.DTensor.from_local(torch.ones(1), mesh, [hyper_parallel.Replicate()]))


def _nodes(y: torch.Tensor) -> int:
    """Nodes of the graph behind ``y``."""
    with torch._C.DisableTorchFunctionSubclass():
        seen: set[Any] = set()
        new = [y.grad_fn]
        while new:
            node = new.pop()
            if node is not None and node not in seen:
                seen.add(node)
                new += [following for following, _ in node.next_functions]
        return len(seen)


def _traffic(version: Version) -> tuple[str, str]:
    """Collectives in forward, and in backward alone."""
    forward, both = count_passes(version)
    rest = {name: both.counts[name] - forward.counts.get(name, 0) for name in both.counts}
    sizes = {name: both.sizes[name] - forward.sizes.get(name, 0) for name in both.sizes}
    backward = Traffic({name: n for name, n in rest.items() if n}, {name: sizes[name] for name, n in rest.items() if n})
    return str(forward), str(backward)


def count(version: Version) -> tuple[Cost, Cost]:
    """Forward and backward of a version that has run before."""
    for _ in range(2):
        version.forward_and_backward()
        version.clear()
    counter = _Counter()

    def counted(run: Callable[[], Any]) -> tuple[Any, tuple[int, int, int]]:
        counter.reset()
        counter.on = True
        try:
            value = run()
        finally:
            counter.on = False
        return value, (counter.dtensors, counter.dispatches, counter.calls)

    def run_backward() -> None:
        with (version.block or nullcontext)():
            y.backward(version.cotangent)

    # Not `version.forward` and not `y.backward`: these are the benchmark's and torch's.
    gc.collect()  # so that nothing is collected, and no callback called, while it counts
    with _watched_class(counter), _profiled(counter):
        y, forward = counted(lambda: version.model(*version.inputs))
        nodes = _nodes(y)
        _, backward = counted(run_backward)
    version.clear()
    traffic = _traffic(version)
    return Cost(*forward, nodes, traffic[0]), Cost(*backward, 0, traffic[1])


def count_all() -> dict[str, Counted]:
    """The standard models by name."""
    uneven_shards.HANDED_OUT.clear()  # an earlier test may have handed shards out
    models: dict[str, Callable[[], list[Version]]] = {
        "MLP": lambda: mlp_versions(MlpSizes()),
        "Llama block": lambda: llama_versions(LlamaSizes()),
        "Llama block, sequence parallel": lambda: llama_versions(LlamaSizes(), sequence_parallel=True),
    }
    table = {}
    with fake_group(RANKS):
        for name, make in models.items():
            versions = {version.name: version for version in make()}
            hand_written = _traffic(versions[TUNED])
            for kind, title in ((HYPER_PARALLEL, name), (DTENSORS, f"{name}, DTensors between modules")):
                table[title] = Counted(*count(versions[kind]), hand_written)
    return table


def as_python(table: dict[str, Counted]) -> str:
    """The table as it stands in `test_costs`."""
    lines = ["EXPECTED: dict[str, tuple[Cost, Cost]] = {"]
    for title, counted in table.items():
        lines += [f'    "{title}": (', f"        {counted.forward},", f"        {counted.backward},", "    ),"]
    return "\n".join([*lines, "}"]).replace("'", '"')


def _write(table: str) -> None:
    test = Path(__file__).with_name("test_costs.py")
    text, found = re.subn(r"^EXPECTED: .*?^}", table, test.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert found == 1, f"no table in {test}"
    test.write_text(text)


if __name__ == "__main__":
    counted = count_all()
    if sys.argv[1:] == ["--json"]:
        print(json.dumps(counted))
    else:
        print(as_python(counted))
    if sys.argv[1:] == ["--write"]:
        _write(as_python(counted))
