"""How much of the tests a run takes: those of the gate, which judge a change in minutes, or all of them.

A test or a row of its parameters that only the nightly run takes carries the marker ``nightly``. `everything` tells a
test how many rows to draw. docs/gates.md says which tests are nightly, and why.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["MARKER", "VARIABLE", "everything", "keep_the_gate"]

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
