"""`StatefulDistributedSampler`: the order of the data, which a checkpoint can save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np

from hyper_parallel.checkpoint.ranks import all_ranks
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.platform import get_platform

__all__ = ["StatefulDistributedSampler"]

_WORD = (1 << 64) - 1


class StatefulDistributedSampler:
    """Sampler of this data-parallel rank's samples, in order. It resumes at the saved position, even with another
    number of ranks.

    The order of an epoch follows from ``seed`` and the epoch alone. Its samples are dealt to the ranks in turn. So the
    samples used up to a given moment are the same for any number of ranks. The position in the order is one number,
    which is equal on all ranks. Ranks that share one replica (tensor parallelism) draw the same samples.

    An iteration continues where the previous one ended. At the end of an epoch, the next iteration starts a new epoch.

    Args:
        dataset: the dataset to sample, or its number of samples.
        num_replicas: number of data-parallel ranks.
        rank: index of this rank among them.
        shuffle: whether the order is random.
        seed: seed of the order; the same on all ranks.
        drop_last: whether to leave out the last incomplete round of an epoch. Otherwise samples from the epoch's start
            are added, so that all ranks have equally many.
        mesh: 1-D mesh over the data-parallel ranks, in place of ``num_replicas`` and ``rank``. Without any of these,
            all ranks of the world are replicas.

    Raises:
        ValueError: for invalid numbers.

    Example:
        >>> from hyper_parallel.checkpoint import StatefulDistributedSampler
        >>> sampler = StatefulDistributedSampler(10, num_replicas=2, rank=0, shuffle=False)
        >>> samples = iter(sampler)
        >>> next(samples), next(samples)
        (0, 2)
        >>> other = StatefulDistributedSampler(10, num_replicas=3, rank=1, shuffle=False)
        >>> other.load_state_dict(sampler.state_dict())
        >>> list(other)
        [5, 8]

    Source: ``torch.utils.data.DistributedSampler``, with the state of torchdata's ``StatefulDistributedSampler``.
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        mesh: DeviceMesh | None = None,
    ) -> None:
        if (num_replicas is None) != (rank is None) or (mesh is not None and rank is not None):
            raise ValueError("a sampler takes either num_replicas and rank, or mesh, or none of the three")
        if num_replicas is None or rank is None:
            ranks = all_ranks(get_platform(), mesh)
            num_replicas, rank = len(ranks.members), ranks.members.index(ranks.rank)
        self.size = dataset if isinstance(dataset, int) else len(dataset)
        if self.size < 1 or not 0 <= rank < num_replicas:
            raise ValueError(
                f"a sampler needs at least 1 sample, and a rank below num_replicas: got {self.size} samples, "
                f"rank={rank} and num_replicas={num_replicas}"
            )
        self.num_replicas, self.rank = num_replicas, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self._start = 0  # samples of the epoch that were used before the present number of replicas started
        self._drawn = 0  # samples that this rank has drawn since then
        self._used: int | None = None

    def __len__(self) -> int:
        """Return the number of samples of an iteration that would start now."""
        left = self._left()
        return left if left else self._share(self.size)

    def __iter__(self) -> Iterator[int]:
        self._start, self._drawn, self._used = self._position(), 0, None
        if not self._left():
            self.epoch, self._start = self.epoch + 1, 0
        order, first = self._order(), self._start + self.rank
        for i in range(self._left()):
            self._drawn += 1
            yield int(order[(first + i * self.num_replicas) % self.size])

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch, unless it is the present one."""
        if epoch != self.epoch:
            self.epoch, self._start, self._drawn, self._used = epoch, 0, 0, None

    def set_used(self, count: int) -> None:
        """Set how many samples of this iteration the program has used. Call it for a loader whose workers draw ahead.

        `state_dict` then counts these samples. Without a call, it counts the drawn ones.

        Args:
            count: number of samples of this rank since the iteration started.
        """
        if not 0 <= count <= self._drawn:
            raise ValueError(
                f"set_used({count}): this iteration has drawn {self._drawn} samples, so pass a number from 0 to "
                f"{self._drawn}"
            )
        self._used = count

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`. It is the same on all ranks that have drawn equally many samples."""
        return {
            "epoch": self.epoch,
            "position": self._position(),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "size": self.size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at the saved position, with the order of the saved run.

        Raises:
            ValueError: if the saved data set has another size.
        """
        if state["size"] != self.size:
            raise ValueError(
                f"the saved order is for {state['size']} samples, and this data set has {self.size} samples: leave "
                "the sampler out of the state to load, and begin a new epoch"
            )
        self.epoch, self.seed, self.shuffle = state["epoch"], state["seed"], state["shuffle"]
        self._start, self._drawn, self._used = state["position"], 0, None

    def _position(self) -> int:
        """Return how many samples of the epoch are used, assuming that all ranks have used as many as this rank."""
        used = self._drawn if self._used is None else self._used
        return min(self._start + used * self.num_replicas, self.size)

    def _share(self, count: int) -> int:
        return count // self.num_replicas if self.drop_last else -(-count // self.num_replicas)

    def _left(self) -> int:
        return self._share(self.size - self._start)

    def _order(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.size)
        # NumPy guarantees the generator's raw words to be equal in every release, but not the results of its shuffles.
        words = np.random.Philox(key=np.array([self.seed & _WORD, self.epoch & _WORD], np.uint64)).random_raw(self.size)
        return np.argsort(words, kind="stable")
