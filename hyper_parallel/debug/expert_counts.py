"""`ExpertCounts`: the number of tokens that each rank has sent to each expert."""

from __future__ import annotations

import numpy as np

from hyper_parallel.core.communication.routes import ROUTE_WATCHERS, Routes
from hyper_parallel.debug.text import format_table

__all__ = ["ExpertCounts"]

#: Characters of the longest bar.
_BAR = 24


class ExpertCounts:
    """Context manager that counts the tokens that modules under `ExpertParallel` send from each rank to each expert.

    Ranks exchange these numbers in each call anyway, so there is no further communication. Each rank has the numbers of
    all ranks of the style's mesh. A forward that backward recomputes is not counted.

    Attributes:
        counts: path of a module -> array (ranks, experts), the sum of all its calls.
        calls: path of a module -> number of its calls.

    Example:
        >>> import torch
        >>> from hyper_parallel import ExpertParallel, init_device_mesh, parallelize_module
        >>> from hyper_parallel.debug import ExpertCounts
        >>> class Experts(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = torch.nn.Parameter(torch.ones(2, 4, 4))
        ...     def forward(self, x, counts):
        ...         return torch.cat([rows @ w for rows, w in zip(x.split(counts.tolist()), self.weight)])
        >>> experts = parallelize_module(Experts(), init_device_mesh("cpu", (1,)), ExpertParallel())
        >>> with ExpertCounts() as seen:
        ...     _ = experts(torch.ones(4, 4), torch.tensor([3, 1]))
        >>> print(seen)
        Experts: 4 tokens in 1 calls, the most of an expert 1.50 times the mean
        expert  tokens  of rank 0
        0            3          3  ########################
        1            1          1  ########
    """

    def __init__(self) -> None:
        self.counts: dict[str, np.ndarray] = {}
        self.calls: dict[str, int] = {}

    def __enter__(self) -> ExpertCounts:
        ROUTE_WATCHERS.append(self._count)
        return self

    def __exit__(self, *exc_info: object) -> None:
        ROUTE_WATCHERS.remove(self._count)

    def _count(self, path: str, routes: Routes) -> None:
        self.counts[path] = self.counts.get(path, 0) + routes.counts
        self.calls[path] = self.calls.get(path, 0) + 1

    def imbalance(self) -> dict[str, float]:
        """Return, for each module, the largest number of tokens of an expert as a multiple of the mean. It is 0 without
        tokens."""
        return {
            path: float(counts.sum(0).max() * counts.shape[1] / max(counts.sum(), 1))
            for path, counts in self.counts.items()
        }

    def __str__(self) -> str:
        """Return a table for each module, with a bar for each expert."""
        texts, imbalance = [], self.imbalance()
        for path, counts in self.counts.items():
            totals = counts.sum(0)
            head = ["expert", "tokens", *(f"of rank {rank}" for rank in range(len(counts))), ""]
            rows = [
                [str(e), str(total), *map(str, counts[:, e].tolist()), "#" * round(_BAR * total / max(totals.max(), 1))]
                for e, total in enumerate(totals.tolist())
            ]
            texts.append(
                f"{path}: {totals.sum()} tokens in {self.calls[path]} calls, the most of an expert "
                f"{imbalance[path]:.2f} times the mean\n{format_table(head, rows, range(1, len(head) - 1))}"
            )
        return "\n".join(texts)
