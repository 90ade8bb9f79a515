"""Compiled graphs would read shards as whole tensors: they are refused."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from hyper_parallel import Shard, distribute_tensor
from hyper_parallel.platform.mindspore.launch import GroupVerbs
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.nets import batch, error_of, make_net


@ms.jit
def doubled(x: Any) -> Any:
    return x * 2


@on_mesh()
def compiled(mesh: Any) -> list[str]:
    x = distribute_tensor(Tensor(np.ones((4, 2), np.float32)), mesh, [Shard(0)])
    net, ids = make_net(mesh), batch()[0]

    @ms.jit
    def forward(ids: Any) -> Any:
        return net(ids)

    errors = [error_of(doubled, x), error_of(forward, ids), error_of(lambda: doubled(x=x))]
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        errors.append(error_of(net, ids))
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    assert doubled(Tensor([1.0])).asnumpy() == 2.0
    return errors


def test_jit_is_refused(pool: Any) -> None:
    for errors in pool.run(2, compiled):
        assert all("work in PyNative mode, without jit" in e for e in errors), errors
        assert "a DTensor" in errors[0]
        assert "the distributed parameter 'embedding.embedding_table'" in errors[1]


def test_graph_mode_is_refused_at_initialisation() -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        with pytest.raises(RuntimeError, match="MindSpore is in graph mode"):
            GroupVerbs().init_process_group()
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
