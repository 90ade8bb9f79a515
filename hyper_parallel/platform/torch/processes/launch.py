"""Initialisation of a world started by torchrun or msrun. Without a launcher the world has one rank."""

from __future__ import annotations

import atexit
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from hyper_parallel.platform.launch_variables import number_in, rank_and_size

__all__ = [
    "BACKEND_VARIABLE",
    "Launch",
    "chosen_backend",
    "destroy_process_group",
    "init_process_group",
    "read_environment",
]

#: Environment variable with a backend of `torch.distributed` that replaces the platform's own.
BACKEND_VARIABLE = "HYPER_PARALLEL_TORCH_BACKEND"


@dataclass(frozen=True)
class Launch:
    """Launcher's description of this process.

    Attributes:
        rank, world_size, local_rank: rank of this process, number of ranks, and its index on the node.
        init_method: how `torch.distributed` finds the other ranks; None without a launcher.
    """

    rank: int
    world_size: int
    local_rank: int
    init_method: str | None


def read_environment(environ: Mapping[str, str] = os.environ) -> Launch:
    """Read the launcher's variables.

    torchrun sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``; msrun sets ``RANK_ID``
    (or ``MS_NODE_ID``), ``MS_WORKER_NUM``, ``DEVICE_ID``, ``MS_SCHED_HOST`` and ``MS_SCHED_PORT``. msrun's scheduler
    listens on ``MS_SCHED_PORT``, so the ranks meet on the next port.

    Raises:
        RuntimeError: when only a part of torchrun's variables is set.
        ValueError: when one of them is no number that a launcher sets.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        missing = [v for v in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if v not in environ]
        if missing:
            raise RuntimeError(
                f"the environment has torchrun's RANK or WORLD_SIZE but not {', '.join(missing)}: start the program "
                "with torchrun, set all these variables, or unset all to run on one rank"
            )
        rank, size = rank_and_size(environ, "RANK", "WORLD_SIZE")
        # Through env://, because torchrun's agent already listens on the port.
        return Launch(rank, size, number_in(environ, "LOCAL_RANK", rank), "env://")
    if environ.get("MS_ROLE") == "MS_WORKER" and "MS_WORKER_NUM" in environ:
        rank, size = rank_and_size(environ, "RANK_ID" if "RANK_ID" in environ else "MS_NODE_ID", "MS_WORKER_NUM", 0)
        host, port = environ.get("MS_SCHED_HOST", "127.0.0.1"), number_in(environ, "MS_SCHED_PORT", 8118) + 1
        return Launch(rank, size, number_in(environ, "DEVICE_ID", rank), f"tcp://{host}:{port}")
    return Launch(0, 1, 0, None)


def chosen_backend(default: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the backend of `torch.distributed` that ``HYPER_PARALLEL_TORCH_BACKEND`` names, else ``default``.

    With ``gloo`` several ranks can share one GPU, which nccl rejects; gloo then copies the tensors through the host.

    Raises:
        ValueError: when this torch has no such backend.

    Example:
        >>> chosen_backend("nccl", {"HYPER_PARALLEL_TORCH_BACKEND": "gloo"})
        'gloo'
    """
    chosen = environ.get(BACKEND_VARIABLE, "").strip().lower()
    if chosen and not dist.is_backend_available(chosen):
        raise ValueError(
            f"{BACKEND_VARIABLE}={chosen}: this torch does not have this backend of torch.distributed. Leave the "
            f"variable out for {default!r}, or name another backend such as 'gloo'"
        )
    return chosen or default


def init_process_group(backend: str, select_device: Callable[[int], None], timeout: float | None) -> None:
    """Initialise the default process group with ``backend`` from the environment; see `read_environment`.

    ``timeout`` is in seconds; None is torch's default: 10 minutes with NCCL, else 30 minutes.
    """
    launch = read_environment()
    # Any optimizer of torch imports this module. Its functions store the default group at import as a default argument,
    # beyond the group's end. Imported before there is a group, they store none.
    importlib.import_module("torch.distributed.nn.functional")
    select_device(launch.local_rank)
    wait = None if timeout is None else timedelta(seconds=timeout)
    rank, size = launch.rank, launch.world_size
    if launch.init_method is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=wait)
    else:
        dist.init_process_group(backend, init_method=launch.init_method, rank=rank, world_size=size, timeout=wait)
    # A program that ends with its gloo groups alive aborts now and then, "terminate called without an active exception"
    # (seen in 2 of about 50 runs): a user who did not make the group will not think of destroying it.
    atexit.unregister(_destroy_gloo_at_exit)
    atexit.register(_destroy_gloo_at_exit)


def _destroy_gloo_at_exit() -> None:
    # Not with NCCL and HCCL, where this may wait for lost ranks.
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def destroy_process_group() -> None:
    """Destroy all process groups, including the default group, and remove torch's hook for uncaught exceptions.

    At each initialisation torch wraps ``sys.excepthook`` once more, and it never restores the hook.
    """
    dist.destroy_process_group()
    hook = sys.excepthook
    if getattr(hook, "__module__", "") == dist.distributed_c10d.__name__:
        sys.excepthook = inspect.getclosurevars(hook).nonlocals.get("old_hook", hook)
