"""Compiled models: tensor parallelism written by hand for a compiler, and Inductor's program for a model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.graph import GraphLowering

from benchmarks.torch_hand_written import Function

__all__ = ["functional_pair", "generated_code", "operations_in"]

_ops = torch.ops._c10d_functional


def functional_pair(sequence_parallel: bool) -> tuple[Function, Function]:
    """`column_and_row` of `torch_hand_written`, or `gather_and_scatter`, with the collectives that compilers see."""
    group, size = dist.group.WORLD.group_name, dist.get_world_size()

    def same(x: Tensor) -> Tensor:
        return x.view_as(x)

    def reduced(x: Tensor) -> Tensor:
        return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group))

    def gathered(x: Tensor) -> Tensor:
        out = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), size, group))
        return torch.cat(out.chunk(size, 0), 1)

    def scattered(x: Tensor) -> Tensor:
        rows = torch.cat(x.chunk(size, 1), 0)
        return _ops.wait_tensor(_ops.reduce_scatter_tensor(rows, "sum", size, group))

    if sequence_parallel:
        return _paired(gathered, scattered), _paired(scattered, gathered)
    return _paired(same, reduced), _paired(reduced, lambda g: g)


def _paired(forward: Function, backward: Function) -> Function:
    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return forward(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return backward(gradient)

    apply: Function = Pair.apply
    return apply


@contextmanager
def generated_code() -> Iterator[list[str]]:
    """The programs that Inductor writes meanwhile, one a graph."""
    written: list[str] = []
    save: Callable[[str], None] = GraphLowering.save_output_code
    GraphLowering.save_output_code = staticmethod(written.append)  # type: ignore[assignment,method-assign]
    try:
        yield written
    finally:
        GraphLowering.save_output_code = staticmethod(save)  # type: ignore[assignment,method-assign]


def operations_in(code: str) -> Counter[str]:
    """The calls of a program of Inductor: generated kernels, kernels of torch, and collectives by name."""
    calls = code[code.index("def call(") :]
    generated = re.findall(r"^\s+(?:cpp_fused|triton_|kernels\.cpp|cpp_)\w*", calls, re.M)
    found = Counter({"generated kernels": len(generated)})
    found["kernels of torch"] = len(re.findall(r"extern_kernels\.\w+\(|torch\.ops\.(?:aten|mkl|mkldnn)\.", calls))
    for name in re.findall(r"_c10d_functional\.(\w+?)_?\.\w+\(", calls):
        if name != "wait_tensor":
            found[name] += 1
    return found
