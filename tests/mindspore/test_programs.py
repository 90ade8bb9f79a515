"""Programs as users of MindSpore write them (tests/mindspore/programs): in parallel they give the results of one
device."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hyper_parallel.testing.extent import in_gate
from hyper_parallel.testing.spmd import device_mesh
from tests.mindspore.nets import first_line, on_first_rank
from tests.mindspore.programs.program import WAYS, compare, run
from tests.mindspore.programs.table import PAGE, PROGRAMS, text


def outcome(name: str, way: str) -> list[str]:
    """Run a program in a way, and name the differences from one device on this rank."""
    shape, program = WAYS[way], PROGRAMS[name]
    mesh = device_mesh(*shape, names=("dp", "tp")[-len(shape) :])
    everyone = device_mesh(math.prod(shape))
    if everyone is None:
        return []
    wanted = on_first_rank(everyone, lambda: run(program))
    try:
        got = run(program, way, mesh)
    except Exception as error:
        message = f"{type(error).__name__}: {first_line(error)}"
        if way not in program.refused:
            raise
        return [] if message.startswith(program.refused[way]) else [message]
    return ["was not refused"] if way in program.refused else compare(got, wanted, program.tolerance)


IN_GATE = (
    *("Llama", "convolutions", "experts by masks", "sequence parallel", "cross entropy, smoothed", "cosines"),
    *("Adam with decay", "clipped by each norm", "Model.train, a callback that sets", "saved and loaded"),
    *("hooks of layers with styles", "recompute in the forward", "recompute, not reentrant", "dropout"),
)


@pytest.mark.parametrize("name", in_gate(PROGRAMS, IN_GATE))
def test_programs(pool: Any, name: str) -> None:
    found = {way: pool.run(math.prod(shape), outcome, name, way) for way, shape in WAYS.items()}
    assert {way: problems for way, problems in found.items() if any(problems)} == {}


def test_page() -> None:
    assert PAGE.read_text() == text(), "python -m tests.mindspore.programs.table writes it"
