"""`expert_shares`: the assumed distribution of tokens over experts in dry runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hyper_parallel.core.tensor_parallel.program.expert_calls import EXPERT_SHARES

__all__ = ["expert_shares"]


@contextmanager
def expert_shares(shares: Sequence[float]) -> Iterator[None]:
    """Context manager that sets each expert's share of the routes on all ranks, for `explain` and `dry_run`.

    Dry runs have no values of indices and counts. Without this context all experts get equal shares.

    Args:
        shares: a number for each expert of a module, such as counts from `ExpertCounts`.

    Raises:
        ValueError: for negative numbers, or if all are 0. Inside the block, for modules with another number of experts.

    Example:
        >>> from hyper_parallel.planning import expert_shares
        >>> with expert_shares([4, 1, 1, 2]):  # explain(...) or dry_run(...)
        ...     pass
    """
    if not shares or min(shares) < 0 or not sum(shares):
        raise ValueError(f"expert_shares takes one number for each expert, at least 0 and not all 0, got {shares}")
    token = EXPERT_SHARES.set([float(share) for share in shares])
    try:
        yield
    finally:
        EXPERT_SHARES.reset(token)
