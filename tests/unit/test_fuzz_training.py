"""Random programs of trainers as data: one seed makes one program, with everything in them that they should have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hyper_parallel.testing.fuzz.shrink import smallest
from hyper_parallel.testing.fuzz.training.programs import (
    ROWS,
    WORDS,
    Model,
    Program,
    Setup,
    TrainingLimits,
    generate,
    unit_order,
)
from hyper_parallel.testing.fuzz.training.reductions import smaller

PROGRAMS = [generate(seed, TrainingLimits()) for seed in range(600)]


def test_a_seed_makes_one_program() -> None:
    assert [generate(seed, TrainingLimits()) for seed in range(50)] == PROGRAMS[:50]
    assert len(set(map(str, PROGRAMS[:50]))) == 50


def test_all_words_and_kinds_occur() -> None:
    assert {word for program in PROGRAMS for word, *_ in program.actions} == {*WORDS}
    models, setups = [p.model for p in PROGRAMS], [setup for p in PROGRAMS for setup in p.setups]
    assert {kind for model in models for kind in model.blocks} == {"linear", "mlp", "norm", "rms", "experts"}
    assert {model.writer for model in models} == {"", "teacher", "counter", "buffer", "book"}
    assert {name for setup in setups for name in setup.names} == {"rep", "shard", "copy", "tp"}
    assert {style for setup in setups for style in setup.styles} == {"", "col", "row", "pair"}
    assert {len(unit) for setup in setups for unit in setup.units} == {1, 2}
    assert {repr(r) for setup in setups for r in setup.reshard} == {"None", "True", "False", "2"}
    assert any(setup.two_meshes for setup in setups) and any(setup.by_last for setup in setups)
    assert {program.data for program in PROGRAMS} == {"parts", "same", "batch"}
    assert any(program.cuts for program in PROGRAMS) and any(model.drops for model in models)
    assert {a[2] for program in PROGRAMS for a in program.actions if a[0] == "load"} == {"write", "whole", "sharded"}


def test_limits_hold() -> None:
    found = [
        generate(
            seed, TrainingLimits(("float32",), frozenset({"cast", "resume"}), ("teacher",), ("copy",), ("sgd",), 1)
        )
        for seed in range(200)
    ]
    assert {word for program in found for word, *_ in program.actions} == {*WORDS} - {"cast", "resume"}
    assert {p.model.dtype for p in found} == {"float32"} and {p.optimizer for p in found} == {"sgd"}
    assert {p.model.writer for p in found} == {"", "teacher"}
    assert all(rows.stop > rows.start for p in found for setup in p.setups for rows in p.rows(setup))


def test_further_ways_to_load() -> None:
    """Further ways to load take the place of others, and the rest of a program stays."""
    limits = TrainingLimits(loads=("write", "whole", "sharded", "set_data"))
    found = [generate(seed, limits) for seed in range(600)]
    assert {a[2] for p in found for a in p.actions if a[0] == "load"} == {*limits.loads}
    assert [[a[:2] for a in p.actions] for p in found] == [[a[:2] for a in p.actions] for p in PROGRAMS]


def test_rows_of_ranks() -> None:
    for program in PROGRAMS:
        for setup in program.setups:
            rows = [np.arange(ROWS)[part] for part in program.rows(setup)]
            assert len(rows) == setup.data_ranks
            if program.data != "same":
                assert np.concatenate(rows).tolist() == list(range(ROWS))


def test_units_in_the_order_of_blocks() -> None:
    setup = Setup((2,), ("shard",), (), (("block1.up",), ("block1",), ("block0", "block3")), (None,) * 4)
    assert unit_order(setup, (0, 1, 2, 3, 1)) == [2, 0, 2, 0]


def test_smaller_programs() -> None:
    """A program that fails because of two of its actions keeps those two, with the smallest model."""
    program = next(p for p in PROGRAMS if len(p.model.blocks) > 2 and p.model.writer and len(p.actions) > 5)
    program = replace(program, actions=(("keep", "data"), *program.actions[:-1], ("eval", 3)))

    def fails(found: Program) -> bool:
        return found.actions[0] == ("keep", "data") and found.actions[-1] == ("eval", 3)

    found = smallest(program, fails, 500, smaller)
    assert found.actions == (("keep", "data"), ("eval", 3))
    assert found.model == replace(
        program.model, blocks=program.model.blocks[:1], writer="", vocabulary=0, bias=False, drops=False
    )
    assert found.setups[0].units == () and found.setups[0].reshard == (None,) and found.optimizer == "sgd"
    assert len(str(found).splitlines()) == 7
    assert isinstance(found.model, Model)
