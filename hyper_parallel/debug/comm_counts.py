"""Numbers of collectives, by name and by the operations of the framework that stand for them."""

from __future__ import annotations

from typing import Any

from hyper_parallel.platform import get_platform

__all__ = ["CommCounts"]


class CommCounts(dict[str, int]):
    """Numbers of collectives, by name: ``counts["all_reduce"]``. Where a name is not there, 0.

    The framework's own operations name them too, as programs for torch have it:
    ``counts[torch.ops.c10d_functional.all_reduce]``, ``counts[mindspore.mint.distributed.all_reduce]``. It equals the
    dict of names.

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
        """The count of a key, as `dict.get`."""
        return dict.get(self, _name(key), default)

    def __contains__(self, key: Any) -> bool:
        return dict.__contains__(self, _name(key))

    def add(self, kind: str) -> None:
        """Count one more."""
        self[kind] = dict.get(self, kind, 0) + 1


def _name(key: Any) -> Any:
    return key if isinstance(key, str) else get_platform().collective_kind(key)
