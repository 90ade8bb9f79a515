"""Selects the meshes that go on with the states of their generators that a checkpoint had."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.rules import random


class Mesh:
    """The part of a mesh that is used."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = np.array(ranks)


@pytest.mark.parametrize(("members", "kept"), [(None, [0, 1, 2]), ((0, 1), [0]), ((3, 2, 1, 0), [0, 1, 2]), ((4,), [])])
def test_only_meshes_all_of_whose_ranks_load(
    monkeypatch: pytest.MonkeyPatch, members: tuple[int, ...] | None, kept: list[int]
) -> None:
    """Another rank would wait for a state that is never sent."""
    meshes = [Mesh(0, 1), Mesh(2, 3), Mesh(0, 1, 2, 3)]
    monkeypatch.setattr(random, "MESHES", dict(enumerate(meshes)))
    monkeypatch.setattr(random, "_SYNCHRONIZED", set())
    random.keep_states(members)
    assert {meshes[i] for i in kept} == random._SYNCHRONIZED
