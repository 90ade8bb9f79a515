"""Programs as users of MindSpore write them (tests/mindspore/programs): in parallel they give the results of one
device."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.testing.extent import in_gate
from hyper_parallel.testing.spmd import device_mesh
from tests.mindspore.nets import first_line, on_first_rank
from tests.mindspore.programs.program import WAYS, Program, Record, compare, run
from tests.mindspore.programs.table import PAGE, PROGRAMS, text


def outcomes(name: str) -> dict[str, list[str]]:
    """Run a program in all ways, and name the differences of each from one device on this rank."""
    program = PROGRAMS[name]
    wanted = on_first_rank(device_mesh(), lambda: run(program))
    found = {}
    for way, shape in WAYS.items():
        mesh = device_mesh(*shape, names=("dp", "tp")[-len(shape) :])
        if mesh is not None:
            found[way] = outcome(program, way, mesh, wanted)
    return found


def outcome(program: Program, way: str, mesh: Any, wanted: Record) -> list[str]:
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
    found = pool.run(4, outcomes, name)
    assert [set(ways) for ways in found[:2]] == [{*WAYS}] * 2
    assert [{way: problems for way, problems in ways.items() if problems} for ways in found] == [{}] * 4


def test_page() -> None:
    assert PAGE.read_text() == text(), "python -m tests.mindspore.programs.table writes it"
