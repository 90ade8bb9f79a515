"""torch.distributed.checkpoint and DTensors.

Torch's planners call methods of a tensor, which return the parts that this rank writes and reads. These parts are the
rectangles of the full tensor that the rank holds. A packed shard has several rectangles.
``load_state_dict(assign=True)`` turns full tensors into DTensors. Full state dicts are handled in `whole_states`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.torch.basics.tensor import State, is_dtensor, wrap
from hyper_parallel.platform.torch.native.native_dtensors import from_native, is_native

__all__ = [
    "PROTOCOL",
    "assign_distributed",
    "finds_distributed",
    "offload_local",
    "part_of_whole",
    "refuse_parts_in_one_file",
    "write_chunks_apart",
]


def finds_distributed(original: Callable[[Any], bool], module: Any) -> bool:
    """Replace the function that reports whether a module has parameters that are torch's DTensors."""
    return original(module) or (isinstance(module, nn.Module) and any(map(is_dtensor, module.parameters())))


# ---------------------------------------------------------------------------------------------- the part of a rank
def _rectangles(x: Any) -> list[tuple[torch.Size, torch.Size, tuple[slice, ...]]]:
    """Return (offsets, sizes, slices of the local tensor) for the rectangles of a DTensor that this rank holds."""
    layout = x._layout
    if any(p.is_partial() for p in layout.placements):
        raise TypeError(
            f"torch.distributed.checkpoint cannot save or load a DTensor placed {list(layout.placements)}, a partial "
            "tensor: redistribute it to Replicate() or Shard(dim) first"
        )
    shape = tuple(layout.shape)
    if not math.prod(shape):  # no rank holds an element, but the checkpoint must list the tensor
        return [(torch.Size([0] * len(shape)), torch.Size(shape), (slice(None),) * len(shape))]
    return [
        (torch.Size(r.offsets), torch.Size(r.sizes), tuple(map(_slice, r.local_offsets, r.sizes)))
        for r in State.core.held_rectangles(layout)
    ]


def _slice(start: int, length: int) -> slice:
    return slice(start, start + length)


def _local(x: Any) -> Tensor:
    """Return the local tensor: plain, with the memory and version counter of ``x``."""
    with no_dispatch():
        return x.detach().as_subclass(Tensor)


def _create_write_items(x: Any, fqn: str, _: Any) -> list[Any]:
    metadata = importlib.import_module("torch.distributed.checkpoint.metadata")
    planner = importlib.import_module("torch.distributed.checkpoint.planner")
    properties, size = metadata.TensorProperties.create_from_tensor(_local(x)), torch.Size(x._layout.shape)
    return [
        planner.WriteItem(
            index=metadata.MetadataIndex(fqn, offsets, number),
            type=planner.WriteItemType.SHARD,
            tensor_data=planner.TensorWriteData(metadata.ChunkStorageMetadata(offsets, sizes), properties, size),
        )
        for number, (offsets, sizes, _) in enumerate(_rectangles(x))
    ]


def _create_chunk_list(x: Any) -> list[Any]:
    metadata = importlib.import_module("torch.distributed.checkpoint.metadata")
    return [metadata.ChunkStorageMetadata(offsets, sizes) for offsets, sizes, _ in _rectangles(x)]


def _get_tensor_shard(x: Any, index: Any) -> Tensor:
    held = _rectangles(x)
    for offsets, _, place in held:
        if offsets == index.offset or (index.offset is None and len(held) == 1):
            return _local(x)[place]
    raise ValueError(
        f"this rank has no shard of {index.fqn!r} at offset {index.offset}. The tensor of shape "
        f"{tuple(x._layout.shape)} is placed {list(x._layout.placements)}, and this rank's shards have the offsets "
        f"{[tuple(offsets) for offsets, _, _ in held]}"
    )


#: Methods of the DTensor class, which torch checks for first. `CheckpointableTensor` of torch 2.14 and later is for
#: plain local tensors: its attributes would make torch split a DTensor like a plain one.
PROTOCOL = {
    "__create_write_items__": _create_write_items,
    "__create_chunk_list__": _create_chunk_list,
    "__get_tensor_shard__": _get_tensor_shard,
}


# ---------------------------------------------------------------------------------------------- async_save
def offload_local(original: Callable, stager: Any, x: Any, memo: Any, non_blocking: bool = False) -> Any:
    """Replace the method by which ``async_save`` copies a tensor to the host. The copy of a DTensor is a DTensor over a
    copy of its local tensor."""
    if not is_dtensor(x):
        return original(stager, x, memo, non_blocking=non_blocking)
    local = _local(x)
    if local.numel() and not local.is_meta:
        local = original(stager, local, memo, non_blocking=non_blocking)
    memo[id(x)] = staged = wrap(local, x._layout)
    return staged


# ---------------------------------------------------------------------------------------------- its Hugging Face writer
def refuse_parts_in_one_file(original: Callable, writer: Any, plans: Any) -> Any:
    """Replace the method that gets the planned writes of all ranks.

    Without ``save_distributed``, all ranks would write files of the same name.

    Raises:
        ValueError: when tensors are sharded. Torch raises it on all ranks.
    """
    if not writer.save_distributed and len(plans) > 1:
        for item in (item for plan in plans for item in plan.items):
            data = item.tensor_data
            if data is not None and data.chunk.sizes != data.size:
                raise ValueError(
                    f"HuggingFaceStorageWriter writes one file for all ranks, but {item.index.fqn!r} of shape "
                    f"{tuple(data.size)} is sharded: pass save_distributed=True to the writer, with "
                    "enable_consolidation=True for files of full tensors"
                )
    return original(writer, plans)


def write_chunks_apart(original: Callable, writer: Any, plan: Any, planner: Any) -> Any:
    """Replace the method that writes a rank's data, which allows one entry per tensor in a file. So the rectangles of a
    packed tensor go into several files."""
    rounds: list[list[Any]] = []
    count: dict[str, int] = {}
    for item in plan.items:
        number = count[item.index.fqn] = count.get(item.index.fqn, -1) + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(item)
    own = (plan.storage_data or {}).get("shard_index")
    if len(rounds) < 2 or own is None:
        return original(writer, plan, planner)
    size = dist.get_world_size() if dist.is_initialized() else 1
    written: list[Any] = []
    for number, items in enumerate(rounds):
        # Numbers of files that no other rank uses: other ranks use 1 to the number of ranks.
        data = {**plan.storage_data, "shard_index": own + number * size}
        written += original(writer, replace(plan, items=items, storage_data=data), planner).wait()
    done: Any = torch.futures.Future()
    done.set_result(written)
    return done


# ---------------------------------------------------------------------------------------------- assign=True
def assign_distributed(original: Callable, module: Any, state_dict: Any, prefix: str, metadata: Any, *args: Any) -> Any:
    """Replace ``Module._load_from_state_dict``, which with ``assign=True`` assigns the tensors of the state dict to the
    module. In place of a DTensor, the module gets a DTensor with the same placements, even from a full tensor.

    Raises:
        ValueError: for a DTensor on another mesh, on all its ranks.
    """
    if metadata.get("assign_to_params_buffers"):
        for name, held in [*module._parameters.items(), *module._buffers.items()]:
            given = state_dict.get(prefix + name)
            if is_dtensor(held) and isinstance(given, Tensor) and tuple(given.shape) == tuple(held.shape):
                state_dict[prefix + name] = _placed_as(held, given, prefix + name)
    return original(module, state_dict, prefix, metadata, *args)


def _placed_as(held: Any, given: Any, name: str) -> Any:
    layout = held._layout
    with torch.no_grad():
        if is_native(given):
            given = from_native(given)
        if is_dtensor(given):
            if given._layout is layout:
                return given
            if given._layout.mesh is not layout.mesh:
                raise ValueError(
                    f"load_state_dict(assign=True): {name!r} is on {layout.mesh} in the module, but on "
                    f"{given._layout.mesh} in the state dict. Load with assign=False, and call to_empty() first for a "
                    "module on the meta device. Or use full tensors, x.full_tensor(), in the state dict"
                )
            return given.redistribute(placements=layout.placements).detach()
        local = part_of_whole(given, layout, given.device)
    return wrap(local.requires_grad_(held.requires_grad), layout)


def part_of_whole(whole: Tensor, layout: Any, device: Any) -> Tensor:
    """Return this rank's shard of a full plain tensor as a new tensor on ``device``; no communication."""
    local = torch.empty(tuple(layout.local_shape), dtype=whole.dtype, device=device)
    for r in State.core.held_rectangles(layout):
        place = tuple(map(_slice, r.local_offsets, r.sizes))
        local[place].copy_(whole.detach()[tuple(map(_slice, r.offsets, r.sizes))])
    return local
