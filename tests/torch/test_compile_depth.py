"""Equal blocks that are compiled one by one share their graphs, however many they are: with each style."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    HeadNormParallel,
    NoParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    fully_shard,
    parallelize_module,
)
from hyper_parallel.testing.extent import everything, in_gate
from hyper_parallel.testing.spmd import on_mesh
from tests.torch import decoder
from tests.torch.compiled import fresh
from tests.torch.support import close, device, randn

#: More blocks than graphs; at night more than the recompilations after which torch gives up.
DEPTH, FEATURES = 12 if everything() else 4, 8
WHOLE, PARTS = Replicate(), Shard(1)


class Scale(nn.Module):
    """A norm of a user's own, which is not registered: transformers' LlamaRMSNorm."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.linspace(0.5, 1.5, features)), 1e-6

    def forward(self, x: Any) -> Any:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)


class Centered(Scale):
    """Another: Gemma's, which computes on its weight, and takes the mean away."""

    def forward(self, x: Any) -> Any:
        y = x.float() - x.float().mean(dim=-1, keepdim=True)
        y = y / torch.sqrt(y.square().sum((-1,), True) / y.shape[-1] + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


class Wrapped(Scale):
    """A norm by a submodule with parameters, which calls a function of torch."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.norm = nn.LayerNorm(features)

    def forward(self, x: Any) -> Any:
        return self.norm(x) * self.weight


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 12), nn.Linear(12, FEATURES)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(x)))


class Mixed(nn.Module):
    """The other styles: norms in heads, packed weights, replicated layers, hooks at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Any) -> Any:
        return x + self.inner(x)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.packed, self.down = nn.Linear(FEATURES, 24), nn.Linear(12, FEATURES)
        self.norm, self.same, self.last = nn.RMSNorm(2), nn.Linear(FEATURES, FEATURES), nn.Identity()

    def forward(self, x: Any) -> Any:
        a, b = self.packed(x).chunk(2, -1)
        a = self.norm(a.unflatten(-1, (-1, 2))).flatten(-2)
        return self.last(self.same(x + self.down(a * torch.sigmoid(b))))


def block(norm: Any) -> nn.Module:
    made = decoder.Block(decoder.Sizes(), True)
    if norm is not None:
        made.norm1, made.norm2 = norm(FEATURES), norm(FEATURES)
    return made


def sequence(at: str) -> dict[str, Any]:
    """Styles of a decoder block; an object of its own for each."""
    return {
        f"{at}.norm1": SequenceParallel(),
        f"{at}.norm2": SequenceParallel(use_local_output=True),
        f"{at}.attention": PrepareModuleInput(input_layouts=PARTS, desired_input_layouts=WHOLE),
        f"{at}.attention.w[qkv]": ColwiseParallel(),
        f"{at}.attention.wo": RowwiseParallel(output_layouts=PARTS),
        f"{at}.feed_forward": PrepareModuleInput(input_layouts=PARTS, desired_input_layouts=WHOLE),
        f"{at}.feed_forward.gate": ColwiseParallel(),
        f"{at}.feed_forward.up": ColwiseParallel(),
        f"{at}.feed_forward.down": RowwiseParallel(output_layouts=PARTS),
    }


def mixed(at: str) -> dict[str, Any]:
    at = f"{at}.inner"
    return {
        at: PrepareModuleInputOutput(
            input_layouts=WHOLE,
            desired_input_layouts=WHOLE,
            use_local_input=True,
            output_layouts=PARTS,
            desired_output_layouts=WHOLE,
        ),
        f"{at}.packed": ColwiseParallel(packed=2),
        f"{at}.norm": HeadNormParallel(),
        f"{at}.down": RowwiseParallel(),
        f"{at}.same": NoParallel(),
        f"{at}.last": PrepareModuleOutput(output_layouts=WHOLE, desired_output_layouts=PARTS),
    }


def llama(depth: int) -> list[nn.Module]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(
        hidden_size=FEATURES, intermediate_size=12, num_attention_heads=2, num_key_value_heads=2, vocab_size=8,
        attn_implementation="sdpa",
    )  # fmt: skip

    class Layer(nn.Module):
        def __init__(self, i: int) -> None:
            super().__init__()
            self.layer = LlamaDecoderLayer(config, i)

        def forward(self, x: Any) -> Any:
            angles = torch.linspace(0, 1, 4 * 4, device=x.device).view(1, 4, 4)
            return self.layer(x, position_embeddings=(angles.cos(), angles.sin()))

    return [Layer(i) for i in range(depth)]


def of_llama(at: str) -> dict[str, Any]:
    into = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": PARTS}, desired_input_kwarg_layouts={"hidden_states": WHOLE}
    )
    return {
        f"{at}.layer.*layernorm": SequenceParallel(),
        f"{at}.layer.self_attn": into,
        f"{at}.layer.self_attn.[qkv]_proj": ColwiseParallel(),
        f"{at}.layer.self_attn.o_proj": RowwiseParallel(output_layouts=PARTS),
        f"{at}.layer.mlp": PrepareModuleInput(input_layouts=PARTS, desired_input_layouts=WHOLE),
        f"{at}.layer.mlp.gate_proj": ColwiseParallel(),
        f"{at}.layer.mlp.up_proj": ColwiseParallel(),
        f"{at}.layer.mlp.down_proj": RowwiseParallel(output_layouts=PARTS),
    }


def linear(at: str) -> dict[str, Any]:
    return {f"{at}.up": ColwiseParallel(), f"{at}.down": RowwiseParallel()}


def stack(name: str, depth: int) -> tuple[nn.Module, dict[str, Any]]:
    """Equal blocks between two modules that cut the sequence and join it, and their plan."""
    torch.manual_seed(0)
    norm = {"own norms": Scale, "norms that compute on weights": Centered, "norms around norms": Wrapped}.get(name)
    of_one: Any = sequence
    if name == "transformers":
        blocks, of_one = llama(depth), of_llama
    elif name == "linear layers":
        blocks, of_one = [Mlp() for _ in range(depth)], linear
    elif name == "mixed":
        blocks, of_one = [Mixed() for _ in range(depth)], mixed
    else:
        blocks = [block(norm) for _ in range(depth)]
    plan = {}
    for i in range(depth):
        plan |= of_one(f"{i + 1}")
    if of_one in (sequence, of_llama):
        plan["0"] = PrepareModuleOutput(output_layouts=WHOLE, desired_output_layouts=PARTS)
        plan[f"{depth + 1}"] = PrepareModuleOutput(output_layouts=PARTS, desired_output_layouts=WHOLE)
    return nn.Sequential(nn.Identity(), *blocks, nn.Identity()).to(device()), plan


def compiles(blocks: Any) -> list[int]:
    """Compile blocks one by one, and count the graphs that are made of them."""
    made: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(1)
        return graph

    for one in blocks:
        one.compile(backend=backend, fullgraph=True)
    return made


@on_mesh()
def deep(mesh: Any, name: str, depth: int) -> None:
    fresh(mesh)
    single, plan = stack(name, depth)
    model: Any = parallelize_module(copy.deepcopy(single), mesh, plan)
    made = compiles(model[1:-1])
    x = randn(2, 4, FEATURES)
    for step in range(2):
        y, wanted = model(x), single(x)
        close(y, wanted, name)
        for one, z in ((model, y), (single, wanted)):
            one.zero_grad()
            z.square().sum().backward()
        for (path, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
            close(p.grad / q.grad.abs().max(), q.grad / q.grad.abs().max(), f"{name}: {path}, step {step}", 1e-4)
    # Of the first block the input has no gradient.
    assert len(made) <= 2, (name, len(made))


STACKS = (
    *("linear layers", "sequence parallel", "mixed", "own norms", "norms that compute on weights"),
    *("norms around norms", *(("transformers",) if find_spec("transformers") else ())),
)


#: The norms of transformers are own norms.
IN_GATE = ["linear layers", "mixed", "transformers" if "transformers" in STACKS else "own norms"]


@pytest.mark.parametrize("name", in_gate(STACKS, IN_GATE))
def test_depth(pool: Any, name: str) -> None:
    pool.run(2, deep, name, DEPTH)


@on_mesh(2, 2, names=("dp", "tp"))
def deep_units(mesh: Any) -> None:
    """Data parallelism around the blocks: a unit for each, and one for all."""
    x = randn(2, 4, FEATURES)
    for name in ("linear layers", "own norms"):
        for each in (True, False):
            fresh(mesh["tp"])
            single, plan = stack(name, 4)
            model: Any = parallelize_module(copy.deepcopy(single), mesh["tp"], plan)
            blocks = list(model[1:-1])
            for i in range(1, len(blocks) + 1) if each else ():
                model[i] = fully_shard(nn.Sequential(model[i]), mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
            made = compiles(blocks)
            for _ in range(2):
                for one in (model, single):
                    one.zero_grad()
                    one(x).square().sum().backward()
                for (path, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
                    close(p.grad / q.grad.abs().max(), q.grad / q.grad.abs().max(), f"{name}: {path}", 1e-4)
            assert len(made) <= 2, (name, each, len(made))


@pytest.mark.nightly
def test_depth_inside_of_units(pool: Any) -> None:
    pool.run(4, deep_units)
