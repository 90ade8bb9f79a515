"""Counts of collectives, by name or by the corresponding operation of the framework."""

from __future__ import annotations

from typing import Any

from hyper_parallel.platform import get_platform

__all__ = ["CommCounts"]


class CommCounts(dict[str, int]):
    """Counts of collectives by name: ``counts["all_reduce"]``. A missing name counts 0.

    Operations of the framework can be used as keys, as in programs for torch:
    ``counts[torch.ops.c10d_functional.all_reduce]``, ``counts[mindspore.mint.distributed.all_reduce]``. The object
    equals a dict of names.

    Example:
        >>> counts = CommCounts(all_reduce=2)
        >>> counts["all_reduce"], counts["broadcast"], counts == {"all_reduce": 2}
        (2, 0, True)
        >>> import torch.distributed
        >>> counts[torch.ops.c10d.allreduce_], torch.ops.c10d.broadcast_ in counts
        (2, False)
    """

    def __missing__(self, key: Any) -> int:
        return dict.get(self, _name(key), 0)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the count of a key, or ``default`` if there is none, as `dict.get`."""
        return dict.get(self, _name(key), default)

    def __contains__(self, key: Any) -> bool:
        return dict.__contains__(self, _name(key))

    def add(self, kind: str) -> None:
        """Increase the count of ``kind`` by one."""
        self[kind] = dict.get(self, kind, 0) + 1


def _name(key: Any) -> Any:
    return key if isinstance(key, str) else get_platform().collective_kind(key)
