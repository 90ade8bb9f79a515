"""`RandomState`: the generators of each rank, as a part of a checkpoint."""

from __future__ import annotations

import hashlib
import pickle
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hyper_parallel.checkpoint.errors import CheckpointError
from hyper_parallel.checkpoint.random_groups import assign, groups_alike, groups_saved
from hyper_parallel.checkpoint.ranks import LOADING
from hyper_parallel.core.rules import counter
from hyper_parallel.core.rules.random import keep_states
from hyper_parallel.platform import Platform, get_platform

__all__ = ["RandomState"]


class RandomState:
    """The states of the default generators of each rank: those of the framework, of NumPy and of Python.

    Add a `RandomState` to the state that is saved and loaded. After a load on the mesh of the save, each rank resumes
    its own random numbers. The ranks of a plan (`parallelize_module`) form a group with one state, because they must
    draw the same numbers. On another mesh, each group resumes the state of a saved group, if the number of groups is
    equal. If all ranks have saved one state, all groups resume that state. Otherwise the first groups resume saved
    states. Each further group gets a new seed, with a warning.

    Draws by counter (`manual_seed`) resume too, because their keys come from these generators. The program has to ask
    for draws by counter again. A warning reports a program that draws by counter only before or only after the load.

    Example:
        >>> import tempfile, torch
        >>> from hyper_parallel.checkpoint import RandomState, load, save
        >>> path = save({"random": RandomState()}, f"{tempfile.mkdtemp()}/step-1")
        >>> first = torch.rand(2)
        >>> _ = load({"random": RandomState()}, path)
        >>> torch.equal(torch.rand(2), first)
        True
    """

    #: Each rank has its own state, which `save` stores separately.
    per_rank = True

    def state_dict(self) -> dict[str, Any]:
        """Return the present states, as values that a checkpoint can store."""
        platform = get_platform()
        return {
            "platform": platform.name,
            "device": _without_tensors(platform.get_rng_state(), platform),
            "host": _without_tensors(platform.get_host_rng_state(), platform),
            "numpy": np.random.get_state(),
            "python": random.getstate(),
            "by_counter": counter.is_requested(),
            "alike": _ranks_alike(platform),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the states. States of another framework's generators are skipped, with a warning."""
        platform = get_platform()
        device, host = (
            None if state["platform"] != platform.name or state[name] is None else _with_tensors(state[name], platform)
            for name in ("device", "host")
        )
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        if state["platform"] != platform.name:
            warnings.warn(
                f"the checkpoint has the state of a {state['platform']} generator, which {platform.name} cannot "
                "load: the present generator is left unchanged",
                stacklevel=2,
            )
            return
        if state.get("by_counter", False) is not counter.is_requested():
            warnings.warn(
                "the checkpoint was saved with "
                f"parallel_rng={'counter' if state.get('by_counter') else 'single_device'!r}, and this program uses "
                "the other setting: random numbers will differ. Call manual_seed(..., parallel_rng=...) with the "
                "setting of the checkpoint before loading",
                stacklevel=2,
            )
        for generator, put in ((device, platform.set_rng_state), (host, platform.set_host_rng_state)):
            if generator is not None:
                put(generator)

    def load_state_of_ranks(self, states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> None:
        """Restore this rank's state from the states of all ranks that saved.

        Args:
            states: states of the ranks that saved.
            rank: index of this rank.
            world_size: number of ranks that load.
        """
        members, platform = LOADING.get(), get_platform()
        now = groups_alike(range(world_size) if members is None else members)
        sources, goes_on = assign(states, now)
        source = sources[rank]
        self.load_state_dict(states[0 if source is None else source])
        if source is None:
            seed = int.from_bytes(hashlib.sha256(pickle.dumps((states[0], now[rank]))).digest()[:4], "little")
            platform.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
        if goes_on and sources == [*range(len(states))] and _are_known(members, world_size, platform):
            keep_states(members)
        if not goes_on and rank == 0:
            warnings.warn(
                f"random numbers will differ from those of an uninterrupted run: {len(states)} ranks saved the "
                f"states of their generators, in {len(set(groups_saved(states)))} groups with equal numbers. Now "
                f"{world_size} ranks load, in {len(set(now))} groups. The ranks of a plan of parallelize_module draw "
                "equal numbers. If data-parallel ranks must draw different numbers, call manual_seed(seed + "
                "mesh['dp'].get_local_rank(), mesh['tp']) after the load",
                stacklevel=2,
            )


def _are_known(members: Sequence[int] | None, world_size: int, platform: Platform) -> bool:
    """Return whether the loading ranks are known: from ``members``, or because all ranks of the world load."""
    return members is not None or (platform.world() is not None and platform.world_size() == world_size)


def _ranks_alike(platform: Platform) -> list[int]:
    """Return this rank and the ranks that must draw the same numbers. The result is empty if there is no plan."""
    world = platform.world_size() if platform.world() is not None else 1
    first = groups_alike(range(world))
    own = first[platform.rank()] if world > 1 else 0
    ranks = [rank for rank, leader in enumerate(first) if leader == own]
    return ranks if len(ranks) > 1 else []


def _without_tensors(state: Any, platform: Platform) -> Any:
    if platform.is_tensor(state):
        return {"bytes": platform.bytes_of(state)}
    return state


def _with_tensors(state: Any, platform: Platform) -> Any:
    if isinstance(state, dict) and [*state] == ["bytes"]:
        if not isinstance(state["bytes"], bytes):  # a number would be so many zeros
            raise CheckpointError(
                f"the state of a generator in the checkpoint is damaged: its bytes are {str(state['bytes'])[:100]}"
            )
        values = bytearray(state["bytes"])
        return platform.to_host(platform.from_bytes(values, (len(values),), platform.dtypes["uint8"]), False)
    return state
