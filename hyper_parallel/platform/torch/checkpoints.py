"""torch.distributed.checkpoint and DTensors.

Its functions for whole state dicts gather DTensors as they gather torch's own. What it writes and reads by shards it
takes from methods of the tensor, which refuse: without them it would take a DTensor for a plain tensor of the global
shape and keep one rank's shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.platform.torch.tensor import is_dtensor

__all__ = ["REFUSALS", "gather_first"]


def _refuse(x: Any, *args: Any) -> Any:
    raise TypeError(
        f"torch.distributed.checkpoint cannot save or load a DTensor of shape {tuple(x.shape)} placed "
        f"{list(x.placements)}. Whole tensors: save what "
        "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True)) gives, or value.full_tensor() of each entry, which all ranks "
        "must call; to load, read that into plain tensors and call model.load_state_dict. Shards: torch.save and "
        "torch.load of model.state_dict(), one file a rank"
    )


#: Methods for the class of DTensors. The planners of torch.distributed.checkpoint call them on every rank before they
#: write or read.
REFUSALS = dict.fromkeys(("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"), _refuse)


def gather_first(original: Callable, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands for the function that ``get_model_state_dict`` and ``get_optimizer_state_dict`` with
    ``full_state_dict=True`` go through, and which asks for torch's own class: it gets DTensors gathered."""
    on_cpu, only = bool(kwargs.get("cpu_offload")), kwargs.get("ranks_only") or ()
    keep = not only or dist.get_rank(kwargs.get("pg")) in only
    return original(_whole(state_dict, on_cpu, keep), *args, **kwargs)


def _whole(x: Any, on_cpu: bool, keep: bool) -> Any:
    """The same with whole plain tensors in place of DTensors; without content where they are not kept."""
    if is_dtensor(x):
        with torch.no_grad():
            full = x.full_tensor()
        if not keep:
            return full.new_empty(0)
        return full.cpu() if on_cpu else full
    if isinstance(x, dict):
        return {name: _whole(value, on_cpu, keep) for name, value in x.items()}
    if type(x) in (list, tuple):
        return type(x)(_whole(value, on_cpu, keep) for value in x)
    return x
