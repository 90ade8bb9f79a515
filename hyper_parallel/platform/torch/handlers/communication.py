"""Functions of `torch.distributed` on DTensors: they act on the local storage, which a DTensor is.

torch asks its tensors for ``__torch_function__`` in all of them, so they arrive here however they were imported. Where
only the results are DTensors it does not ask, and C++ fills the local storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch._C import DisableTorchFunctionSubclass as no_dispatch
from torch.distributed import distributed_c10d

from hyper_parallel.platform.torch.basics.tensor import State, handles, is_dtensor
from hyper_parallel.platform.torch.op_table.binding import words

__all__: list[str] = []

_LINEAR = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
#: Collectives that do not combine the tensors of different ranks. Every rank knows of all results.
_GATHERING = frozenset(words("all_gather all_gather_coalesced all_gather_single all_to_all all_to_all_single"))
#: Each rank gets another result.
_PARTING = frozenset(words("reduce scatter reduce_scatter reduce_scatter_single all_to_all all_to_all_single"))
#: Functions of one large and one small tensor, and which of the two arguments is the large one.
_OF_ROWS = {"all_gather_single": 0, "reduce_scatter_single": 1}
#: Their first argument is written, the second one read.
_INTO_FIRST = frozenset({*_GATHERING, "reduce_scatter", "reduce_scatter_single"})


def _functions(names: str) -> list[Any]:
    """Return the objects that the module holds under the names, which torch hands over. A program may have put
    another function into `torch.distributed`. Versions differ in their names."""
    return [vars(distributed_c10d).get(name) for name in words(names)]


def _dtensors(x: Any) -> Iterator[Any]:
    if is_dtensor(x):
        yield x
    elif isinstance(x, (list, tuple)):
        for item in x:
            yield from _dtensors(item)


@handles(
    *_functions(
        """
all_reduce all_reduce_coalesced reduce broadcast scatter gather gather_single all_gather all_gather_single
all_gather_coalesced reduce_scatter reduce_scatter_single all_to_all all_to_all_single
"""
    )
)
def collective(func: Any, args: tuple, kwargs: dict) -> Any:
    """A collective, on local tensors if all of its ranks hold the same part of each DTensor."""
    name, group = func.__name__, kwargs.get("group")
    if dist.get_rank(group) >= 0:
        ranks = dist.get_process_group_ranks(group)
        written = args[:1] if name in _INTO_FIRST else args
        is_distributed = next(_dtensors(written), None) is not None
        linear, apart = kwargs.get("op", dist.ReduceOp.SUM) in _LINEAR, name in _GATHERING and not is_distributed
        parts = is_distributed and name in _PARTING
        for x in _dtensors(args):
            State.core.check_local_collective(name, x._layout, ranks, linear=linear, apart=apart, parts=parts)
        if is_distributed and len(args) == 2 and is_dtensor(args[1]):
            _check_rows(name, args, len(ranks))
    return _on_local(func, args, kwargs)


def _check_rows(name: str, args: tuple, count: int) -> None:
    """Check that joining or cutting local tensors along dimension 0 means the same for the global ones."""
    if name in _OF_ROWS:
        large = _OF_ROWS[name]
        State.core.check_rows(name, args[large]._layout, args[1 - large]._layout, count)
    elif name == "all_to_all_single":
        State.core.check_rows(name, args[0]._layout, args[1]._layout, 1)


@handles(*_functions("send recv isend irecv"))
def between_two(func: Any, args: tuple, kwargs: dict) -> Any:
    """From one rank to another, which holds the same part."""
    group, name = kwargs.get("group"), func.__name__
    if dist.get_rank(group) >= 0:
        end = "dst" if name.endswith("send") else "src"
        peer, in_group = kwargs.get(end), kwargs.get(f"group_{end}")
        if peer is None and in_group is not None:
            peer = dist.get_global_rank(group or dist.group.WORLD, in_group)
        if peer is not None:  # else from anybody, who has checked it
            State.core.check_local_collective(name, args[0]._layout, sorted({dist.get_rank(), peer}))
    return _on_local(func, args, kwargs)


def _on_local(func: Any, args: tuple, kwargs: dict) -> Any:
    with no_dispatch():
        result = func(*args, **kwargs)
    for x in _dtensors([*args, *kwargs.values()]):
        # Tensors computed from earlier values.
        x.__dict__.pop("_cached", None)
        x._gathered = None
    return result
