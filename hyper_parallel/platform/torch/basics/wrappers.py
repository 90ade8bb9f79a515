"""Wrappers of models that issue collectives themselves: correct on distributed parameters, or rejected.

torch calls a hook whenever a module gets a submodule. Wrappers register the given model as their submodule, before they
communicate. The check in this hook replaces no part of torch. The check also covers code that uses a wrapper:
``Accelerator.prepare`` and ``Trainer`` of Hugging Face, `torch.distributed._composable.replicate`. `fully_shard` does
not wrap: see `fully_sharded`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import nn

from hyper_parallel.platform.torch.basics.tensor import State, layout_of

__all__ = ["refuse_flat_parameter", "watch_wrappers"]


def watch_wrappers(hooks: Any) -> Any:
    """Return a hook for torch's registration of submodules, which checks every model that a wrapper takes."""
    return _check


def _check(wrapper: nn.Module, name: str, model: Any) -> None:
    if name == "module":
        if isinstance(wrapper, nn.parallel.DistributedDataParallel):
            _check_data_parallel(wrapper, model)
        elif isinstance(wrapper, nn.DataParallel):
            _check_replicas(model)


def _check_data_parallel(wrapper: Any, model: Any) -> None:
    """Check that DistributedDataParallel does not average gradients of different shards.

    Raises:
        ValueError: on all ranks of the wrapper's process group, before they communicate.
    """
    ranks = dist.get_process_group_ranks(wrapper.process_group)
    for path, x in (*model.named_parameters(), *model.named_buffers()):
        layout = layout_of(x)
        if layout is None or path in wrapper.parameters_to_ignore:
            continue
        try:
            State.core.check_local_collective("an average of gradients", layout, ranks)
        except ValueError as error:
            raise ValueError(
                f"DistributedDataParallel over ranks {ranks} would average {path!r} over ranks with different shards "
                "of it. Pass the data-parallel dimension, DistributedDataParallel(model, "
                "process_group=mesh['dp'].get_group()), or device_mesh=mesh['dp'].to_torch(), with mesh = "
                "init_device_mesh(..., mesh_dim_names=('dp', 'tp')). Without data parallelism, leave "
                "DistributedDataParallel out. Accelerator.prepare and Trainer of Hugging Face wrap the model over all "
                f"ranks: do not pass a parallelised model to them. ({error})"
            ) from None


def _check_replicas(model: Any) -> None:
    """Check that DataParallel does not copy distributed parameters: its replicas would ignore the shards of other
    ranks.

    Raises:
        ValueError: when a parameter is distributed.
    """
    for path, x in model.named_parameters():
        if layout_of(x) is not None:
            raise ValueError(
                f"DataParallel cannot copy the distributed {path!r} to other devices of one process: start one "
                "process for each device, and use DistributedDataParallel over the data-parallel dimension of the mesh"
            )


def _is_flat(x: Any) -> bool:
    """Raise TypeError, because FSDP would flatten and shard the DTensor ``x``.

    Return False if the caller is FSDP's function that collects the names of parameters for state dicts.
    """
    asking = sys._getframe(2)  # the frame behind the isinstance of a metaclass
    if asking.f_code.co_name == "module_fn" and asking.f_globals["__name__"] == "torch.distributed.fsdp._common_utils":
        return False
    return _refuse_flat(x)


def _refuse_flat(x: Any, value: Any = None) -> Any:
    raise TypeError(
        "FullyShardedDataParallel would flatten and shard parameters that are sharded already: use "
        "DistributedDataParallel(model, process_group=mesh['dp'].get_group()) with a mesh of two dimensions"
    )


#: Property of the DTensor class that FSDP reads to find parameters that it has made. FSDP reads it before it flattens
#: and shards the parameters.
refuse_flat_parameter = property(_is_flat, _refuse_flat)
