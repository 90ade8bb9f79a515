"""Smaller variants of training programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hyper_parallel.testing.fuzz.training.programs import Model, Program, Setup

__all__ = ["smaller"]


def smaller(program: Program) -> Iterator[Program]:
    """Yield smaller variants of a program, the most promising first."""
    actions = program.actions
    for at in reversed(range(len(actions))):
        if len(actions) > 1:
            yield replace(program, actions=(*actions[:at], *actions[at + 1 :]))
    model = program.model
    changes: tuple[dict[str, Any], ...] = (
        {"writer": ""},
        {"vocabulary": 0},
        {"bias": False},
        {"drops": False},
        {"again": ""},
    )
    for change in changes:
        if getattr(model, next(iter(change))) != next(iter(change.values())):
            yield _with_model(program, replace(model, **change))
    if len(model.blocks) > 1 and not any(word == "differ" for word, *_ in actions):
        yield _with_model(program, replace(model, blocks=model.blocks[:-1]))
    if program.cuts:
        yield replace(program, cuts=())
    if program.optimizer != "sgd":
        yield replace(program, optimizer="sgd")
    for i, setup in enumerate(program.setups):
        used = i == 0 or ("resume", i) in actions
        if not used:
            continue
        for at in range(len(setup.units)):
            fewer = replace(
                setup,
                units=(*setup.units[:at], *setup.units[at + 1 :]),
                reshard=(*setup.reshard[:at], *setup.reshard[at + 1 :]),
            )
            yield _with_setup(program, i, fewer)
        plain: dict[str, Any] = {
            "by_last": False,
            "two_meshes": False,
            "meta": False,
            "reshard": (None,) * len(setup.reshard),
        }
        for name, value in plain.items():
            if getattr(setup, name) != value:
                yield _with_setup(program, i, replace(setup, **{name: value}))


def _with_setup(program: Program, i: int, setup: Setup) -> Program:
    return replace(program, setups=(*program.setups[:i], setup, *program.setups[i + 1 :]))


def _with_model(program: Program, model: Model) -> Program:
    """Return the program with another model, without blocks and units that this model does not have."""
    names = {f"block{i}" for i in range(len(model.blocks))} | ({"writer"} if model.writer else set())
    setups = []
    for setup in program.setups:
        units = [tuple(path for path in unit if path.split(".")[0] in names) for unit in setup.units]
        kept = [i for i, unit in enumerate(units) if unit]
        setups.append(
            replace(
                setup,
                styles=(*setup.styles[: len(model.blocks)], *setup.styles[len(program.model.blocks) :]),
                units=tuple(units[i] for i in kept),
                reshard=(*(setup.reshard[i] for i in kept), setup.reshard[-1]),
            )
        )
    actions = tuple(
        (word, *(tuple(i for i in order if i < len(model.blocks)) for order in args))
        if word in ("order", "choose")
        else (word, *args)
        for word, *args in program.actions
    )
    return replace(program, model=model, setups=tuple(setups), actions=actions)
