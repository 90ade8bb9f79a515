""".grad, .data, hooks, backward and autograd.grad of distributed tensors."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel import DTensor, Partial, Replicate, Shard, get_platform
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, full, randn, shard


def leaf(mesh: Any, placement: Any, *shape: int, seed: int = 0) -> Any:
    return shard(randn(*shape, seed=seed), mesh, placement).requires_grad_()


@on_mesh()
def grad_attribute(mesh: Any) -> None:
    x, whole = leaf(mesh, Shard(0), 5, 3), randn(5, 3).requires_grad_()
    for _ in range(2):  # accumulates
        (x * x).sum().backward()
        (whole * whole).sum().backward()
    assert type(x.grad) is type(x) and x.grad.placements == (Shard(0),) and x.grad.shape == (5, 3)
    assert x.grad is x.grad
    close(x.grad, whole.grad)
    x.grad = torch.ones_like(x)
    close(x.grad, torch.ones(5, 3))
    x.grad = shard(randn(5, 3, seed=1), mesh, Replicate())  # brought to the layout of x
    assert x.grad.placements == (Shard(0),)
    close(x.grad, randn(5, 3, seed=1))
    del x.grad
    assert x.grad is None
    for wrong, kind, message in (
        (randn(5, 3), TypeError, "distribute_tensor"),
        (3, TypeError, "tensor or None"),
        (shard(randn(4, 3), mesh, Shard(0)), ValueError, r"\(4, 3\)"),
    ):
        with pytest.raises(kind, match=message):
            x.grad = wrong


@on_mesh()
def gradient_of_a_partial_sum_is_replicated(mesh: Any) -> None:
    x = DTensor.from_local(randn(3), mesh, [Partial()]).detach().requires_grad_()
    x.sum().backward()
    assert x.grad.placements == (Replicate(),)
    close(x.grad, torch.ones(3))


@on_mesh()
def backward_with_a_gradient(mesh: Any) -> None:
    x, g = leaf(mesh, Shard(0), 5, 3), randn(5, 3, seed=2)
    (2 * x).backward(shard(g, mesh, Replicate()))
    close(x.grad, 2 * g)
    y = 2 * x
    with pytest.raises(TypeError, match="distributed too"):
        y.backward(g)
    with pytest.raises(RuntimeError, match=r"scalar outputs, not for a tensor of shape \(5, 3\)"):
        y.backward()
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        y.backward(shard(randn(2), mesh, Replicate()))
    x.grad = None
    torch.autograd.backward([x.sum(), (x * 3).sum()])
    close(x.grad, torch.full((5, 3), 4.0))
    z = leaf(mesh, Shard(0), 5, 3)
    (x * z).sum().backward(inputs=[z])
    close(z.grad, full(x))
    close(x.grad, torch.full((5, 3), 4.0))
    with pytest.raises(RuntimeError, match="cannot be empty"):
        x.sum().backward(inputs=[])


@on_mesh()
def one_element_shards_do_not_pass_for_scalars(mesh: Any) -> None:
    x = leaf(mesh, Shard(0), mesh.size())
    if mesh.size() > 1:
        with pytest.raises(RuntimeError, match="scalar outputs"):
            (x * 1).backward()


@on_mesh()
def autograd_grad(mesh: Any) -> None:
    x, w = leaf(mesh, Shard(0), 5, 3), leaf(mesh, Replicate(), 3, seed=1)
    gx, gw = torch.autograd.grad((x * w).pow(2).sum(), [x, w])
    assert gx.placements == (Shard(0),) and gw.placements == (Replicate(),)
    close(gx, 2 * full(x) * full(w) ** 2)
    close(gw, (2 * full(x) ** 2 * full(w)).sum(0))
    assert x.grad is None
    unused = leaf(mesh, Shard(0), 2, seed=3)
    assert torch.autograd.grad(x.sum(), [unused], allow_unused=True) == (None,)
    (zero,) = torch.autograd.grad(x.sum(), [unused], materialize_grads=True)
    close(zero, torch.zeros(2))


@on_mesh()
def gradients_of_gradients(mesh: Any) -> None:
    w = leaf(mesh, Replicate(), 4, seed=1)
    x = shard(randn(6, 4), mesh, Shard(0))
    (g,) = torch.autograd.grad((x * w).pow(3).sum(), w, create_graph=True)
    assert g.requires_grad
    (gg,) = torch.autograd.grad(g.pow(2).sum(), w)
    plain = full(w).requires_grad_()
    (pg,) = torch.autograd.grad((randn(6, 4) * plain).pow(3).sum(), plain, create_graph=True)
    close(gg, torch.autograd.grad(pg.pow(2).sum(), plain)[0], tolerance=1e-4)


@on_mesh()
def hooks(mesh: Any) -> None:
    x, seen = leaf(mesh, Shard(0), 5, 3), []

    def double(g: Any) -> Any:
        seen.append((type(g) is type(x), g.placements, tuple(g.shape)))
        return g * 2

    y = x * 1.0
    handles = [x.register_hook(double), y.register_hook(double)]
    y.register_hook(lambda g: None)
    x.register_post_accumulate_grad_hook(lambda p: seen.append(p is x and p.grad.placements))
    y.sum().backward()
    close(x.grad, torch.full((5, 3), 4.0))
    assert seen == [(True, (Shard(0),), (5, 3))] * 2 + [(Shard(0),)]
    for handle in handles:
        handle.remove()
    x.grad = None
    y = x * 1.0
    y.retain_grad()
    y.sum().backward()
    close(y.grad, torch.ones(5, 3))
    x.register_hook(lambda g: full(g))
    with pytest.raises(TypeError, match="hook"):
        x.sum().backward()


@on_mesh()
def data_attribute(mesh: Any) -> None:
    x = leaf(mesh, Shard(0), 5, 3)
    alias = x.data
    assert not alias.requires_grad and alias.placements == (Shard(0),)
    alias.zero_()
    close(x, torch.zeros(5, 3))
    x.data = shard(randn(5, 3), mesh, Replicate())
    assert x.placements == (Replicate(),) and x.is_leaf and x.requires_grad
    close(x, randn(5, 3))
    with pytest.raises(TypeError, match="distribute_tensor"):
        x.data = randn(5, 3)


@on_mesh()
def functions_of_the_user(mesh: Any) -> None:
    """`autograd.Function` sees DTensors in forward and backward."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            (x,) = ctx.saved_tensors
            return 2 * g * x

    for inner in (Shard(0), Replicate(), Shard(1)):
        x = leaf(mesh, Shard(0), 5, 3)
        y = Square.apply((x * 1.0).redistribute(placements=[inner]))
        assert y.placements == (inner,)
        y.sum().backward()
        close(x.grad, 2 * full(x))
        assert x.grad.placements == (Shard(0),)

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any, scale: float) -> Any:
            ctx.save_for_backward(x, w)
            ctx.scale = scale
            return x @ w.T * scale

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            x, w = ctx.saved_tensors
            return g @ w * ctx.scale, g.T @ x * ctx.scale, None

    for placements in ((Replicate(), Shard(0)), (Shard(0), Replicate()), (Shard(1), Shard(1))):
        x, w = leaf(mesh, placements[0], 5, 3), leaf(mesh, placements[1], 4, 3, seed=1)
        Linear.apply(x, w, 2.0).sum().backward()
        close(x.grad, 2 * full(w).sum(0).expand(5, 3))
        close(w.grad, 2 * full(x).sum(0).expand(4, 3))
    plain = randn(5, 3).requires_grad_()
    Square.apply(plain).sum().backward()
    assert type(plain.grad) is torch.Tensor
    from_plain = randn(5, 3).requires_grad_()
    Square.apply(DTensor.from_local(from_plain, mesh, [Replicate()])).sum().backward()
    assert type(from_plain.grad) is torch.Tensor
    close(from_plain.grad, plain.grad)


@on_mesh()
def module_hooks(mesh: Any) -> None:
    model, seen = nn.Sequential(nn.Tanh(), nn.ReLU()), []
    for module in model:
        module.register_full_backward_hook(lambda m, gi, go: seen.append((type(gi[0]), type(go[0]))))
    x = leaf(mesh, Shard(0), 5, 3)
    model(x).sum().backward()
    plain = randn(5, 3).requires_grad_()
    nn.Sequential(nn.Tanh(), nn.ReLU())(plain).sum().backward()
    close(x.grad, plain.grad)
    assert len(seen) == 2


@on_mesh()
def writes_into_a_leaf(mesh: Any) -> None:
    """Writes into a plain leaf and into a DTensor are refused with a remedy, which then is right."""
    plain = randn(2, 3).requires_grad_()
    d, own = DTensor.from_local(plain, mesh, [Shard(0)]), leaf(mesh, Shard(0), 5, 3)
    writes: list[Any] = [
        lambda x: x.mul_(2),
        torch.relu_,
        lambda x: x.__iadd__(x),
        lambda x: x.__setitem__(slice(None), 0.0),
        lambda x: x.zero_(),
    ]
    for x in (d, own):
        for write in writes:
            before = full(x).clone()
            with pytest.raises(RuntimeError, match=r"leaf Variable.*torch\.no_grad\(\).*from_local\(x\.clone\(\)"):
                write(x)
            close(x, before)
    copied = DTensor.from_local(plain.clone(), mesh, [Shard(0)])
    copied.mul_(2).sum().backward()
    close(plain.grad, torch.full((2, 3), 2.0))
    with torch.no_grad():
        d.mul_(2)
    close(plain, 2 * randn(2, 3))


@on_ranks(1, 3)
@pytest.mark.parametrize(
    "job",
    [
        grad_attribute,
        writes_into_a_leaf,
        gradient_of_a_partial_sum_is_replicated,
        backward_with_a_gradient,
        one_element_shards_do_not_pass_for_scalars,
        autograd_grad,
        gradients_of_gradients,
        hooks,
        data_attribute,
        functions_of_the_user,
        module_hooks,
    ],
    ids=lambda job: job.__name__,
)
def test_gradients(pool: Any, job: Any, world_size: int) -> None:
    pool.run(world_size, job)


# ------------------------------------------------------------------------------------------------ verbs of the platform


def test_a_view_from_an_autograd_function_can_be_changed_in_place() -> None:
    apply = get_platform().autograd_function(lambda ctx, x: x[1:], lambda ctx, g: torch.cat([g.new_zeros(1), g]))
    x = randn(4).requires_grad_()
    y = apply(x * 1.0)
    y.mul_(2.0)
    y.sum().backward()
    close(x.grad, torch.tensor([0.0, 2, 2, 2]))


def test_backward_of_an_autograd_function_is_recorded() -> None:
    def forward(ctx: Any, x: Any, factor: float) -> Any:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x * x

    def backward(ctx: Any, g: Any) -> Any:
        return 2 * ctx.factor * ctx.saved_tensors[0] * g

    x = randn(3).requires_grad_()
    (g,) = torch.autograd.grad(get_platform().autograd_function(forward, backward)(x, 3.0).sum(), x, create_graph=True)
    close(torch.autograd.grad(g.sum(), x)[0], torch.full((3,), 6.0))


def test_cache_is_valid_until_the_holder_changes() -> None:
    platform = get_platform()
    x = randn(3).requires_grad_()
    holder = x * 2
    value = holder.exp()
    assert platform.read_cache(holder, "k") is None
    platform.write_cache(holder, "k", value)
    assert platform.read_cache(holder, "k") is value
    assert platform.read_cache(holder, "other") is None
    with torch.no_grad():
        assert platform.read_cache(holder, "k") is None
    holder.add_(1)
    assert platform.read_cache(holder, "k") is None
    platform.write_cache(holder, "k", value)
    platform.clear_cache(holder)
    assert platform.read_cache(holder, "k") is None


def test_cache_holds_nothing_without_gradients() -> None:
    platform, holder = get_platform(), randn(3)
    with torch.no_grad():
        platform.write_cache(holder, "k", holder * 2)
    assert platform.read_cache(holder, "k") is None
    with torch.inference_mode():
        frozen = randn(3)
    platform.write_cache(frozen, "k", holder)
    assert platform.read_cache(frozen, "k") is None


@pytest.mark.parametrize("kind", ["leaf", "computed", "view of itself", "view of computed"])
def test_cache_keeps_nothing_alive(kind: str) -> None:
    """A reference cycle through C++ would not even be found by the garbage collector."""
    platform = get_platform()
    x = randn(3).requires_grad_()
    holder = x if kind in ("leaf", "view of itself") else x * 2
    value = holder.view_as(holder) if kind.startswith("view") else holder.sigmoid()
    platform.write_cache(holder, "k", value)
    assert platform.read_cache(holder, "k") is value
    dead = [weakref.ref(holder), weakref.ref(value)]
    del holder, value, x
    gc.collect()
    assert [ref() for ref in dead] == [None, None]


STEPS = 20


@on_mesh()
def training_leaks_nothing(mesh: Any) -> int:
    w = leaf(mesh, Shard(0), 4, 3)
    b = leaf(mesh, Replicate(), 4, seed=1)

    def step() -> None:
        x = DTensor.from_local(randn(2, 3), mesh, [Replicate()])
        y = nn.functional.linear(x * 1.5, w) + b
        nn.functional.linear(y.redistribute(placements=[Replicate()]), w.T).pow(2).sum().backward()
        w.grad = b.grad = None

    def count() -> int:
        while gc.collect():
            continue
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())

    step()
    gc.freeze()  # objects that earlier tests left behind are not looked at: there may be millions
    try:
        before = count()
        for _ in range(STEPS):
            step()
        return count() - before
    finally:
        gc.unfreeze()


@on_ranks(1, 2)
def test_training_leaks_nothing(pool: Any, world_size: int) -> None:
    # A leak shows as more tensors after every step; objects that earlier tests left to threads of the engine come and
    # go.
    assert max(pool.run(world_size, training_leaks_nothing)) < STEPS // 2


def test_copies_start_with_an_empty_cache(tmp_path: Any) -> None:
    import copy

    platform, x = get_platform(), randn(3).requires_grad_()
    value = x.view_as(x)
    platform.write_cache(x, "k", value)
    assert platform.read_cache(copy.deepcopy(x), "k") is None
    torch.save(x, tmp_path / "x.pt")
    assert platform.read_cache(torch.load(tmp_path / "x.pt", weights_only=True), "k") is None
