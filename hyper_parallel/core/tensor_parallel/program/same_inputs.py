"""Check that ranks give a model the same inputs, where its plan takes plain inputs for replicated.

A sampler that counts all ranks gives tensor-parallel ranks other samples: without a comparison they train wrong
numbers, or end in a collective of unequal sizes. All values inside of a model follow from its inputs. So its first call
compares the inputs of the module that is called first, and the ids of each embedding: all ranks know which those are.
"""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import WeakKeyDictionary

from hyper_parallel.core.communication.rank_check import check_of
from hyper_parallel.core.dtensor.undistributed import model_of
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.observers import CHECKS
from hyper_parallel.core.tensor_parallel.program.planned_parameters import module_label, path_of
from hyper_parallel.core.tensor_parallel.program.uneven_shards import COMPARED
from hyper_parallel.core.weak_table import WeakTable

#: model -> by mesh, the path of the module that was called first.
_FIRST = WeakTable()


def compare_input(x: Any, mesh: DeviceMesh, what: str, taker: Any) -> None:
    """Raise RankMismatchError, on all ranks, where a plain input that is taken for replicated differs between ranks: in
    the first call of ``taker``, if it is the outermost module. Inside `check_ranks` each call compares already.

    Args:
        x: the input, no DTensor.
        mesh: 1-D mesh.
        what: names it in messages.
        taker: the module that takes it.
    """
    mesh.require_member(what)
    compared = taker.__dict__.get(COMPARED, ())
    if mesh.size() == 1 or what in compared or CHECKS or not mesh.platform.is_tensor(x):
        return
    if _is_outermost(taker, mesh):
        with mesh.platform.no_dispatch():
            _agree(x, mesh, what, taker)
    object.__setattr__(taker, COMPARED, (*compared, what))


def _is_outermost(taker: Any, mesh: DeviceMesh) -> bool:
    """Return whether ``taker`` is the first module of its model that is called, or an embedding, which is given ids."""
    model = model_of(taker)
    if model is None:
        return True
    first: WeakKeyDictionary[DeviceMesh, str] | None = _FIRST.get(model)
    if first is None:
        _FIRST.set(model, first := WeakKeyDictionary())
    path = path_of(taker)
    return first.setdefault(mesh, path) == path or mesh.platform.is_embedding_module(taker)


def _agree(x: Any, mesh: DeviceMesh, what: str, taker: Any) -> None:
    platform = mesh.platform
    facts = {f"the shape of {what}": f"{tuple(platform.shape_of(x))} of {x.dtype}"}
    if platform.has_values(x):
        facts[f"the values of {what}"] = f"digest {hashlib.sha256(platform.bytes_of(x)).hexdigest()[:12]}"
    check_of(mesh).agree(
        f"a call of {module_label(taker)}",
        row=mesh.ranks_along(0),
        row_facts=facts,
        remedy=f"it is plain and taken for Replicate(), the same on all {mesh.size()} ranks of {mesh}. Give these "
        "ranks the same samples: a sampler takes the number and the rank of the data-parallel mesh, never those of the "
        "world; or say with input_layouts=... how the input is sharded",
    )
