"""Clipping of gradients, and the search for infinities in them: with DTensors, and with the plain local gradients that
MindSpore's own functions give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import CommDebugMode, DTensor, check_ranks, manual_seed
from hyper_parallel.mindspore import grad
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.nets import loss_of, make_net, whole

CLIPS: dict[str, Callable[[Any], Any]] = {
    "global norm": lambda gs: ops.clip_by_global_norm(gs, 0.1),
    "norm of all": lambda gs: ops.clip_by_norm(gs, 0.1),
    "norm 1 of all": lambda gs: ops.clip_by_norm(list(gs), 0.1, 1.0),
    "largest of all": lambda gs: ops.clip_by_norm(gs, 0.02, float("inf")),
    "each norm": lambda gs: [ops.clip_by_norm(g, 0.01) for g in gs],
    "each by a cell": lambda gs: [nn.ClipByNorm()(g, Tensor(0.01)) for g in gs],
    "value": lambda gs: ops.clip_by_value(gs, Tensor(-0.001), Tensor(0.001)),
}


NORMS_OF_ALL = ("norm of all", "norm 1 of all", "largest of all")


def own_gradients(net: Any, how: str) -> Any:
    """The gradients by MindSpore's own functions."""
    weights = net.trainable_params()
    loss = loss_of(net)
    if how == "value_and_grad":
        return ms.value_and_grad(loss, None, weights)()[1]
    if how == "grad":
        return ms.grad(loss, None, weights)()
    return ops.GradOperation(get_by_list=True)(loss, ms.ParameterTuple(weights))()


@on_mesh()
def clipped(mesh: Any, how: str) -> list[str]:
    problems = []
    manual_seed(0, mesh)  # earlier jobs may have drawn on some of the ranks, which `check_ranks` would notice
    plain, net = make_net(), make_net(mesh)
    parameters = net.trainable_params()
    gradients = own_gradients(plain, how)
    for name, clip in CLIPS.items():
        wanted = [g.asnumpy() for g in clip(gradients)]
        distributed = grad(loss_of(net), None, parameters)()
        if name != "value":
            got = [whole(g) for g in clip(distributed)]
            if not all(np.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(got, wanted, strict=True)):
                problems.append(f"{name} of DTensors")
        local = own_gradients(net, how)
        with check_ranks(mesh):
            found = clip(local)
        for p, g, w in zip(parameters, found, wanted, strict=True):
            if isinstance(g, DTensor):
                problems.append(f"{name}: {p.name} becomes a DTensor")
            mine = w[p._layout.local_index()] if isinstance(p, DTensor) else w
            if g.shape != mine.shape or not np.allclose(g.asnumpy(), mine, rtol=1e-4, atol=1e-7):
                problems.append(f"{name}: {p.name}: {g}, wanted {mine}")
        if name in ("global norm", *NORMS_OF_ALL):
            with CommDebugMode() as comm:
                again = clip(found)
            if comm.get_comm_counts() != {"all_reduce": 1} and mesh.size() > 1:
                problems.append(f"again: {comm.get_comm_counts()}")
            if not all(np.allclose(a.asnumpy(), b.asnumpy(), rtol=1e-4) for a, b in zip(again, found, strict=True)):
                problems.append("again")
    return problems


@pytest.mark.parametrize(
    ("world", "how"),
    [
        (1, "grad"),
        pytest.param(2, "value_and_grad", marks=pytest.mark.nightly),
        (2, "GradOperation"),
        (3, "value_and_grad"),
    ],
)
def test_local_gradients(pool: Any, world: int, how: str) -> None:
    """Local gradients are recognised: each rank's norm is that of the gradients of all ranks."""
    assert pool.run(world, clipped, how) == [[]] * world


@on_mesh()
def refused(mesh: Any) -> list[str]:
    """A gradient that was computed from a local gradient is refused: its placement is unknown."""
    net = make_net(mesh)
    messages = []
    local = tuple(g * 0.5 for g in own_gradients(net, "grad"))
    for clip in (CLIPS["global norm"], CLIPS["norm of all"], CLIPS["each norm"], CLIPS["each by a cell"]):
        with pytest.raises(ValueError, match="clip by the norm of its shard") as caught:
            clip(local)
        messages.append(str(caught.value))
    # The next backward is another network's, and then the library's.
    plain = make_net()
    ops.clip_by_global_norm(tuple(g * 0.5 for g in own_gradients(plain, "grad")), 0.1)
    own_gradients(net, "grad")
    grad(loss_of(net), None, net.trainable_params())()
    ops.clip_by_global_norm(local, 0.1)
    return messages


def test_what_was_computed_from_local_gradients(pool: Any) -> None:
    first, *others = pool.run(3, refused)
    assert all("hyper_parallel.mindspore" in message for message in first)
    assert all(len(other) == len(first) for other in others)


@on_mesh()
def plain_networks(mesh: Any) -> bool:
    """MindSpore itself clips tensors that are not distributed."""
    own_gradients(make_net(mesh), "grad")
    g = Tensor(np.full((3, 1, 5, 2), 2.0, np.float32))
    with CommDebugMode() as comm:
        y = ops.clip_by_norm(g, 1.0)
    return comm.get_total_counts() == 0 and bool(np.isclose(np.linalg.norm(y.asnumpy()), 1.0, atol=1e-3))


def test_plain_tensors_of_another_shape(pool: Any) -> None:
    assert pool.run(2, plain_networks) == [True] * 2


@on_mesh()
def infinities(mesh: Any) -> list[bool]:
    net = make_net(mesh)
    found = []
    for derived in (False, True):
        gradients = list(own_gradients(net, "grad"))
        if derived:
            gradients = [g * 1.0 for g in gradients]
        found.append(bool(ms.amp.all_finite(tuple(gradients))))
        place = next(i for i, p in enumerate(net.trainable_params()) if isinstance(p, DTensor) and p.ndim == 2)
        if mesh.get_local_rank(0) == mesh.size() - 1:
            values = gradients[place].asnumpy().copy()
            values.reshape(-1)[-1] = np.inf
            gradients[place] = Tensor(values)
        elif not derived:
            gradients[place] = gradients[place] * 1.0  # so that all ranks know as much of it
        found.append(bool(ms.amp.all_finite(tuple(gradients))))
    return found


def test_all_ranks_see_an_infinity(pool: Any) -> None:
    assert pool.run(2, infinities) == [[True, False] * 2] * 2
