"""Staging buffers for the all-gathers of data parallelism: see `Fast.gathered_rows`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hyper_parallel.platform.contract.fast import Rows

__all__ = ["GatheredRows"]


class GatheredRows(Rows):
    """Staging buffer with one permanent tensor object, so that views of this tensor are made once.

    The storage exists only while the buffer has rows.
    """

    def __init__(self, whole: Tensor, count: int, lengths: Sequence[int]) -> None:
        self._whole, self._rows = whole.data, torch.empty_like(whole)
        self._stored, self._storage, self._size = whole.untyped_storage(), self._rows.untyped_storage(), whole.nbytes
        by_row = [row.split_with_sizes(list(lengths)) for row in self._rows.view(count, -1)]
        self._pieces = [row[i] for i in range(len(lengths)) for row in by_row]
        self.free()

    def take(self) -> Tensor:
        """Return the staging tensor of the rows."""
        self._storage.resize_(self._size)
        return self._rows

    def unpack(self) -> None:
        """Copy the rows into the gathered tensor. Autograd does not count writes to ``data``."""
        if self._stored.nbytes() != self._size and self._stored.resizable():
            self._stored.resize_(self._size)
        torch.cat(self._pieces, out=self._whole)
        self._storage.resize_(0)

    def free(self) -> None:
        """Free the memory of the rows."""
        self._storage.resize_(0)
