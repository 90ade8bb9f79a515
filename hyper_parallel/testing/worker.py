"""A worker process of `hyper_parallel.testing.pool`."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import torch_groups

#: Seconds that a collective waits for late ranks. The pool notices hanging ranks sooner.
TIMEOUT = 1800.0


@dataclass(frozen=True)
class Settings:
    """Settings of a worker. With None for ``platform`` the worker has no framework and no process group. The worker
    calls ``first`` before anything else."""

    platform: str | None
    rank: int
    size: int
    port: int
    log: str
    first: str | None = None


@dataclass(frozen=True)
class Failure:
    """The failure of a job on one rank.

    Attributes:
        place: exception type and source line. All ranks have the same place if they failed in step.
        text: full description for people.
    """

    place: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the description of a caught exception."""
        frames = traceback.extract_tb(error.__traceback__)
        text = "".join(traceback.format_exception(error))
        return cls(f"{type(error).__name__} {frames[-1].filename}:{frames[-1].lineno}", text)


def serve(settings: Settings, connection: Connection) -> None:
    """Join the process group, then run jobs until the pool closes its end of the connection."""
    log = os.open(settings.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log, all_threads=False)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest handles Ctrl-C, and then closes the pool
    try:
        spmd.rank = settings.rank
        if settings.first is not None:
            _resolve(settings.first)()
        _join(settings)
        connection.send(None)
        while True:
            _answer(connection, connection.recv_bytes())
    except (EOFError, BrokenPipeError):
        pass
    except BaseException as error:
        connection.send(Failure.of(error))
    # multiprocessing exits through os._exit now: otherwise gloo would abort in the destructors of open groups.


def _leave_with_parent() -> None:
    """Exit when pytest was killed, even while this process waits in a collective."""
    if (parent := multiprocessing.parent_process()) is not None:
        wait([parent.sentinel])
    os._exit(1)


def _join(settings: Settings) -> None:
    """Set the variables that a launcher such as torchrun sets, and start the platform as a program would."""
    os.environ.update(
        RANK=str(settings.rank),
        LOCAL_RANK=str(settings.rank),
        WORLD_SIZE=str(settings.size),
        LOCAL_WORLD_SIZE=str(settings.size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(settings.port),
    )
    if settings.platform is not None:
        os.environ["HYPER_PARALLEL_PLATFORM"] = settings.platform
        stay_on_one_core(settings.platform, settings.rank)
        store = None
        if settings.platform.startswith("torch-"):
            torch_groups.share_one_device()
            store = torch_groups.serve_on_loopback(settings.port, settings.size) if settings.rank == 0 else None
        from hyper_parallel.platform import get_platform

        get_platform().init_process_group(timeout=TIMEOUT)
        del store  # torch holds the store now


def stay_on_one_core(platform: str | None, rank: int) -> None:
    """Keep this process of MindSpore on one core, if ``OMP_NUM_THREADS`` asks for one thread.

    MindSpore does not read the variable. On several cores its threads spin while they wait for work. The waiting
    threads take as much time as the rank itself: 3.5 s of processor time, compared with 1.4 s on one core (2026-11-30).
    """
    if platform == "mindspore" and os.environ.get("OMP_NUM_THREADS") == "1" and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def _answer(connection: Connection, task: bytes) -> None:
    """Run one job and send its result or its failure."""
    try:
        name, spmd.world_size, args = pickle.loads(task)
        outcome: Any = _resolve(name)(*args)
    except BaseException as error:
        outcome = Failure.of(error)
    try:
        connection.send(outcome)
    except BrokenPipeError:
        raise
    except Exception as error:  # the result of the job cannot be pickled
        connection.send(Failure.of(error))


def _leave_to_itself() -> None:
    """Exclude all present objects from garbage collection.

    Modules stay alive anyway, and each collection would traverse their hundreds of thousands of objects.
    """
    from hyper_parallel.core.weak_table import collect_garbage

    collect_garbage()  # the rest is frozen
    gc.freeze()


def _resolve(name: str) -> Any:
    module, _, path = name.partition(":")
    is_new = module not in sys.modules
    found = importlib.import_module(module)
    if is_new:
        _leave_to_itself()
    for attribute in path.split("."):
        found = getattr(found, attribute)
    return found
