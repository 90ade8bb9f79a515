"""Random numbers of MindSpore's operations with a stateful primitive, such as `ops.dropout` and `nn.Dropout`.

A function such as `ops.dropout` makes a new primitive for each call. Its seeds are the global seed and a counter, which
the call advances. A cell such as `nn.Dropout` makes one primitive when it is created. The kernel of that primitive has
its own stream of numbers, one for each shape. Without a global seed, functions and cells use the seeds (0, 0), with
which every process draws different numbers.

On CPUs the numbers of a kernel are not reproducible. After `REPEATED_CALLS` calls MindSpore tries other numbers of
threads, and keeps the fastest number. All threads share one generator. So two ranks, or two runs of one program,
diverge, whatever the seeds are. The numbers of `Stream` are reproducible.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import mindspore as ms
from mindspore import ops

from hyper_parallel.platform.mindspore.basics.private import is_recording

__all__ = [
    "COUNTERS",
    "Stream",
    "drop_channels",
    "is_of_one_call",
    "layer_stream",
    "set_seed",
    "undo_draw",
]

#: Number of calls with one shape that are reproducible on a CPU, as measured with MindSpore 2.10.
REPEATED_CALLS = 5

# `mindspore.common.seed` is a function too, which hides the module from an import statement.
_seed = importlib.import_module("mindspore.common.seed")

#: (kernel, seed given to the operation or 0) -> counter
COUNTERS: dict[tuple[str, int], int] = _seed._KERNEL_SEED

#: Settings of `mindspore.dataset`, and the seed there that a program has not set.
_datasets = importlib.import_module("mindspore.dataset").config
_NO_SEED = 5489

_STRIDE: int = _seed.keyConstant[0] ^ _seed.keyConstant[2]

#: primitive of a layer -> mesh -> its stream there, None for one without a seed
_STREAMS: WeakKeyDictionary[Any, WeakKeyDictionary[Any, Any]] = WeakKeyDictionary()


def set_seed(seed: int) -> None:
    """Set the global seed. A seed of `mindspore.dataset` that the program has set itself stays: `mindspore.set_seed`
    would overwrite it, and datasets would be shuffled in another order than on a single device."""
    of_datasets = _datasets.get_seed()
    ms.set_seed(seed)
    if of_datasets != _NO_SEED:
        _datasets.set_seed(of_datasets)


def undo_draw(kernel: str, seeds: tuple[int, int]) -> int | None:
    """Decrease the counter that gave ``seeds`` to an operation, because the operation will be called again.

    Returns:
        The seed given to the operation, None for none.
    """
    if seeds == (0, 0):
        return None  # without a global seed nothing was drawn
    for (name, given), counter in COUNTERS.items():
        if name == kernel and _seed._truncate_seed(counter - _STRIDE) == seeds[1]:
            COUNTERS[name, given] = counter - _STRIDE
            return given or None
    return None


def is_of_one_call(primitive: Any) -> bool:
    """Return whether a primitive was made for a single call of a function. Primitives of cells and programs are
    reused."""
    return primitive.attrs.get("random_cache") is False


class Stream:
    """Random numbers of one dropout layer. The numbers depend only on the layer's seeds, the shape and the number of
    the call.

    The kernel's stream gives the numbers of the first `REPEATED_CALLS` calls of a shape, as in the unsharded layer. On
    CPUs, each later call has its own kernel. The seeds of that kernel are computed from the layer's seeds and the
    number of the call. On other devices the stream gives the numbers of all calls.

    Args:
        keep_prob: probability of an element to stay.
        seeds: the two seeds of the layer, not (0, 0).
    """

    def __init__(self, keep_prob: float, seeds: tuple[int, int]) -> None:
        self._keep_prob, self._seeds = keep_prob, seeds
        self._of_kernel = ops.Dropout(keep_prob, *seeds)
        self._calls: dict[tuple, int] = {}

    def __call__(self, x: Any) -> Any:
        """Return ``x`` with some elements dropped, a plain tensor."""
        # A recomputed block runs twice, and MindSpore's kernels draw the same numbers in both runs: one kernel runs
        # while gradients are recorded, and another one while they are not.
        key = (tuple(x.shape), x.dtype, is_recording())
        number = self._calls[key] = self._calls.get(key, 0) + 1
        if number <= REPEATED_CALLS or ms.get_context("device_target") != "CPU":
            return self._of_kernel(x)[0]
        words = hashlib.sha256(repr((*self._seeds, number)).encode()).digest()
        once = ops.Dropout(self._keep_prob, *(int.from_bytes(words[i : i + 4], "big") >> 1 for i in (0, 4)))
        once.add_prim_attr("random_cache", False)  # the kernel is made for this call
        return once(x)[0]


def drop_channels(x: Any, p: float) -> Any:
    """Drop entire channels of (batch, channels, ...). MindSpore's kernel is not used, because no seed controls its
    stream: ranks that have drawn before would draw different numbers."""
    shape = (*x.shape[:2], *(1,) * (x.ndim - 2))
    noise = ops.zeros(shape, ms.float32) if p >= 1 else ops.dropout(ops.ones(shape, ms.float32), p)
    return x * noise.astype(x.dtype)


def layer_stream(primitive: Any, mesh: Any, of_first_rank: Callable[[Any, Any], Any]) -> Any:
    """Return the dropout that a layer uses on a mesh, in place of its own.

    The new dropout has the seeds of the layer on the mesh's first rank, and a new stream. So all ranks draw the same
    numbers as the unsharded layer.

    Args:
        primitive: primitive of the layer.
        mesh: the mesh.
        of_first_rank: `Core.of_first_rank`.

    Returns:
        One stream for all calls; None for a layer without a seed, whose calls may all draw different numbers.
    """
    streams = _STREAMS.setdefault(primitive, WeakKeyDictionary())
    if mesh not in streams:
        seeds = of_first_rank((primitive.Seed0, primitive.Seed1), mesh)
        streams[mesh] = None if seeds == (0, 0) else Stream(primitive.keep_prob, seeds)
    return streams[mesh]
