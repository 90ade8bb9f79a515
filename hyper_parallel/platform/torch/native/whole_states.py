"""Full state dicts of torch.distributed.checkpoint, and DTensors.

With ``full_state_dict=True``, torch gathers tensors for a save and distributes loaded tensors, but only torch's own
DTensors. This module does the same for DTensors of this library. A loaded tensor gets the present placements of the
parameter, or of its optimizer state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.platform.torch.basics.tensor import is_dtensor, wrap
from hyper_parallel.platform.torch.native.checkpoints import part_of_whole

__all__ = ["broadcast_into", "distribute_into", "gather_first", "place_what_came"]

#: Bytes of an element -> integer dtype of that size, whose sums compare tensors that may have NaNs.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
#: The shape that rank 0 sends in place of a DTensor.
_NOT_WHOLE = (0,) * 9


# ---------------------------------------------------------------------------------------------- saved
def gather_first(original: Callable, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the function that gathers state with ``full_state_dict=True``, in ``get_model_state_dict`` and
    ``get_optimizer_state_dict``. Torch's function knows only torch's own DTensors, so DTensors of this library are
    gathered before it."""
    on_cpu, only = bool(kwargs.get("cpu_offload")), kwargs.get("ranks_only") or ()
    keep = not only or dist.get_rank(kwargs.get("pg")) in only
    return original(_whole(state_dict, on_cpu, keep), *args, **kwargs)


def _whole(x: Any, on_cpu: bool, keep: bool) -> Any:
    """Replace DTensors by full plain tensors, or by empty tensors on ranks that do not keep the values."""
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


# ---------------------------------------------------------------------------------------------- loaded
def distribute_into(
    original: Callable, full_state_dict: Any, local_state_dict: Any, device: Any, *args: Any, **kwargs: Any
) -> None:
    """Replace torch's function that overwrites the present tensors with full tensors, which every rank passes.
    ``set_optimizer_state_dict`` and ``set_model_state_dict`` with ``full_state_dict=True`` call it.

    Raises:
        ValueError: on all ranks of the mesh, if their tensors differ, or a tensor has another shape.
    """
    held = {name: x for name, x in local_state_dict.items() if is_dtensor(x)}
    given = {name: full_state_dict[name] for name in held if isinstance(full_state_dict.get(name), Tensor)}
    _require_same(full_state_dict, held)
    _require_shapes(held, given)
    original({k: x for k, x in full_state_dict.items() if k not in given}, local_state_dict, device, *args, **kwargs)
    for name, whole in given.items():
        local_state_dict[name] = _placed(held[name], whole, device)


def broadcast_into(
    original: Callable, full_state_dict: Any, local_state_dict: Any, device: Any, *args: Any, **kwargs: Any
) -> None:
    """Copy the first rank's full tensors into the tensors of all ranks, for ``broadcast_from_rank0=True``.

    This replaces torch's function of the same purpose.

    Raises:
        ValueError: on all ranks, if the first rank passes DTensors, or a tensor has another shape.
    """
    held = {name: x for name, x in local_state_dict.items() if is_dtensor(x)}
    # Rank 0 alone knows the values that it passes, and must not be the only one to raise.
    sent = {k: torch.empty(_NOT_WHOLE) if is_dtensor(x) else x for k, x in full_state_dict.items()}
    original(sent, local_state_dict, device, *args, **kwargs)
    # 0-d tensors are sent with the names, and not through `place_what_came`.
    _place(local_state_dict, held, device)


def place_what_came(
    original: Callable, full_state_dict: Any, local_state_dict: Any, keys: Any, device: Any, *args: Any, **kwargs: Any
) -> None:
    """Broadcast and shard a few tensors, in place of torch's own function. So only a few tensors are unsharded at a
    time."""
    held = {name: x for name in keys if is_dtensor(x := local_state_dict.get(name))}
    original(full_state_dict, local_state_dict, keys, device, *args, **kwargs)
    _place(local_state_dict, held, device)


def _place(state: Any, held: Mapping[str, Any], device: Any) -> None:
    came = {name: x for name in held if isinstance(x := state.get(name), Tensor) and not is_dtensor(x)}
    _require_shapes(held, came)
    for name, whole in came.items():
        state[name] = _placed(held[name], whole, device)


def _placed(held: Any, whole: Tensor, device: Any) -> Any:
    return wrap(part_of_whole(whole, held._layout, device), held._layout)


# ---------------------------------------------------------------------------------------------- refusals
def _require_plain(wrong: Sequence[str]) -> None:
    if wrong:
        raise ValueError(
            f"full_state_dict=True needs full plain tensors, but these are DTensors: {list(wrong)}. Load the state "
            "dict without full_state_dict, or pass the result of get_optimizer_state_dict with full_state_dict=True"
        )


def _require_shapes(held: Mapping[str, Any], given: Mapping[str, Tensor]) -> None:
    _require_plain([name for name, x in given.items() if is_dtensor(x) or tuple(x.shape) == _NOT_WHOLE])
    wrong = [
        f"{name} has shape {tuple(held[name].shape)} in the optimizer and {tuple(x.shape)} in the state dict"
        for name, x in given.items()
        if tuple(x.shape) != tuple(held[name].shape)
    ]
    if wrong:
        raise ValueError(f"the state dict does not fit: {'; '.join(wrong)}")


def _require_same(state: Mapping[str, Any], held: Mapping[str, Any]) -> None:
    """Check that all ranks of the meshes pass equal values. Each rank will keep only its shard."""
    lines: dict[tuple[int, ...], tuple[Any, int]] = {}
    for mesh in dict.fromkeys(x._layout.mesh for x in held.values()):
        if mesh.get_coordinate() is not None:
            for dim in range(mesh.ndim):
                lines.setdefault(tuple(mesh.ranks_along(dim)), (mesh, dim))
    facts = hashlib.sha256()
    for name in sorted(state):
        facts.update(f"{name} {_described(state[name])}\n".encode())
    said = {facts.hexdigest()}
    for mesh, dim in lines.values():
        if mesh.shape[dim] > 1:
            said = set().union(*mesh.platform.all_gather_object(said, mesh.platform_group(dim), mesh.shape[dim]))
    if len(said) > 1:
        raise ValueError(
            "full_state_dict=True needs the same full state dict on every rank, but the ranks passed different state "
            f"dicts (this rank: {len(state)} entries). If only rank 0 has the state dict, set "
            "broadcast_from_rank0=True too"
        )


def _described(x: Any) -> str:
    """Return a text that differs if values differ between ranks. For a tensor it has the sum of its bits as
    integers."""
    if not isinstance(x, Tensor):
        return repr(x) if isinstance(x, (bool, int, float, str, tuple, list, type(None))) else type(x).__name__
    if is_dtensor(x) or x.is_meta:
        return f"{tuple(x.shape)} {x.dtype}"
    bits = x.detach().contiguous().reshape(-1).view(_BITS.get(x.element_size(), torch.int64))
    return f"{tuple(x.shape)} {x.dtype} {int(bits.sum())}"
