"""The extent of a test run: the tests of the gate, which judge a change in minutes, or all of them.

A test or a row of its parameters that only the nightly run takes carries the marker ``nightly``. `everything` tells a
test how many rows to draw. docs/gates.md says which tests are nightly, and why.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

__all__ = ["MARKER", "VARIABLE", "everything", "in_gate", "keep_the_gate", "on_ranks"]

#: Set to run all tests.
VARIABLE = "HYPER_PARALLEL_NIGHTLY"
#: The marker, as pytest wants it declared.
MARKER = "nightly: left out by `make test`, run by `make nightly`"


def everything() -> bool:
    """Return whether this run takes the nightly tests too."""
    return bool(os.environ.get(VARIABLE))


def keep_the_gate(config: Any, items: list[Any]) -> None:
    """Deselect the nightly tests among ``items``, unless `everything` runs or a test was asked for by name.

    Args:
        config: the ``pytest.Config`` of the run.
        items: the collected tests, changed in place.
    """
    if everything() or any("::" in argument for argument in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("nightly")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]


def on_ranks(*sizes: int, gate: tuple[int, ...] = (), name: str = "world_size") -> Any:
    """Decorate a test that runs once on each of ``sizes`` ranks, one of them in the gate.

    The gate takes three ranks where the test has them: three divide few sizes, so shards are uneven or empty, and
    first, middle and last rank differ. Else it takes the largest size. The other sizes are nightly.

    Args:
        sizes: numbers of ranks.
        gate: those that the gate takes instead.
        name: parameter of the test.

    Returns:
        The mark of pytest that parametrizes the test.
    """
    import pytest

    return pytest.mark.parametrize(name, in_gate(sizes, gate or ((3,) if 3 in sizes else (max(sizes),))))


def in_gate(values: Iterable[Any], gate: Collection[Any], *, unpack: bool = False) -> list[Any]:
    """Return ``values`` as rows of a parameter, of which the gate takes those in ``gate``; the others are nightly.

    Args:
        values: all rows.
        gate: those that the gate takes.
        unpack: whether each value is a tuple for several parameters.

    Raises:
        ValueError: if ``gate`` names a value that is not there.
    """
    import pytest

    values = list(values)
    if unknown := [value for value in gate if value not in values]:
        raise ValueError(f"the gate is to take {unknown}, which are none of {values}")
    return [
        pytest.param(*(value if unpack else (value,)), marks=[] if value in gate else [pytest.mark.nightly])
        for value in values
    ]
