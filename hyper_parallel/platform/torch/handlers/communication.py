"""Functions of `torch.distributed` on DTensors: they act on the local storage of a DTensor.

Each function asks its tensors for ``__torch_function__``. So every call arrives here, even if the program imported the
function by name. If only the results are DTensors, torch does not ask, and C++ fills the local storage.
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
#: Collectives that do not combine the tensors of different ranks. Every rank gets all results.
_GATHERING = frozenset(words("all_gather all_gather_coalesced all_gather_single all_to_all all_to_all_single"))
#: Collectives in which each rank gets a different result.
_PARTING = frozenset(words("reduce scatter reduce_scatter reduce_scatter_single all_to_all all_to_all_single"))
#: Functions with one large and one small tensor -> the index of the large argument.
_OF_ROWS = {"all_gather_single": 0, "reduce_scatter_single": 1}
#: Functions that write their first argument and read the second one.
_INTO_FIRST = frozenset({*_GATHERING, "reduce_scatter", "reduce_scatter_single"})


def _functions(names: str) -> list[Any]:
    """Return the functions of `torch.distributed` with these names, as torch passes them to handlers.

    The functions come from the modules that define them, because a program may have replaced names in
    `torch.distributed`. None stands for a name that this version of torch lacks.
    """
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
    """Run a collective on local tensors, if all its ranks hold the same shard of each DTensor."""
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
    """Check that joining or splitting local tensors along dimension 0 also joins or splits the global tensors."""
    if name in _OF_ROWS:
        large = _OF_ROWS[name]
        State.core.check_rows(name, args[large]._layout, args[1 - large]._layout, count)
    elif name == "all_to_all_single":
        State.core.check_rows(name, args[0]._layout, args[1]._layout, 1)


@handles(*_functions("send recv isend irecv"))
def between_two(func: Any, args: tuple, kwargs: dict) -> Any:
    """Send from one rank to another that holds the same shard."""
    group, name = kwargs.get("group"), func.__name__
    if dist.get_rank(group) >= 0:
        end = "dst" if name.endswith("send") else "src"
        peer, in_group = kwargs.get(end), kwargs.get(f"group_{end}")
        if peer is None and in_group is not None:
            peer = dist.get_global_rank(group or dist.group.WORLD, in_group)
        if peer is not None:  # any rank may be the sender, which has checked the call
            State.core.check_local_collective(name, args[0]._layout, sorted({dist.get_rank(), peer}))
    return _on_local(func, args, kwargs)


def _on_local(func: Any, args: tuple, kwargs: dict) -> Any:
    with no_dispatch():
        result = func(*args, **kwargs)
        for x in _dtensors([*args, *kwargs.values()]):
            State.core.forget_history(x)  # which was that of earlier values
    return result
