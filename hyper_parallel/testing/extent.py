"""Selection of tests: the gate, whose tests check a change in minutes, or all tests.

The marker ``nightly`` is on tests, or on single parameter sets of tests, that only the nightly run executes. Tests ask
`everything` to decide how many cases to draw. docs/gates.md lists the nightly tests, with reasons.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

__all__ = ["MARKER", "VARIABLE", "everything", "in_gate", "keep_the_gate", "on_ranks"]

#: Environment variable that makes a run execute all tests.
VARIABLE = "HYPER_PARALLEL_NIGHTLY"
#: Declaration of the marker for pytest.
MARKER = "nightly: left out by `make test`, run by `make nightly`"


def everything() -> bool:
    """Return whether this run includes the nightly tests."""
    return bool(os.environ.get(VARIABLE))


def keep_the_gate(config: Any, items: list[Any]) -> None:
    """Deselect the nightly tests among ``items``, unless all tests run or a test was requested by name.

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
    """Decorate a test that runs once for each number of ranks in ``sizes``.

    The gate runs one of these sizes: three ranks if ``sizes`` has 3. Three divides few sizes, so shards are uneven or
    empty, and first, middle and last rank differ. Otherwise the gate runs the largest size. The other sizes are
    nightly.

    Args:
        sizes: numbers of ranks.
        gate: numbers that the gate runs instead.
        name: parameter of the test.

    Returns:
        A mark of pytest that parametrizes the test.
    """
    import pytest

    return pytest.mark.parametrize(name, in_gate(sizes, gate or ((3,) if 3 in sizes else (max(sizes),))))


def in_gate(values: Iterable[Any], gate: Collection[Any], *, unpack: bool = False) -> list[Any]:
    """Return ``values`` as parameter sets of pytest. The values in ``gate`` run in the gate. All other values are
    nightly.

    Args:
        values: all rows.
        gate: rows that run in the gate.
        unpack: whether each value is a tuple for several parameters.

    Raises:
        ValueError: if ``gate`` has a value that is not in ``values``.
    """
    import pytest

    values = list(values)
    if unknown := [value for value in gate if value not in values]:
        raise ValueError(f"the gate is to take {unknown}, which are none of {values}")
    return [
        pytest.param(*(value if unpack else (value,)), marks=[] if value in gate else [pytest.mark.nightly])
        for value in values
    ]
