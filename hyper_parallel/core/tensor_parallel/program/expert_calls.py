"""Calls of expert modules, and the comparison of calls between ranks before tokens are sent.

Two forms are known. ``module(tokens, counts)`` takes tokens sorted by expert, and the number of tokens of each expert.
``module(hidden, indices, weights)`` takes k experts for each token, and returns the weighted sums of their outputs.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.communication import collectives
from hyper_parallel.core.communication.parts import check_digests, digests_of, numbers_of_ranks
from hyper_parallel.core.communication.routes import Routes, order_of

if TYPE_CHECKING:
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh
    from hyper_parallel.platform import Platform

__all__ = ["EXPERT_SHARES", "ExpertCall", "agree_on_routes", "evenly", "like", "read_call", "values_of"]

Key = int | str

#: Fractions of the routes that each expert gets in a dry run, set by `hyper_parallel.planning.expert_shares`.
EXPERT_SHARES: ContextVar[Sequence[float] | None] = ContextVar("hyper_parallel_expert_shares", default=None)

#: Problems of a call on one rank, by number: texts with places for the two numbers of the problem.
_WRONG = {
    1: "the indices of experts go from {0} to {1}",
    2: "the token counts sum to {0}, but there are {1} tokens",
    3: "there are token counts for {0} experts",
    4: "a token count is {0}",
    5: "the arguments are neither (tokens, counts) nor (hidden states, indices, weights)",
    6: "there are indices for {0} tokens, but {1} tokens",
}
#: Greater than the largest key of `_WRONG`.
_PROBLEMS = 8
_REMEDY = (
    "call the module with (tokens sorted by expert (N, d), token counts (E,)), or with (hidden states (T, d), indices "
    "of experts (T, k), weights (T, k))"
)


@dataclass
class ExpertCall:
    """The arguments of this rank's call of an expert module.

    Attributes:
        given: the arguments, by position or name.
        tokens: key of the tokens in ``given``.
        experts: key of the counts, or of the indices of experts.
        weights: key of the weights; None in the form with counts.
        counts: number of this rank's routes to each expert.
        order: order of the routes by expert, as `Routes` takes it.
        copies: number of routes of each token.
        problem: a key of `_WRONG` (0 for no problem) and the two numbers of its text.
    """

    given: dict[Key, Any]
    tokens: Key = 0
    experts: Key = 1
    weights: Key | None = None
    counts: Any = None
    order: np.ndarray | None = None
    copies: int = 1
    problem: tuple[int, int, int] = (0, 0, 0)

    def local_arguments(self, x: Any, numbers: Sequence[int], platform: Platform) -> dict[Key, Any]:
        """Return the arguments for a call of the local experts. Expert i gets the next ``numbers[i]`` rows of ``x``."""
        given, experts = dict(self.given), self.given[self.experts]
        given[self.tokens] = x
        if self.weights is None:
            counts = platform.to_device(platform.host_tensor(np.asarray(numbers, np.int64)))
            # The tokens of all ranks may be too many for 8 or 16 bits.
            given[self.experts] = counts if experts.itemsize < 4 else platform.to_dtype(counts, experts.dtype)
        else:
            places = np.repeat(np.arange(len(numbers)), numbers).reshape(-1, 1)
            given[self.experts] = like(places, experts, platform)
            given[self.weights] = platform.ones(places.shape, platform.detach(self.given[self.weights]))
        return given


def read_call(args: tuple, kwargs: dict, count: int, platform: Platform) -> ExpertCall:
    """Find tokens, counts, indices and weights among the arguments of an expert module, without communication.

    Args:
        args, kwargs: arguments of the call; tensors are plain.
        count: global number of experts.
        platform: platform of the tensors.
    """
    given: dict[Key, Any] = {**dict(enumerate(args)), **kwargs}
    call, tensors = ExpertCall(given), {key: x for key, x in given.items() if platform.is_tensor(x)}
    shapes = {key: platform.shape_of(x) for key, x in tensors.items()}
    first, *others = tensors or (None,)
    is_float = {key: platform.is_floating_point(x) for key, x in tensors.items()}
    numbers = [key for key in others if len(shapes[key]) == 1]
    indices = [key for key in others if len(shapes[key]) == 2 and not is_float[key]]
    weights = [key for key in others if len(shapes[key]) == 2 and is_float[key]]
    call.counts = np.zeros(count, np.int64)
    found = [len(numbers), len(indices), len(weights)]
    if first is None or len(shapes[first]) != 2 or not is_float[first] or found not in ([1, 0, 0], [0, 1, 1]):
        call.problem = 5, 0, 0
        return call
    call.tokens, rows = first, shapes[first][0]
    if numbers:
        call.experts = numbers[0]
        if platform.sends_nothing:
            call.counts = evenly(rows, count)
            return call
        counts = values_of(tensors[call.experts], platform)
        if len(counts) != count:
            call.problem = 3, len(counts), 0
        elif (counts < 0).any():
            call.problem = 4, int(counts.min()), 0
        elif counts.sum() != rows:
            call.problem = 2, int(counts.sum()), rows
        else:
            call.counts = counts
        return call
    call.experts, call.weights, call.copies = indices[0], weights[0], shapes[indices[0]][1]
    if shapes[call.weights] != shapes[call.experts] or not call.copies:
        call.problem = 5, 0, 0
    elif shapes[call.experts][0] != rows:
        call.problem = 6, shapes[call.experts][0], rows
    elif platform.sends_nothing:
        call.counts = evenly(rows * call.copies, count)
    else:
        found_there = values_of(tensors[call.experts], platform)
        if found_there.size and (found_there.min() < 0 or found_there.max() >= count):
            call.problem = 1, int(found_there.min()), int(found_there.max())
        else:
            call.counts, call.order = np.bincount(found_there, minlength=count), order_of(found_there)
    return call


def agree_on_routes(call: ExpertCall, mesh: DeviceMesh, sizes: Sequence[int], what: str) -> Routes:
    """Exchange the route counts of the ranks of a 1-D mesh, by one small all-gather, and return the routes.

    Each rank sends its counts and a checksum of its call. If a call has a problem, or checksums differ, all ranks
    exchange the details and raise.

    Args:
        call: call of this rank.
        mesh: mesh over which the experts are sharded.
        sizes: number of experts on each rank.
        what: name of the module in messages.

    Raises:
        ValueError: on all ranks, if the call of any rank has a problem.
        RankMismatchError: on all ranks, if they differ in the tokens' width, dtype or need of a gradient, or in the
            number of experts of each token.
    """
    platform = mesh.platform
    facts: dict[str, Any] = {}
    if not call.problem[0]:
        x = call.given[call.tokens]
        facts = {
            "the number of features of a token": platform.shape_of(x)[1],
            "the dtype of tokens": str(x.dtype),
            "whether tokens need a gradient": platform.requires_grad(x),
            "the number of experts of a token": call.copies if call.weights is not None else 0,
        }
    details = [*call.problem, *(digests_of(facts) or [0] * 4)]
    check = (zlib.crc32(repr(details[3:]).encode()) >> 1) // _PROBLEMS * _PROBLEMS + call.problem[0]
    mine = np.array([[check, *call.counts.tolist()]], np.int32)
    rows = mine
    if mesh.size() > 1:
        gather = collectives.bind_all_gather(mesh, 0, 0, (1,) * mesh.size())
        with platform.no_dispatch(), platform.no_grad():
            gathered = gather(platform.to_device(platform.host_tensor(mine)))
            if not platform.sends_nothing:
                rows = np.frombuffer(platform.bytes_of(gathered), np.int32).reshape(mesh.size(), -1)
    if platform.sends_nothing:
        rows = np.broadcast_to(mine, (mesh.size(), mine.shape[1]))
    checks = set(rows[:, 0].tolist())
    if len(checks) > 1 or any(check % _PROBLEMS for check in checks):
        _refuse(numbers_of_ranks(details, mesh, f"the comparison of calls of {what}"), facts, mesh, sum(sizes), what)
    return Routes(mesh, 0, rows[:, 1:].astype(np.int64), sizes, call.order)


def _refuse(details: np.ndarray, facts: dict[str, Any], mesh: DeviceMesh, count: int, what: str) -> None:
    """Raise the error for a call that has a problem on some rank, or that differs between ranks.

    Args:
        details: a row for each rank: the problem, its two numbers, and the digests of the rank's facts.
        facts: facts of this rank, by name.
        mesh: mesh of the ranks.
        count: global number of experts.
        what: name of the module.
    """
    ranks = mesh.ranks_along(0)
    wrong = [
        f"on rank {rank}, {_WRONG[row[0]].format(*row[1:3])}"
        for rank, row in zip(ranks, details.tolist(), strict=True)
        if row[0]
    ]
    if wrong:
        raise ValueError(f"{what} has {count} experts, and {'; '.join(wrong)}: {_REMEDY}")
    check_digests(
        details[:, 3:],
        facts,
        mesh,
        what,
        f"call the module in the same way on all ranks of {mesh}, also with no tokens",
    )


def values_of(x: Any, platform: Platform) -> np.ndarray:
    """Return the integers of a plain tensor on the host, as a vector."""
    wide = platform.host_tensor(np.zeros(1, np.int64)).dtype
    return np.frombuffer(platform.bytes_of(platform.to_dtype(platform.detach(x), wide)), np.int64)


def like(values: np.ndarray, x: Any, platform: Platform) -> Any:
    """Return integers as a plain tensor of the dtype of ``x``, on this rank's device."""
    return platform.to_dtype(platform.to_device(platform.host_tensor(values)), x.dtype)


def evenly(rows: int, count: int) -> np.ndarray:
    """Return assumed numbers of rows for each expert, for a dry run, where tensors have no values.

    Rows are spread evenly, or by `EXPERT_SHARES`.

    Raises:
        ValueError: if `EXPERT_SHARES` is for another number of experts.
    """
    shares = EXPERT_SHARES.get()
    if shares is None:
        return rows // count + (np.arange(count) < rows % count)
    if len(shares) != count:
        raise ValueError(
            f"expert_shares got {len(shares)} numbers, but a module has {count} experts: pass one number for each "
            "expert"
        )
    ends = np.cumsum(np.asarray(shares, np.float64)) / sum(shares)
    return np.diff(np.rint(ends * rows).astype(np.int64), prepend=0)
