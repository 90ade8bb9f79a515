"""Less common ways through autograd: plain and distributed tensors in one graph, hooks on outputs of the user's
functions, batched gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel import ColwiseParallel, DTensor, Partial, Replicate, Shard, get_platform, parallelize_module
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, full, randn, shard


@on_mesh()
def plain_and_distributed_tensors_in_one_graph(mesh: Any) -> None:
    plain = randn(5, 3).requires_grad_()
    x = DTensor.from_local(plain, mesh, [Replicate()])
    (by_plain,) = torch.autograd.grad((x * x).sum(), plain)
    assert type(by_plain) is torch.Tensor
    close(by_plain, 2 * randn(5, 3))

    y = shard(randn(5, 3), mesh, Shard(0)).requires_grad_()
    root = (y * y).full_tensor().sum()
    (by_y,) = torch.autograd.grad(root, y, retain_graph=True)
    assert by_y.placements == (Shard(0),)
    close(by_y, 2 * randn(5, 3))
    (by_y,) = torch.autograd.grad(root, y, torch.tensor(3.0, device=root.device), retain_graph=True)
    close(by_y, 6 * randn(5, 3))
    with pytest.raises(TypeError, match=r"of a plain tensor must be plain: use gradient.full_tensor\(\)"):
        torch.autograd.grad(root, y, shard(torch.ones_like(root), mesh, Replicate()))


@on_mesh()
def inputs_by_name(mesh: Any) -> None:
    x, w = (shard(randn(5, 3, seed=seed), mesh, Shard(0)).requires_grad_() for seed in (0, 1))
    found = torch.autograd.grad((x * w).sum(), {"x": x, "w": w})
    assert sorted(found) == ["w", "x"]
    close(found["x"], full(w))
    close(found["w"], full(x))
    (x * w).sum().backward(inputs={"w": w})
    close(w.grad, full(x))
    assert x.grad is None


@on_mesh()
def gradients_of_a_tensor_that_is_read_past(mesh: Any) -> None:
    """Operations that compute a part of a gradient on each rank read the source of the tensor. If the program asks for
    that gradient before, it is complete; after such a read it is refused."""
    plain, w = randn(4, 6), randn(6, 6, seed=1)
    wanted = 2 * plain @ w @ w.T

    def product(x: Any) -> Any:
        return (x @ shard(w, mesh, Shard(1))).square().sum()

    def layer(x: Any) -> Any:
        module = nn.Linear(6, 6, bias=False, device=w.device)
        with torch.no_grad():
            module.weight.copy_(w.T)
        return parallelize_module(module, mesh, ColwiseParallel(use_local_output=False))(x).square().sum()

    def twice(x: Any) -> Any:
        product(DTensor.from_local(source, mesh, [Replicate()]))  # it makes the view that the next one shares
        return product(x)

    def cut(x: Any) -> Any:
        return (x.redistribute(placements=[Shard(0)]) @ shard(w, mesh, Replicate())).square().sum()

    source = plain.clone().requires_grad_() * 1.0
    made = {
        "gathered": lambda: shard(plain, mesh, Shard(0)).requires_grad_().redistribute(placements=[Replicate()]),
        "from_local": lambda: DTensor.from_local(source, mesh, [Replicate()]),
        "summands": lambda: DTensor.from_local(source, mesh, [Replicate()], grad_placements=[Partial()]),
    }
    asks = {
        "register_hook": lambda x, loss: x.register_hook(lambda g: g),
        "retain_grad": lambda x, loss: x.retain_grad(),
        "autograd.grad": lambda x, loss: torch.autograd.grad(loss, x),
        "backward": lambda x, loss: loss.backward(inputs=[x]),
    }
    for reads, kinds in {
        product: ("gathered", "summands"),
        layer: ("gathered", "from_local", "summands"),
        twice: ("from_local",),
        cut: ("summands",),
    }.items():
        for kind in kinds:
            x, seen = made[kind](), []
            x.register_hook(seen.append)
            x.retain_grad()
            reads(x).backward(retain_graph=True)
            close(seen[0], wanted, f"hook, {kind}", tolerance=1e-4)
            close(x.grad, wanted, f"retain_grad, {kind}", tolerance=1e-4)
            if mesh.size() == 1:
                continue
            x = made[kind]()
            loss = reads(x)
            for what, ask in asks.items():
                with pytest.raises(ValueError, match=rf"^{what}\(.*asks for the gradient .* x\.retain_grad\(\) before"):
                    ask(x, loss)
    # A view that was made of the tensor itself is complete.
    x = DTensor.from_local(source * 1.0, mesh, [Replicate()])
    close(torch.autograd.grad(product(x) + product(x), x)[0], 2 * wanted, tolerance=1e-4)


@on_mesh()
def batched_gradients(mesh: Any) -> None:
    x, gradients = shard(randn(5, 3), mesh, Shard(0)).requires_grad_(), torch.eye(3)
    y = (x * x).sum(0)
    with pytest.raises(
        ValueError, match=r"call autograd\.grad once for each of the grad_outputs, with retain_graph=True"
    ):
        torch.autograd.grad(y, x, shard(gradients, mesh, Replicate()), is_grads_batched=True)
    # The remedy of the message.
    rows = [shard(g, mesh, Replicate()) for g in gradients]
    got = [torch.autograd.grad(y, x, row, retain_graph=True)[0] for row in rows]
    plain = randn(5, 3).requires_grad_()
    (wanted,) = torch.autograd.grad((plain * plain).sum(0), plain, gradients.to(plain.device), is_grads_batched=True)
    close(torch.stack(got), wanted)


@on_mesh()
def backward_of_what_needs_no_gradient(mesh: Any) -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        shard(randn(5, 3), mesh, Shard(0)).sum().backward()


class Scaled(torch.autograd.Function):
    """``x * w``, whose backward gives a gradient for each that needs one."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, w = ctx.saved_tensors
        by_w = (g * x).sum(0) if w.dim() else (g * x).sum()
        return g * w if ctx.needs_input_grad[0] else None, by_w if ctx.needs_input_grad[1] else None


@on_mesh()
def functions_of_the_user(mesh: Any) -> None:
    # A hook on the output sees a DTensor, as everywhere, and its result counts.
    x, w = shard(randn(5, 3), mesh, Shard(0)).requires_grad_(), shard(randn(3, seed=1), mesh, Replicate())
    seen: list[Any] = []
    y = Scaled.apply(x, w)
    y.register_hook(lambda g: seen.append((type(g), g.placements, tuple(g.shape))) or 2 * g)
    y.sum().backward()
    assert seen == [(type(x), (Shard(0),), (5, 3))]
    close(x.grad, 2 * full(w).expand(5, 3))
    assert w.grad is None
    # The gradient of a plain input is whole: here each rank has a summand of it.
    factor = torch.tensor(3.0, device=x.device, requires_grad=True)
    Scaled.apply(shard(randn(5, 3), mesh, Shard(0)), factor).sum().backward()
    assert type(factor.grad) is torch.Tensor
    close(factor.grad, randn(5, 3).sum())
    # Nothing to hook.
    with torch.no_grad():
        close(Scaled.apply(x, w), full(x) * full(w))


@on_mesh()
def hooks_on_nodes(mesh: Any) -> None:
    """A hook on a node may hand a distributed gradient on, laid out like the one that it replaces."""
    x, seen = shard(randn(5, 3), mesh, Shard(0)).requires_grad_(), []
    y = x * 1.0
    y.grad_fn.register_hook(lambda inputs, outputs: (shard(randn(5, 3, seed=1), mesh, Shard(0)), *inputs[1:]))
    x.register_hook(lambda g: seen.append(g.placements) or 3 * g)
    y.sum().backward()
    assert seen == [(Shard(0),)] and x.grad.placements == (Shard(0),)
    close(x.grad, 3 * randn(5, 3, seed=1))


@on_mesh()
def data_of_a_computed_tensor(mesh: Any) -> None:
    x = shard(randn(5, 3), mesh, Shard(0)).requires_grad_()
    y = 2 * x
    with pytest.raises(ValueError, match=r"needs a value placed .*redistribute the value first"):
        y.data = shard(randn(5, 3, seed=1), mesh, Replicate())
    y.data = shard(randn(5, 3, seed=1), mesh, Shard(0))
    (y * y).sum().backward()
    close(x.grad, 4 * randn(5, 3, seed=1))


class Norm(torch.autograd.Function):
    """A plain result of a distributed tensor."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.full_tensor().pow(2).sum()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * g * x.to_local()


@on_mesh()
def a_function_with_a_plain_result(mesh: Any) -> None:
    x = shard(randn(5, 3), mesh, Shard(0)).requires_grad_()
    value = Norm.apply(x)
    assert type(value) is torch.Tensor
    close(value, randn(5, 3).pow(2).sum())
    value.backward()
    close(x.grad, 2 * randn(5, 3))


@on_mesh()
def one_result_under_two_layouts(mesh: Any) -> None:
    """`wrap` leaves a DTensor that has another layout as it is."""
    from hyper_parallel.platform.torch.basics.tensor import wrap

    x = DTensor.from_local(randn(5, 3), mesh, [Replicate()])
    summand = DTensor.from_local(randn(5, 3), mesh, [Partial()])
    assert wrap(x, x._layout) is x
    other = wrap(x, summand._layout)
    assert other is not x and (x.placements, other.placements) == ((Replicate(),), (Partial(),))
    assert other.to_local().data_ptr() == x.to_local().data_ptr()
    close(other, mesh.size() * randn(5, 3))


JOBS = [
    plain_and_distributed_tensors_in_one_graph,
    inputs_by_name,
    gradients_of_a_tensor_that_is_read_past,
    batched_gradients,
    backward_of_what_needs_no_gradient,
    functions_of_the_user,
    a_function_with_a_plain_result,
    hooks_on_nodes,
    data_of_a_computed_tensor,
    one_result_under_two_layouts,
]


@on_ranks(1, 3)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_rare_gradients(pool: Any, job: Any, world_size: int) -> None:
    pool.run(world_size, job)


def test_a_cotangent_that_is_a_parameter() -> None:
    """The tensors in backward of `Platform.autograd_function` are plain, whatever class the cotangent has."""
    kinds: list[type] = []

    def backward(ctx: Any, g: Any) -> Any:
        kinds.append(type(g))
        return 2 * g

    x = randn(3).requires_grad_()
    get_platform().autograd_function(lambda ctx, x: 2 * x, backward)(x).backward(nn.Parameter(randn(3, seed=1)))
    assert kinds == [torch.Tensor]
    close(x.grad, 2 * randn(3, seed=1))
