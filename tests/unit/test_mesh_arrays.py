"""Arrays of ranks that are no meshes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel.core.mesh.arrays import check_ranks_of_mesh


@pytest.mark.parametrize(
    ("ranks", "names", "message"),
    [
        (3, None, "non-empty array of ranks, got 3"),
        ([], None, r"non-empty array of ranks, got \[\]"),
        ([0, 1, 0], None, r"a rank appears twice in the mesh \[0, 1, 0\]"),
        ([[0, 1], [2, 8]], None, "has ranks outside the world of 8"),
        ([-1, 0], None, "has ranks outside the world of 8"),
        ([[0, 1]], ("tp",), r"shape \(1, 2\) needs 2 mesh_dim_names"),
        ([[0, 1]], ("tp", "tp"), "mesh_dim_names must differ"),
    ],
)
def test_refused(ranks: Any, names: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_ranks_of_mesh(np.asarray(ranks, dtype=np.int64), names, 8)


@pytest.mark.parametrize(("ranks", "names"), [([0], None), ([7, 3], ("tp",)), ([[0, 1], [2, 3]], ("dp", "tp"))])
def test_accepted(ranks: Any, names: Any) -> None:
    check_ranks_of_mesh(np.asarray(ranks, dtype=np.int64), names, 8)
