"""Errors about many names look for near ones of those that they list, and for no others."""

from __future__ import annotations

import difflib
import random
from types import SimpleNamespace
from typing import Any

import pytest

from hyper_parallel.checkpoint.index import Index, StoredTensor
from hyper_parallel.checkpoint.near_names import near_name
from hyper_parallel.checkpoint.targets import Filling


def misfits(count: int) -> str:
    """The message where so many names are missing, and as many unexpected."""
    tensors = {f"model.layerz.{i}.weight": StoredTensor("float32", (), "", ()) for i in range(count)}
    filling = Filling(Index("", 0, {}, tensors, {}, {}), SimpleNamespace(), True, False, 0, 1)  # type: ignore[arg-type]
    for i in range(count):
        filling.lacks(f"model.layers.{i}.weight")
    filling._unexpected.extend(tensors)
    with pytest.raises(ValueError, match="the checkpoint does not fit the state") as error:
        filling._raise_problems()
    return str(error.value)


def test_as_many_names_are_compared_as_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many names are compared where there are twice as many, and not four times."""
    compared = 0

    def set_seq1(self: Any, name: str, original: Any = difflib.SequenceMatcher.set_seq1) -> None:
        nonlocal compared
        compared += 1
        original(self, name)

    monkeypatch.setattr(difflib.SequenceMatcher, "set_seq1", set_seq1)
    counts = []
    for count in (100, 200):
        compared = 0
        text = misfits(count)
        counts.append(compared)
        first, *lines = text.splitlines()
        assert lines[0] == "  missing: model.layers.0.weight (the checkpoint has 'model.layerz.0.weight')"
        assert lines[19] == "  missing: model.layers.19.weight (the checkpoint has 'model.layerz.19.weight')"
        assert lines[20] == f"  ... and {count - 20} more" == lines[41]
        assert lines[21] == "  unexpected: model.layerz.0.weight" and len(lines) == 42, first
    assert counts[1] <= 2.1 * counts[0]


def test_the_nearest_name_is_that_of_difflib() -> None:
    draw = random.Random(3)
    for _ in range(300):
        names = ["".join(draw.choice("ab.") for _ in range(draw.randint(0, 7))) for _ in range(draw.randint(0, 12))]
        name = "".join(draw.choice("ab.") for _ in range(draw.randint(1, 7)))
        wanted = difflib.get_close_matches(name, names, 1, 0.8)
        assert near_name(name, names) == (f" (the checkpoint has {wanted[0]!r})" if wanted else "")
