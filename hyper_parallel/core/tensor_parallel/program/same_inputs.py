"""Check that all ranks pass the same plain inputs to a model whose plan declares the inputs replicated.

A sampler with the world's number of ranks gives different samples to tensor-parallel ranks. Without a comparison, these
ranks would train on wrong numbers, or fail in collectives of different sizes. The first call of a model compares the
inputs of the first called module, and the ids of each embedding. All other values of the model follow from these
inputs.
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

#: model -> mesh -> path of the module that was called first.
_FIRST = WeakTable()


def compare_input(x: Any, mesh: DeviceMesh, what: str, taker: Any) -> None:
    """Raise RankMismatchError, on all ranks, if a plain replicated input differs between ranks.

    Ranks compare in the first call of ``taker``, if it is the outermost module or an embedding. Inside `check_ranks`
    other checks compare every call.

    Args:
        x: plain input.
        mesh: 1-D mesh.
        what: name of the input in messages.
        taker: the module that is called with ``x``.
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
    """Return whether ``taker`` is the first called module of its model, or an embedding."""
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
        remedy=f"the input is plain and assumed to be Replicate(), the same on all {mesh.size()} ranks of {mesh}. "
        "Pass the same samples on these ranks: the sampler needs the size and rank of the data-parallel mesh, "
        "never those of the world. If the input is sharded, declare its placement with input_layouts=...",
    )
