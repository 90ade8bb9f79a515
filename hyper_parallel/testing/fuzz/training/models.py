"""Models of training programs, and their distribution."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from hyper_parallel import (
    ColwiseParallel,
    DeviceMesh,
    ExpertParallel,
    PackedShard,
    Replicate,
    RowwiseParallel,
    Shard,
    fully_shard,
    parallelize_module,
    replicate,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import forwards, get_adapter
from hyper_parallel.testing.fuzz.training.programs import Model, Setup

__all__ = ["buffers", "build", "distribute", "held", "meshes_of", "module_at", "parameters"]


def build(model: Model, seed: int | None = 5) -> Any:
    """Return a model. ``order[0]`` of the model lists the blocks in the order in which it calls them. With None for
    ``seed``, its tensors have no memory."""
    if seed is None:
        with get_adapter().without_values():
            root = _made(model)
        root.to(get_platform().dtypes[model.dtype])
    else:
        root = get_adapter().load(_made(model), np.random.default_rng(seed), np.dtype(model.dtype).type)
    if model.writer in ("teacher", "counter"):
        frozen = "writer.teacher" if model.writer == "teacher" else "writer.count"
        for name in parameters(root):
            if name.startswith(frozen):
                get_adapter().freeze(root, name)
    return root


def _made(model: Model) -> Any:
    adapter, root = get_adapter(), get_adapter().Probe()
    features = model.features
    if model.vocabulary:
        root.tied = adapter.Tied(model.vocabulary, features)
    for i, kind in enumerate(model.blocks):
        setattr(root, f"block{i}", _block(adapter, model, kind))
    if model.writer:
        root.writer = _writer(adapter, model)
    object.__setattr__(root, "order", [tuple(range(len(model.blocks)))])
    object.__setattr__(root, "drops", model.drops)
    get_platform().replace_forward(root, lambda _: _forward)
    return root


def _block(adapter: Any, model: Model, kind: str) -> Any:
    if kind == "linear":
        return adapter.linear_module(model.features, model.features, model.bias)
    if kind == "mlp":
        return adapter.Mlp(model.features, model.hidden, model.bias)
    if kind == "experts":
        block = adapter.Probe()
        block.router = adapter.linear_module(model.features, model.experts, False)
        block.experts = adapter.Mixture(1, model.experts, model.features, model.hidden, model.by_index).experts
        for name, value in (("by_index", model.by_index), ("chosen", model.chosen), ("again", model.again)):
            object.__setattr__(block, name, value)
        get_platform().replace_forward(block, lambda _: _to_experts)
        return block
    return adapter.norm_module(model.features) if kind == "norm" else adapter.RmsNorm(model.features)


def _forward(self: Any, x: Any) -> Any:
    tied = getattr(self, "tied", None)
    if tied is not None:
        x = tied.embedding(x)
    for i in self.order[0]:
        block = getattr(self, f"block{i}")
        again = getattr(block, "again", "") in ("around", "reentrant")
        y = get_adapter().checkpointed(block, x, block.again == "reentrant") if again else block(x)
        x = x + (get_adapter().dropout(y, 0.25) if self.drops else y)
    writer = getattr(self, "writer", None)
    if writer is not None:
        x = writer(x)
    return x if tied is None else tied.head(x)


def _to_experts(self: Any, x: Any) -> Any:
    """Return for each token the weighted sum of the outputs of the experts that a router chooses."""
    return get_adapter().checkpointed(partial(_mixed, self), x, False) if self.again == "inside" else _mixed(self, x)


def _mixed(self: Any, x: Any) -> Any:
    adapter = get_adapter()
    tokens = adapter.reshape(x, (x.shape[0] * x.shape[1], x.shape[2]))
    logits, indices = adapter.topk(self.router(tokens), self.chosen)
    # On MindSpore, a softmax over one element makes all later gradients of the process wrong.
    weights = adapter.softmax(logits, -1) if self.chosen > 1 else adapter.tanh(logits)
    return adapter.reshape(forwards.routed(adapter, self, tokens, indices, weights), x.shape)


def _writer(adapter: Any, model: Model) -> Any:
    """Return a module that writes its own parameters or buffers in forward, with the same result on all ranks."""
    writer, features = adapter.Probe(), model.features
    if model.writer == "teacher":
        writer.student, writer.teacher = (adapter.linear_module(features, features, model.bias) for _ in range(2))
    elif model.writer == "counter":
        writer.count = adapter.norm_module(features)
    elif model.writer == "book":
        writer.book = adapter.Projection(features, features)
    else:
        writer.scaled = adapter.Buffered(features)
    # A buffer is a plain tensor, without the methods of parameters.
    way = "copy" if model.writer == "buffer" and model.way in getattr(adapter, "WRITES", ()) else model.way
    object.__setattr__(writer, "does", (model.writer, way))
    get_platform().replace_forward(writer, lambda _: _written)
    return writer


def _written(self: Any, x: Any) -> Any:
    adapter, platform, (what, way) = get_adapter(), get_platform(), self.does
    if what == "teacher":  # the teacher follows the student
        pairs, rate = [*zip(_own(self.teacher), _own(self.student), strict=True)], 0.5
    else:  # values shrink
        module = getattr(self, {"counter": "count", "book": "book", "buffer": "scaled"}[what])
        held = [b for _, b in platform.named_buffers(module)] if what == "buffer" else _own(module)
        pairs, rate = [(p, p * 0) for p in held], 0.1
    with platform.no_grad():
        for p, goal in pairs:
            new = adapter.detach(p * (1 - rate)) + adapter.detach(goal * rate)
            if way == "add":
                adapter.IN_PLACE["mul_"][0](p, 1 - rate)
                adapter.IN_PLACE["add_"][0](p, adapter.detach(goal * rate))
            elif way == "copy":
                adapter.IN_PLACE["copy_"][0](p, new)
            else:
                adapter.WRITES[way](p, new)
    if what == "teacher":
        return self.student(x) - self.teacher(x)
    if what == "counter":
        return x + adapter.tanh(self.count(x))
    return adapter.tanh((self.book if what == "book" else self.scaled)(x))


def _own(module: Any) -> list[Any]:
    return [p for _, p in get_platform().named_parameters(module)]


def parameters(module: Any) -> dict[str, Any]:
    """Return the parameters by name, each once."""
    platform, seen, found = get_platform(), set(), {}
    for path, sub in platform.named_modules(module):
        for name, p in platform.named_parameters(sub):
            if id(p) not in seen:
                seen.add(id(p))
                found[f"{path}.{name}".lstrip(".")] = p
    return found


def buffers(module: Any) -> dict[str, Any]:
    """Return the buffers by name."""
    platform = get_platform()
    return {
        f"{path}.{name}".lstrip("."): b
        for path, sub in platform.named_modules(module)
        for name, b in platform.named_buffers(sub)
    }


def held(module: Any) -> dict[str, Any]:
    """Return parameters and buffers by name."""
    return {**parameters(module), **buffers(module)}


def module_at(root: Any, path: str) -> Any:
    """Return the submodule of ``root`` at a path."""
    for name in path.split(".") if path else ():
        root = getattr(root, name)
    return root


def meshes_of(setup: Setup) -> tuple[Any, Any, Any] | None:
    """Return the mesh of a setup, its data-parallel mesh and its tensor-parallel mesh. A missing mesh is None. Call it
    on all ranks of the pool; it returns None on ranks outside the mesh."""
    mesh = spmd.device_mesh(*setup.shape, names=setup.names)
    world = spmd.device_mesh(4, names=("world",)) if setup.two_meshes else None
    if mesh is None:
        return None
    data = tuple(name for name in setup.names if name != "tp")
    if world is not None:
        first = world._unflatten(0, setup.shape, tuple(f"other_{n}" if n != "tp" else n for n in setup.names))
        second = world._unflatten(0, setup.shape, setup.names)
        return second, second[data[0]] if "tp" in setup.names else second, first["tp"] if "tp" in setup.names else None
    if len(setup.names) == 1:
        return (mesh, mesh, None) if data else (mesh, None, mesh)
    of_data = None if not data else mesh if len(data) == mesh.ndim else mesh[data if len(data) > 1 else data[0]]
    return mesh, of_data, mesh["tp"] if "tp" in setup.names else None


def distribute(root: Any, model: Model, setup: Setup, dp: DeviceMesh | None, tp: DeviceMesh | None) -> Any:
    """Distribute a model in place, and return it."""
    if tp is not None:
        plan = _plan(model, setup)
        if plan:
            parallelize_module(root, tp, plan)
    if setup.experts:
        _distribute_experts(root, model, setup, dp, tp)
    if "copy" in setup.names:
        return replicate(root, dp, bucket_cap_mb=1e-6 if setup.small_buckets else 25)
    if "shard" not in setup.names:
        return root

    def by_last(p: Any) -> Any:
        return Shard(len(p.shape) - 1) if len(p.shape) else None

    more: dict[str, Any] = {"shard_placement_fn": by_last} if setup.by_last else {}
    for unit, reshard in zip(setup.units, setup.reshard, strict=False):
        modules = [module_at(root, path) for path in unit]
        fully_shard(modules if len(unit) > 1 else modules[0], mesh=dp, reshard_after_forward=reshard, **more)
    return fully_shard(root, mesh=dp, reshard_after_forward=setup.reshard[-1], **more)


#: Placements of experts that are sharded inside.
INSIDE = {"gate_up": PackedShard(2, 2), "down": Shard(1)}


def _distribute_experts(root: Any, model: Model, setup: Setup, dp: DeviceMesh | None, tp: DeviceMesh | None) -> None:
    """Give each rank full experts, or shards of experts. Ranks of other mesh dimensions have replicas."""
    experts = [f"block{i}.experts" for i, kind in enumerate(model.blocks) if kind == "experts"]
    common: dict[str, Any] = {"input_layout": Replicate(), "tp_dim": "tp"}
    over, rest, style = dp, None, ExpertParallel()
    if dp is not None and dp.ndim > 1:
        over, rest = dp["shard"], dp["rep"]
    if setup.experts == "tp":
        over, rest, style = tp, None, ExpertParallel(**common)
    elif setup.experts == "both" and dp is not None:
        names: Any = (*(dp.mesh_dim_names or ()), "tp")
        over, style = dp.get_root_mesh()[names]._flatten("ep"), ExpertParallel(**common)
    elif setup.experts == "inside":
        style = ExpertParallel(**common, inside=INSIDE)
    parallelize_module(root, over, dict.fromkeys(experts, style))
    for path in experts if rest is not None else ():
        fully_shard(module_at(root, path), mesh=rest)


def _plan(model: Model, setup: Setup) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    styled = [(f"block{i}", style) for i, style in enumerate(setup.styles[: len(model.blocks)])]
    if model.writer == "teacher":
        styled += [(f"writer.{name}", style) for name in ("student", "teacher") for style in setup.styles[-1:]]
    for path, style in styled:
        if style == "pair":
            plan |= {f"{path}.up": ColwiseParallel(), f"{path}.down": RowwiseParallel()}
        elif style == "col":
            plan[path] = ColwiseParallel(output_layouts=Replicate())
        elif style == "row":
            plan[path] = RowwiseParallel(input_layouts=Replicate())
    if model.vocabulary and any(setup.styles):
        plan["tied.embedding"] = RowwiseParallel(input_layouts=Replicate())
        plan["tied.head"] = ColwiseParallel(output_layouts=Replicate())
    return plan
