"""Comparisons of compiled code before it runs: few, and of everything that can change."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    parallelize_module,
)
from hyper_parallel.platform.torch.compiler import guards
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.compiled import Graphs, fresh, step
from tests.torch.support import close, device, randn

WHOLE, ROWS = Replicate(), Shard(0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.inner = nn.LayerNorm(6), Inner()
        self.to(device())

    def forward(self, x: Any) -> Any:
        return self.inner(self.norm(x * 2))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Any) -> Any:
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


def plan() -> dict[str, Any]:
    return {
        "norm": SequenceParallel(sequence_dim=0),
        "inner": PrepareModuleInput(input_layouts=ROWS, desired_input_layouts=WHOLE),
        "inner.up": ColwiseParallel(),
        "inner.gate": ColwiseParallel(),
        "inner.down": RowwiseParallel(output_layouts=ROWS),
    }


def made(mesh: Any, backend: str = "eager", **changes: Any) -> tuple[Any, Any]:
    """A model, and a compiled call of it; both with some styles changed."""
    fresh(mesh)
    changed = {name.replace("_", "."): style for name, style in changes.items()}
    model = parallelize_module(Block(), mesh, {**plan(), **changed})
    return model, torch.compile(model, backend=backend, fullgraph=True)


def guards_of(model: nn.Module) -> str:
    (entry,) = _debug_get_cache_entry_list(type(model).forward.__code__)
    return str(entry.guard_manager)


def local(x: Any) -> Any:
    return x.to_local() if isinstance(x, DTensor) else x


def check(model: Any, call: Any, x: Any) -> None:
    """Check that compiled code gives the same result as the model does now."""
    eager = copy.deepcopy(model)
    for _ in range(2):
        y, gradient = step(model, x, call)
        wanted, wanted_gradient = step(eager, x, eager)
        close(y, wanted)
        close(gradient, wanted_gradient)
        for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                close(local(p.grad), local(q.grad), name)


@on_mesh()
def few(mesh: Any) -> None:
    """One guard for each style and each hook of one, none for this library's own functions."""
    model, call = made(mesh)
    call(randn(2, 6))
    found = guards_of(model)
    assert "hyper_parallel_dot_platform" not in found
    leaves = [line for line in found.splitlines() if "GuardManager" not in line]
    of_styles = [line for line in leaves if re.search(r"_compiled_run|_hooks\[list", line)]
    assert sum("ID_MATCH" in line for line in of_styles) == 5, of_styles
    assert all("ID_MATCH" in line or "_has_uneven_shards" in line for line in of_styles), of_styles
    assert any("_has_uneven_shards" in line for line in of_styles)
    assert not any(re.search(r"'(__call__|_call_impl|_compiled_call_impl)'", line) for line in leaves)
    # Hooks that come later are seen, which torch's compiler does not ask for.
    for name in ("up", "gate", "down"):
        hooks = [line for line in leaves if re.search(rf"'{name}'\]\._(forward|backward)_(pre_)?hooks", line)]
        assert len(hooks) == 4, hooks
        assert all("DICT_LENGTH" in line for line in hooks), hooks


@on_mesh()
def styles_change(mesh: Any) -> None:
    """Modules of the same class and the same shapes, which another plan was applied to. All else stays as it was."""
    x = randn(4, 6)
    plain = SequenceParallel(sequence_dim=0, use_local_output=True)
    for name, style in (
        ("inner", PrepareModuleInput(input_layouts=WHOLE, desired_input_layouts=WHOLE)),
        ("inner_down", RowwiseParallel(output_layouts=WHOLE)),
    ):
        other, _ = made(mesh, norm=plain, **{name: style})
        model, call = made(mesh, norm=plain)
        check(model, call, x)
        before = call(x)
        if name == "inner":
            for child, module in model.inner.named_children():
                setattr(other.inner, child, module)
            model.inner = other.inner
        else:
            model.inner.down = other.inner.down
        assert call(x).shape != before.shape
        check(model, call, x)


@on_mesh()
def modules_change(mesh: Any) -> None:
    """Hooks, another forward, compilation of their own, parameters."""
    x = randn(2, 6)
    model, call = made(mesh)
    check(model, call, x)
    model.inner.up.compile(backend="eager")
    check(model, call, x)
    handle = model.inner.up.register_forward_hook(lambda module, args, y: y * 3)
    check(model, call, x)
    handle.remove()
    check(model, call, x)
    before = model.inner.down.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    check(model, call, x)
    before.remove()
    model.inner.down.forward = lambda x: x[:1, :1] * torch.ones(6, device=x.device)
    y = call(x)
    close(y, model(x))
    del model.inner.down.forward
    check(model, call, x)
    model.inner.up.weight.requires_grad_(False)
    check(model, call, x)
    model.inner.up.weight = nn.Parameter(randn(4, 6))  # of the local shape
    with pytest.raises(Exception, match="cannot trace with these inputs"):
        call(x)


@on_mesh()
def straight_to_parameters(mesh: Any) -> None:
    """The graph gets the parameters themselves from the second run on, and backward has no views to go through."""
    model, call = made(mesh, "aot_eager")
    x, weight = randn(2, 6), model.inner.up.weight
    torch._dynamo.mark_static(model.inner.gate.weight, 0)
    call(x)
    assert "_dynamo_static_indices" not in vars(weight)
    assert vars(model.inner.gate.weight)["_dynamo_static_indices"] == {0}
    y = call(x)
    ends = [node for node, _ in y.grad_fn.next_functions]
    assert sum(getattr(node, "variable", None) is not None for node in ends) == len(list(model.parameters()))
    assert any(getattr(node, "variable", None) is weight for node in ends)
    y.sum().backward(retain_graph=True)
    once = local(weight.grad).clone()
    seen: list[Any] = []
    handle = weight.register_hook(lambda g: seen.append(g))
    y.sum().backward()
    handle.remove()
    assert len(seen) == 1
    close(local(weight.grad), once * 2)
    y = call(x)
    with torch.no_grad():
        close(call(x), y)
        close(call(x), y)
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    weight.grad = None
    check(model, call, x)
    with torch.autograd.graph.save_on_cpu():
        check(model, call, x)
    (gradient,) = torch.autograd.grad(local(call(x)).sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward|create_graph=False"):
        local(gradient).sum().backward()

    model, _ = made(mesh)
    graphs = Graphs()
    check(model, torch.compile(model, backend=graphs.backend, fullgraph=True), x)
    assert graphs.graphs == 2  # forward and backward


@pytest.mark.parametrize("job", [few, styles_change, modules_change, straight_to_parameters])
def test_guards(pool: Any, job: Any) -> None:
    pool.run(2, job)


def test_managers_of_other_versions() -> None:
    """Guard managers of a torch that makes guards in another way are left unchanged."""
    assert guards.is_manager(lambda self, f_code, output_graph, more=None: None) is None
    assert guards.is_manager(lambda self, output_graph: None) == "takes ('self', 'output_graph') first"
