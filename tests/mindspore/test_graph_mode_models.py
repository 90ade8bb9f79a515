"""Modules with styles called in graph mode: values, gradients, collectives and training of PyNative mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops
from mindspore.graph.api import _CellGraphExecutor, _JitExecutor

from examples.train_llama.model_mindspore import LlamaDecoderLayer, LlamaForCausalLM, rotary_tables
from hyper_parallel import ColwiseParallel, parallelize_module
from hyper_parallel.mindspore import value_and_grad
from hyper_parallel.testing.extent import everything
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore import llama
from tests.mindspore.nets import error_of
from tests.mindspore.test_jit import BLOCK, FEATURES, LINEAR, MLP, UNITS, activations, collectives_of, flat, numbers


@contextmanager
def graph_mode() -> Iterator[list[Any]]:
    """Graph mode, which gives the graphs that are made meanwhile."""
    phases: list[Any] = []
    kept = {executor: executor.compile for executor in (_JitExecutor, _CellGraphExecutor)}

    def remembering(compile_: Any) -> Any:
        def compile_and_remember(executor: Any, *args: Any, **kwargs: Any) -> Any:
            made = compile_(executor, *args, **kwargs)
            phases.append((executor, made[0] if isinstance(made, tuple) else made))
            return made

        return compile_and_remember

    for executor, compile_ in kept.items():
        executor.compile = remembering(compile_)
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        yield phases
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
        for executor, compile_ in kept.items():
            executor.compile = compile_


def compared(net: nn.Cell, x: Tensor, *more: Any) -> tuple[float, dict[str, int], dict[str, int]]:
    """The largest relative difference between PyNative and graph mode, in outputs and gradients, and the collectives
    in the graphs: of the forward, and of forward and backward."""
    position, parameters = (None if x.dtype == ms.int32 else 0), net.trainable_params()

    def loss(x: Any) -> Any:
        return (net(x, *more) ** 2).sum()

    wanted = [net(x, *more).asnumpy(), *flat(value_and_grad(loss, position, parameters)(x))]
    with graph_mode() as phases:
        found = [net(x, *more).asnumpy()]
        forward = collectives_of(phases)
        found += flat(value_and_grad(loss, position, parameters)(x))
        both = collectives_of(phases)
        assert len(phases) == 2
    assert len(found) == len(parameters) + 2 + (position is not None)
    differences = [float(np.abs(a - b).max() / np.abs(a).max()) for a, b in zip(wanted, found, strict=True)]
    return max(differences), dict(forward), dict(both)


@on_mesh()
def layers(mesh: Any) -> dict[str, Any]:
    mesh._has_uneven_shards = False  # ranks share the mesh with tests of unequal parts
    found = {}
    for name in ("gated", "sequence"):
        plan, cut = LINEAR[name]
        net = parallelize_module(numbers(MLP(gated=name == "gated")), mesh, dict(plan))
        x = activations(2, 4, FEATURES)
        found[name] = compared(net, x[:, :2].contiguous() * (mesh.get_local_rank() + 1) if cut else x)
    net = parallelize_module(numbers(mint.nn.Linear(FEATURES, UNITS)), mesh, ColwiseParallel())
    found["linear"] = compared(net, activations(2, FEATURES))
    return found


def test_linear_layers(pool: Any) -> None:
    for found in pool.run(2, layers):
        assert max(difference for difference, *_ in found.values()) < 1e-5, found
        assert found["gated"][1:] == ({"AllReduce": 1}, {"AllReduce": 2})
        assert found["linear"][1:] == ({}, {"AllReduce": 1})


@on_mesh()
def llamas(mesh: Any) -> list[Any]:
    config = llama.Config()
    block = parallelize_module(numbers(LlamaDecoderLayer(config, 0)), mesh, BLOCK)
    cos, sin = rotary_tables(llama.LENGTH, config.head_dim, config.rope_theta)
    x = activations(llama.BATCH, llama.LENGTH, config.hidden_size)
    found = [compared(block, x, cos, sin)]
    if everything():  # embeddings and heads are in test_jit.py
        model = parallelize_module(numbers(LlamaForCausalLM(config)), mesh, llama.PLAN)
        found.append(compared(model, Tensor(np.arange(16).reshape(2, 8), ms.int32)))
    return found


def test_llama(pool: Any) -> None:
    for found in pool.run(2, llamas):
        assert max(difference for difference, *_ in found) < 1e-5
        assert found[0][1:] == ({"AllReduce": 2}, {"AllReduce": 4})


@on_mesh()
def training(mesh: Any) -> tuple[list[float], list[float], list[str]]:
    """Losses of steps of the unsharded network in PyNative mode, and of the sharded one in graph mode. A parameter gets
    another value on the way. There it is written in place, as MindSpore's optimizers go on with the memory they know.
    Here it is in other memory."""

    def steps(net: nn.Cell, change: Any) -> list[float]:
        def loss(x: Any) -> Any:
            return (net(x) ** 2).sum()

        weights = net.trainable_params()
        gradients, optimizer, losses = ms.value_and_grad(loss, None, weights), nn.Momentum(weights, 0.01, 0.9), []
        for step in range(3):
            value, found = gradients(x)
            optimizer(found)
            losses += [float(value.asnumpy()), float((net(x) ** 2).sum().asnumpy())]
            if step == 0:
                change(net.down.weight, Tensor(np.full((FEATURES, UNITS), 0.1, np.float32)))
        return losses

    x = activations(2, FEATURES)
    unsharded = steps(numbers(MLP()), ops.assign)
    net = parallelize_module(numbers(MLP()), mesh, dict(LINEAR["column"][0]))
    with graph_mode():
        in_graph = steps(net, lambda p, value: p.set_data(value))
        # Results of graphs are not marked as gradients, and could be parts of them.
        part = Tensor(np.ones((UNITS // 2, FEATURES), np.float32))
        clipped = [error_of(ops.clip_by_global_norm, (part,))]
    (marked,) = ms.grad(lambda x: net(x).sum(), None, [net.up.weight])(x)
    with graph_mode():
        clipped.append(error_of(ops.clip_by_global_norm, (marked,)))
    in_graph.append(float((net(x) ** 2).sum().asnumpy()))  # and PyNative mode sees the writes of graphs
    return [*unsharded, unsharded[-1]], in_graph, clipped


def test_training(pool: Any) -> None:
    for unsharded, in_graph, clipped in pool.run(2, training):
        np.testing.assert_allclose(in_graph, unsharded, rtol=1e-5)
        assert (
            "ValueError: _ClipByGlobalNorm got a plain tensor of shape (6, 8), like this rank's shard of" in clipped[0]
        )
        assert "ValueError: _ClipByGlobalNorm in graph mode got this rank's shard of a gradient" in clipped[1]
