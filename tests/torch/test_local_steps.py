"""Steps of element-wise optimizers on local tensors: the tensors that they see, and the state after them."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import adam

from hyper_parallel import DTensor, Partial, Replicate, Shard
from hyper_parallel.platform.torch.handlers import optimizers
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device, full, randn, shard

MODES: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
SHAPES = [(5, 3), (4,), (3, 7)]


def pairs(mesh: Any, plain: int = 0) -> list[tuple[Any, Any]]:
    """Parameters and their distributed twins; of the last ``plain`` ones the twins are plain too."""
    placements = [Shard(0), Replicate(), Shard(1)]
    found = []
    for i, (shape, placement) in enumerate(zip(SHAPES, placements, strict=True)):
        p = nn.Parameter(randn(*shape, seed=i))
        is_plain = i >= len(SHAPES) - plain
        twin = nn.Parameter(p.detach().clone()) if is_plain else shard(p.detach(), mesh, placement).requires_grad_()
        found.append((p, twin))
    return found


def set_gradients(parameters: list[tuple[Any, Any]], mesh: Any, step: int, skip: int | None = None) -> None:
    """The same gradients on both sides, the first of the distributed ones as backward leaves it: not looked at."""
    for i, (p, twin) in enumerate(parameters):
        p.grad = twin.grad = None
        if i == skip:
            continue
        p.grad = randn(*p.shape, seed=10 * step + i)
        if i == 0:
            with torch.enable_grad():
                (twin * shard(p.grad, mesh, Shard(0))).sum().backward()
        else:
            twin.grad = shard(p.grad, mesh, *twin.placements) if isinstance(twin, DTensor) else p.grad.clone()


def assert_distributed(parameters: list[tuple[Any, Any]], optimizer: Any) -> None:
    for p, twin in parameters:
        if not isinstance(twin, DTensor):
            assert type(twin) is nn.Parameter and all(type(v) is torch.Tensor for v in optimizer.state[twin].values())
            continue
        assert isinstance(twin, DTensor) and twin.shape == p.shape
        assert twin.grad is None or (isinstance(twin.grad, DTensor) and twin.grad._layout is twin._layout)
        for name, value in optimizer.state.get(twin, {}).items():
            if value.dim():
                assert isinstance(value, DTensor) and value._layout is twin._layout, name


def step_both(mesh: Any, own: list, optimizers: tuple, what: str, number: int, skip: int | None = None) -> None:
    """A step of plain and of distributed parameters."""
    set_gradients(own, mesh, number, skip)
    for optimizer in optimizers:
        optimizer.step()
    for i, (p, twin) in enumerate(own):
        close(twin, p, f"{what}, step {number}, parameter {i}", 1e-6)
    assert_distributed(own, optimizers[1])


@on_mesh()
def changing_circumstances(mesh: Any) -> None:
    """Missing gradients, schedules, state that is loaded, replaced or moved, another group: steps stay those of plain
    parameters."""
    for mode in MODES:
        for plain in (0, 1):
            own = pairs(mesh, plain)
            one, two = (torch.optim.AdamW([pair[i] for pair in own], lr=0.1, **mode) for i in (0, 1))

            step = functools.partial(step_both, mesh, own, (one, two), f"{mode}, {plain} plain")
            step(0, skip=1)
            for number in range(1, 4):
                step(number)
            step(4, skip=2)
            for optimizer in (one, two):
                optimizer.param_groups[0]["lr"] = 0.03
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            step(5)
            # State of this rank only becomes distributed again.
            for state in two.state.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    if isinstance(state[name], DTensor):
                        state[name] = state[name].to_local().clone()
            two.state = copy.copy(two.state)
            step(6)
            for optimizer in (one, two):
                for state in optimizer.state.values():
                    state["exp_avg"] = state["exp_avg"].clone()
                    state["exp_avg_sq"].data = state["exp_avg_sq"].double().float() * 2
            step(7)
            step(8)
            more = pairs(mesh)
            for i, optimizer in enumerate((one, two)):
                optimizer.add_param_group({"params": [pair[i] for pair in more], "amsgrad": True})
            own += more
            step(9)


@on_mesh()
def groups(mesh: Any) -> None:
    """Several groups, and the order of parameters in the state another one than in the groups."""
    for mode in MODES:
        own = pairs(mesh)
        sides = [[pair[i] for pair in own] for i in (0, 1)]
        both = [
            torch.optim.AdamW([{"params": side[:2]}, {"params": side[2:], "amsgrad": True, "lr": 0.01}], lr=0.1, **mode)
            for side in sides
        ]
        for number in range(4):
            set_gradients(own, mesh, number, skip=0 if number == 0 else None)
            for optimizer in both:
                optimizer.step()
            for p, twin in own:
                close(twin, p, f"{mode}, step {number}", 1e-6)
            assert_distributed(own, both[1])


@on_mesh()
def errors_in_steps(mesh: Any) -> None:
    """Tensors that were plain during a step are distributed again after an error in it."""
    own = pairs(mesh)
    optimizer = torch.optim.AdamW([twin for _, twin in own], fused=True)
    original = adam.adam
    for number in range(3):
        set_gradients(own, mesh, number)
        expected = [full(twin).clone() for _, twin in own]
        seen: list[Any] = []

        def fail(params: Any, grads: Any, *lists: Any, seen: list[Any] = seen, **options: Any) -> None:
            seen.extend(type(x) for column in (params, grads, *lists) for x in column)
            raise KeyError("kernel")

        adam.adam = fail
        try:
            with pytest.raises(KeyError, match="kernel"):
                optimizer.step()
        finally:
            adam.adam = original
        assert set(seen) == {torch.Tensor} and len(seen) == 5 * len(own)
        assert_distributed(own, optimizer)
        for (_, twin), value in zip(own, expected, strict=True):
            close(twin, value)
        optimizer.step()


@on_mesh()
def gradients_of_another_layout(mesh: Any) -> None:
    """The data came with another layout after backward: a step brings the gradient to it, whatever the optimizer."""
    for mode in MODES:
        p, twin = nn.Parameter(randn(5, 3)), shard(randn(5, 3), mesh, Shard(0)).requires_grad_()
        plain = nn.Parameter(randn(2))
        one, two = (torch.optim.AdamW([x, plain] if x is twin else [x], lr=0.1, **mode) for x in (p, twin))
        p.grad = randn(5, 3, seed=1)
        twin.grad = shard(p.grad, mesh, Shard(0))
        twin.data = shard(randn(5, 3), mesh, Replicate())
        one.step()
        two.step()
        assert twin.placements == (Replicate(),) and twin.grad.placements == (Shard(0),)
        close(twin, p, str(mode), 1e-6)


class Own(torch.optim.AdamW):
    """An optimizer of the user that collects parameters in its own way, and keeps more."""

    def _init_group(self, group: Any, params: Any, grads: Any, *lists: Any) -> Any:
        result = super()._init_group(group, params, grads, *lists)
        for p in params:
            self.state[p].setdefault("first", torch.zeros_like(p)).add_(1)
        return result


class Alone(torch.optim.SGD):
    """An optimizer that does not ask torch's class for its lists."""

    def _init_group(self, group: Any, params: Any, grads: Any, momentum_buffer_list: Any) -> Any:
        params += group["params"]
        grads += [p.grad for p in params]
        return False


@on_mesh()
def optimizers_of_the_user(mesh: Any) -> None:
    for mode in MODES:
        own = pairs(mesh)
        one, two = (Own([pair[i] for pair in own], lr=0.1, **mode) for i in (0, 1))
        for number in range(3):
            set_gradients(own, mesh, number)
            one.step()
            two.step()
            for p, twin in own:
                close(twin, p, str(mode), 1e-6)
                close(two.state[twin]["first"], one.state[p]["first"])
            assert_distributed(own, two)
    # Where the lists are not those of torch's class, layouts are looked at before.
    p, twin = nn.Parameter(randn(5, 3)), shard(randn(5, 3), mesh, Shard(0)).requires_grad_()
    p.grad = randn(5, 3, seed=1)
    twin.grad = shard(p.grad, mesh, Shard(0))
    for layout in (Shard(0), Replicate()):
        twin.data = shard(p.detach(), mesh, layout)
        for x in (p, twin):
            Alone([x], lr=0.1, foreach=False).step()
        close(twin, p, str(layout), 1e-6)


def steps_with_known_state(mesh: Any, kind: type) -> int:
    """The number of groups whose state was completely known in the third step."""
    own = pairs(mesh)
    optimizer = kind([twin for _, twin in own], foreach=True)
    for number in range(3):
        set_gradients(own, mesh, number)
        optimizer.step()
    found: int = optimizer.__dict__[optimizers._ATTRIBUTE].found
    return found


@on_mesh()
def torch_compile_keeps_out(mesh: Any) -> None:
    """Once something was compiled, torch.compile keeps out of methods of torch's optimizers with a wrapper. It changes
    nothing; one of the user around the same method may do more."""
    init_group: Any = torch.optim.AdamW._init_group

    @functools.wraps(init_group)
    def of_the_user(self: Any, *given: Any) -> Any:
        return init_group(self, *given)

    for found, count in ((init_group, 1), (torch.compiler.disable(init_group), 1), (of_the_user, 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.AdamW, "_init_group", found)
            assert steps_with_known_state(mesh, torch.optim.AdamW) == count, found


@on_mesh()
def state_is_let_go(mesh: Any) -> None:
    """Replaced or moved state does not live on in the caches between steps; versions count writes."""
    own = pairs(mesh)
    optimizer = torch.optim.AdamW([twin for _, twin in own], foreach=True)
    for number in range(3):
        set_gradients(own, mesh, number)
        optimizer.step()
    state = optimizer.state[own[0][1]]
    version = state["exp_avg"]._version
    before = full(state["exp_avg"]).clone()
    set_gradients(own, mesh, 3)
    optimizer.step()
    # Kernels of simulated devices do not count their writes.
    assert state["exp_avg"]._version > version or device().type != "cpu"
    assert not torch.equal(full(state["exp_avg"]), before)
    copied = copy.deepcopy(state["exp_avg"])
    copied.zero_()
    assert full(state["exp_avg"]).any()
    gone = weakref.ref(state["exp_avg"])
    state["exp_avg"] = state["exp_avg"].to(torch.float64)
    gc.collect()
    assert gone() is None
    loaded = weakref.ref(state["exp_avg_sq"])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    del state
    gc.collect()
    assert loaded() is None


@on_mesh()
def gradients_are_cleared(mesh: Any) -> None:
    for mode in MODES:
        for plain in (0, 1):
            own = pairs(mesh, plain)
            optimizer = torch.optim.AdamW([twin for _, twin in own], **mode)
            set_gradients(own, mesh, 0, skip=1)
            held = own[0][1].grad
            optimizer.zero_grad(set_to_none=False)
            assert own[1][1].grad is None and own[0][1].grad is held and isinstance(held, DTensor)
            for _, twin in (own[0], own[2]):
                close(twin.grad, torch.zeros(twin.shape))
            optimizer.zero_grad()
            assert all(twin.grad is None for _, twin in own)


@on_mesh()
def parameters_that_are_partial_sums(mesh: Any) -> None:
    """Partial parameters step operation by operation, together with others too."""
    partial = DTensor.from_local(randn(5, 3), mesh, [Partial()]).detach().requires_grad_()
    other = shard(randn(4), mesh, Shard(0)).requires_grad_()
    value, gradient = mesh.size() * randn(5, 3), randn(5, 3, seed=1)
    partial.grad, other.grad = shard(gradient, mesh, Replicate()), shard(randn(4, seed=2), mesh, Shard(0))
    torch.optim.SGD([partial, other], lr=0.5).step()
    close(partial, value - 0.5 * gradient)
    close(other, randn(4) - 0.5 * randn(4, seed=2))


def test_state_of_the_users_own_shape() -> None:
    """Entries that are no dictionaries are none of ours."""
    assert optimizers._count({"global": 3}) == -1
    assert optimizers._count({"a": {"x": 1}, "b": {}}) == 1


JOBS = [
    changing_circumstances,
    groups,
    errors_in_steps,
    gradients_of_another_layout,
    optimizers_of_the_user,
    torch_compile_keeps_out,
    state_is_let_go,
    gradients_are_cleared,
    parameters_that_are_partial_sums,
]


def run_all() -> None:
    for job in JOBS:
        job()


@on_ranks(1, 3)
def test_steps(pool: Any, world_size: int) -> None:
    pool.run(world_size, run_all)
