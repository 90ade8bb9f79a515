"""Tables in which choices meet: rows that make one choice of each kind, such that every few of them occur together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["covering", "drawn"]

Row = dict[str, Any]
#: Choices that occur together, each with its kind, in the order of kinds.
Group = tuple[tuple[str, Any], ...]

#: How many rows are drawn, of which the one that adds most is taken.
DRAWN = 60


def _groups_of(row: Row, strength: int) -> set[Group]:
    """Every ``strength`` choices of a row."""
    return set(itertools.combinations(sorted(row.items()), strength))


def covering(
    choices: Mapping[str, Sequence[Any]],
    settle: Callable[[Row], Row] = dict,
    strength: int = 2,
    first: Sequence[Row] = (),
) -> list[Row]:
    """Rows in which every ``strength`` choices occur together that can; the same on every machine.

    Args:
        choices: kind -> the options, hashable. The first of each goes with everything.
        settle: gives a row in which choices that have no meaning next to others are the first ones. A choice that has
            none next to the first of all others has one if one of these is another.
        strength: 2 for pairs.
        first: rows that there are already.
    """
    rng = random.Random(0)
    missing = _possible(choices, settle, strength)
    for row in first:
        missing -= _groups_of(row, strength)
    rows: list[Row] = []
    while missing:
        wanted = dict(min(missing, key=repr))
        tried = [settle({kind: rng.choice(values) for kind, values in choices.items()}) for _ in range(DRAWN)]
        tried += [_completed(wanted, choices, settle, strength)]
        best = max(tried, key=lambda row: len(_groups_of(row, strength) & missing))
        missing -= _groups_of(best, strength)
        rows.append(best)
    return rows


def drawn(choices: Mapping[str, Sequence[Any]], settle: Callable[[Row], Row], count: int, seed: int) -> list[Row]:
    """Rows at random."""
    rng = random.Random(seed)
    return [settle({kind: rng.choice(values) for kind, values in choices.items()}) for _ in range(count)]


def _possible(choices: Mapping[str, Sequence[Any]], settle: Callable[[Row], Row], strength: int) -> set[Group]:
    """The groups that some row has."""
    found = set()
    for kinds in itertools.combinations(sorted(choices), strength):
        for values in itertools.product(*(choices[kind] for kind in kinds)):
            group = dict(zip(kinds, values, strict=True))
            if any(group.items() <= row.items() for row in _around(group, choices, settle)):
                found.add(tuple(group.items()))
    return found


def _around(group: Row, choices: Mapping[str, Sequence[Any]], settle: Callable[[Row], Row]) -> Iterator[Row]:
    """Rows with the choices of a group, unless these have no meaning there. The other kinds have their first choice,
    but for one."""
    first = {kind: values[0] for kind, values in choices.items()}
    for kind, values in choices.items():
        for value in values:
            yield settle({**first, kind: value, **group})


def _completed(group: Row, choices: Mapping[str, Sequence[Any]], settle: Callable[[Row], Row], strength: int) -> Row:
    return next(row for row in _around(group, choices, settle) if group.items() <= row.items())
