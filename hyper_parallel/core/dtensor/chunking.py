"""How a dimension of a given size is split: `torch.chunk` semantics, in one place."""

from __future__ import annotations

from functools import lru_cache

__all__ = ["chunk_sizes"]


@lru_cache(maxsize=4096)
def chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Sizes of the ``parts`` pieces of a dimension; trailing ones may be smaller or empty.

    Example:
        >>> chunk_sizes(5, 4)
        (2, 2, 1, 0)
    """
    each = -(-size // parts)
    return tuple(max(0, min(each, size - i * each)) for i in range(parts))
