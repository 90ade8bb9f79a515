"""Functions of `hyper_parallel.checkpoint` with the names and keywords of ``torch.distributed.checkpoint``.

They work on both frameworks, and the files are those of `hyper_parallel.checkpoint.save`.
"""

from __future__ import annotations

import os
from typing import Any, Protocol, runtime_checkable

from hyper_parallel import checkpoint
from hyper_parallel.checkpoint.errors import CheckpointError
from hyper_parallel.checkpoint.saving import AsyncSave
from hyper_parallel.core.mesh.device_mesh import DeviceMesh

__all__ = ["CheckpointException", "Stateful", "async_save", "load", "save"]

#: The error of a failed save or load, under torch's name.
CheckpointException = CheckpointError


@runtime_checkable
class Stateful(Protocol):
    """Object with a state of its own that a state dict may contain, next to tensors and values.

    Mirrors ``torch.distributed.checkpoint.stateful.Stateful``.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from the saved state."""
        ...


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: None = None,
    planner: None = None,
    process_group: DeviceMesh | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> os.PathLike[str]:
    """Save with `hyper_parallel.checkpoint.save`, and replace an existing checkpoint.

    Args:
        state_dict: the state to save.
        checkpoint_id: path of the checkpoint.
        storage_writer: must be None.
        planner: must be None.
        process_group: mesh of the ranks that save; None stands for all ranks of the world.
        no_dist: must be False: the ranks that save are given by a mesh.
        use_collectives: must be True; `async_save` uses no collectives while it writes.

    Returns:
        The path. Torch returns its metadata here.

    Raises:
        TypeError, ValueError, CheckpointError: as `hyper_parallel.checkpoint.save` raises; ValueError for an
            unsupported argument.

    Example:
        >>> import tempfile, torch
        >>> from hyper_parallel.checkpoint import distributed as dcp
        >>> state = {"weight": torch.ones(2), "step": 3}
        >>> path = dcp.save(state, checkpoint_id=f"{tempfile.mkdtemp()}/3")
        >>> other = {"weight": torch.zeros(2), "step": 0}
        >>> dcp.load(other, checkpoint_id=path)
        >>> other
        {'weight': tensor([1., 1.]), 'step': 3}

    Mirrors ``torch.distributed.checkpoint.save``.
    """
    path = _path(checkpoint_id, storage_writer=storage_writer, planner=planner)
    _only("save", no_dist=(no_dist, False), use_collectives=(use_collectives, True))
    return checkpoint.save(state_dict, path, overwrite=True, mesh=_mesh(process_group))


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: None = None,
    planner: None = None,
    process_group: DeviceMesh | None = None,
    async_checkpointer_type: Any = None,
    async_stager: None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> AsyncSave:
    """Save with `hyper_parallel.checkpoint.async_save`, and replace an existing checkpoint.

    It needs no CPU process group.

    Args:
        state_dict: the state to save.
        checkpoint_id: path of the checkpoint.
        storage_writer: must be None.
        planner: must be None.
        process_group: as in `save`.
        async_checkpointer_type: None or torch's ``AsyncCheckpointerType.THREAD``: a thread writes.
        async_stager: must be None: all data is copied into host memory.
        no_dist: must be False.
        use_collectives: must be True.

    Raises:
        TypeError, ValueError, CheckpointError: as `save` raises.

    Example:
        >>> import tempfile, torch
        >>> from hyper_parallel.checkpoint import distributed as dcp
        >>> under_way = dcp.async_save({"weight": torch.ones(2)}, checkpoint_id=f"{tempfile.mkdtemp()}/1")
        >>> under_way.result().name
        '1'

    Mirrors ``torch.distributed.checkpoint.async_save``.
    """
    path = _path(checkpoint_id, storage_writer=storage_writer, planner=planner, async_stager=async_stager)
    kind = getattr(async_checkpointer_type, "value", async_checkpointer_type) or "thread"
    _only(
        "async_save",
        async_checkpointer_type=(kind, "thread"),
        no_dist=(no_dist, False),
        use_collectives=(use_collectives, True),
    )
    return checkpoint.async_save(state_dict, path, overwrite=True, mesh=_mesh(process_group))


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: None = None,
    planner: None = None,
    process_group: DeviceMesh | None = None,
    no_dist: bool = False,
) -> None:
    """Load with `hyper_parallel.checkpoint.load`, and put the returned values into ``state_dict``.

    Args:
        state_dict: the state to fill.
        checkpoint_id: path of the checkpoint.
        storage_reader: must be None.
        planner: must be None.
        process_group: as in `save`.
        no_dist: must be False.

    Raises:
        TypeError, ValueError, CheckpointError: as `hyper_parallel.checkpoint.load` raises; ValueError for an
            unsupported argument.

    Example: see `save`.

    Mirrors ``torch.distributed.checkpoint.load``.
    """
    path = _path(checkpoint_id, storage_reader=storage_reader, planner=planner)
    _only("load", no_dist=(no_dist, False))
    _put(state_dict, checkpoint.load(state_dict, path, mesh=_mesh(process_group)))


def _path(checkpoint_id: Any, **others: Any) -> str:
    if given := [name for name, value in others.items() if value is not None]:
        raise ValueError(
            f"{', '.join(given)}: checkpoints of hyper_parallel have one storage format and take no storage or planner "
            "objects of torch. Pass checkpoint_id, a path, or use torch.distributed.checkpoint, which saves these "
            "DTensors too"
        )
    if checkpoint_id is None:
        raise ValueError("checkpoint_id is missing: pass the path of the checkpoint")
    return os.fspath(checkpoint_id)


def _only(what: str, **taken: tuple[Any, Any]) -> None:
    for name, (value, known) in taken.items():
        if value != known:
            raise ValueError(
                f"{what}({name}={value!r}) is not supported: pass {known!r}. See the documentation of {what}"
            )


def _mesh(process_group: Any) -> DeviceMesh | None:
    if process_group is None or isinstance(process_group, DeviceMesh):
        return process_group
    raise ValueError(
        f"process_group is a {type(process_group).__name__}: pass a DeviceMesh of the ranks of the group, or None for "
        "all ranks"
    )


def _put(state: Any, loaded: Any) -> None:
    """Replace values in containers by the loaded values."""
    for key in range(len(state)) if isinstance(state, list) else [*state]:
        if isinstance(state[key], (dict, list)) and type(state[key]) is type(loaded[key]):
            _put(state[key], loaded[key])
        else:
            state[key] = loaded[key]
