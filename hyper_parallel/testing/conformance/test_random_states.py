"""`RandomState` loaded from each mesh on each other one.

Tensor-parallel ranks draw the same numbers. One warning reports changed random numbers.
"""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

from hyper_parallel import ColwiseParallel, manual_seed, parallelize_module
from hyper_parallel.checkpoint import RandomState, load, save
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.extent import everything

#: Data-parallel ranks and tensor-parallel ranks, and which of them lies inside.
MESHES = [(2, 1, "tp"), (1, 2, "tp"), (2, 2, "dp")]
if everything():
    MESHES += [(1, 1, "tp"), (4, 1, "tp"), (2, 2, "tp"), (1, 4, "tp")]


def mesh_of(dp: int, tp: int, inside: str) -> Any:
    return (
        spmd.device_mesh(dp, tp, names=("dp", "tp")) if inside == "tp" else spmd.device_mesh(tp, dp, names=("tp", "dp"))
    )


def planned(mesh: Any) -> Any:
    return parallelize_module(get_adapter().linear_module(4, 4), mesh["tp"], ColwiseParallel())


def draw() -> tuple[float, ...]:
    adapter = get_adapter()
    return tuple(adapter.numpy(adapter.draw("rand", (3,))).tolist())


def saved_everywhere(directory: str) -> dict[Any, Any]:
    """Return the next random numbers of each rank that saves."""
    found = {}
    for number, (dp, tp, inside) in enumerate(MESHES):
        mesh = mesh_of(dp, tp, inside)
        for own in (True, False) if mesh is not None else ():
            model = planned(mesh)
            manual_seed(7 + own * mesh["dp"].get_local_rank(), mesh["tp"])
            draw()
            save({"model": model, "random": RandomState()}, f"{directory}/{number}{own}", mesh=mesh)
            found[number, own, mesh["dp"].get_local_rank()] = draw()
            del model  # or its plan would count for the next mesh
    return found


def loaded_everywhere(directory: str) -> dict[Any, Any]:
    """Return the random numbers of each rank after each load, and the warnings."""
    found = {}
    for (number, _), own, other in itertools.product(enumerate(MESHES), (True, False), range(len(MESHES))):
        mesh = mesh_of(*MESHES[other])
        if mesh is None:
            continue
        model = planned(mesh)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load({"model": model, "random": RandomState()}, f"{directory}/{number}{own}", mesh=mesh)
        del model
        told = [str(w.message) for w in caught if "random numbers will differ" in str(w.message)]
        assert len(told) <= (mesh.get_rank() == 0), told
        place = tuple(mesh[name].get_local_rank() for name in ("dp", "tp"))
        found[number, own, other, place] = (draw(), len(told))
    return found


def test_from_each_mesh_to_each(pool: Any, tmp_path: Path) -> None:
    wanted: dict[Any, Any] = {}
    for part in pool.run(4, saved_everywhere, str(tmp_path)):
        for key, drawn in part.items():
            assert wanted.setdefault(key, drawn) == drawn
    got: dict[Any, Any] = {}
    for part in pool.run(4, loaded_everywhere, str(tmp_path)):
        got |= part
    for (number, own, other), keys in itertools.groupby(sorted(got), key=lambda key: key[:3]):
        (before, tp_before, _), (after, tp, _) = MESHES[number], MESHES[other]
        drawn = {place: got[number, own, other, place] for *_, place in keys}
        what = f"{MESHES[number]} to {MESHES[other]}, {'own' if own else 'one'}: {drawn}"
        rows = [{drawn[i, j][0] for j in range(tp)} for i in range(after)]
        assert all(len(row) == 1 for row in rows), what
        numbers = [row.pop() for row in rows]
        went_on = [wanted[number, own, i] for i in range(before)]
        one = len(set(went_on)) == 1
        if one:
            assert set(numbers) == set(went_on), what
        else:
            assert numbers[:before] == went_on[:after] and len(set(numbers)) == after, what
        is_told = before == 1 < after and max(tp, tp_before) > 1 if one else before != after
        assert sum(told for _, told in drawn.values()) == is_told, what
