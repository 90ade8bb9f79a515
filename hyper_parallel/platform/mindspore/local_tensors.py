"""Operations on plain local tensors, factories and random state.

Shards may be empty: MindSpore's errors for empty tensors are avoided here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore.basics.empty_shards import connected_zeros
from hyper_parallel.platform.mindspore.basics.seeds import COUNTERS, set_seed
from hyper_parallel.platform.mindspore.memory_order import with_strides
from hyper_parallel.platform.mindspore.processes.collectives import copied, dense

__all__ = ["LocalVerbs"]


class LocalVerbs:
    """MindSpore's implementation of `TensorRole`, `StorageRole` and `DeviceRole`."""

    # Where MindSpore has a function with the same arguments, it is the verb itself.
    narrow: Any = staticmethod(mint.narrow)
    chunk: Any = staticmethod(mint.chunk)
    contiguous: Any = staticmethod(dense)
    log: Any = staticmethod(ops.log)
    gather: Any = staticmethod(ops.gather_elements)
    with_strides: Any = staticmethod(with_strides)

    def cat(self, xs: Sequence[Tensor], dim: int) -> Tensor:
        return mint.cat(list(xs), dim)

    def become(self, x: Tensor, values: Tensor) -> None:
        x.assign_value(dense(values))

    def clone(self, x: Tensor) -> Tensor:
        return copied(x)

    def span(self, x: Any) -> tuple[str, int, int]:
        last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        return "", x.data_ptr(), x.data_ptr() + (last + 1) * x.itemsize

    def full(self, shape: Sequence[int], value: float, like: Tensor) -> Tensor:
        return _filled(tuple(shape), value, like.dtype)

    def masked_fill(self, x: Tensor, mask: Tensor, value: float) -> Tensor:
        return ops.masked_fill(x, mask, Tensor(value, x.dtype))

    def to_dtype(self, x: Tensor, dtype: Any) -> Tensor:
        return x if x.dtype == dtype else x.astype(dtype)

    def amax(self, x: Tensor, dim: int) -> Tensor:
        # Converted first: the kernel on CPU takes no bfloat16.
        return ops.amax(x if x.dtype in (ms.float32, ms.float64) else x.astype(ms.float32), dim, True)

    def sum_along(self, x: Tensor, dim: int) -> Tensor:
        shape = tuple(x.shape)
        if 0 in shape:
            return connected_zeros((*shape[:dim], 1, *shape[dim + 1 :]), x.dtype, (x,))
        return mint.sum(x, dim, True)

    def shifted_exp(self, x: Tensor, shift: Tensor, scale: Tensor | None = None) -> Tensor:
        y = ops.exp(x - shift)
        return y if scale is None else y / scale

    def scatter_add(self, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
        return ops.tensor_scatter_elements(x, index, source, dim, "add")

    def host_tensor(self, values: np.ndarray) -> Tensor:
        return Tensor(values)

    def factory(self, name: str, shape: Sequence[int], fill_value: Any, dtype: Any) -> Tensor:
        shape = tuple(shape)
        if name == "full":
            if dtype is None:
                dtype = {bool: ms.bool_, int: ms.int64}.get(type(fill_value), ms.float32)
            return _filled(shape, fill_value, dtype)
        dtype = ms.float32 if dtype is None else dtype
        if name == "linspace":
            return ops.linspace(*map(float, fill_value), shape[0]).astype(dtype)
        if name == "logspace":  # MindSpore's function requires an integer base
            start, end, base = fill_value
            return Tensor(np.logspace(start, end, shape[0], base=base)).astype(dtype)
        if name in ("rand", "randn"):
            draw = ops.rand if name == "rand" else ops.randn
            return ops.zeros(shape, dtype) if 0 in shape else draw(*shape, dtype=dtype)
        return ops.zeros(shape, dtype)

    def counter_key(self) -> Tensor:
        # Derived from seed and offset of the newer operations' generator, which MindSpore restores for a recomputation.
        state = ms.get_rng_state().asnumpy()
        halves = np.frombuffer(hashlib.sha256(state.tobytes()).digest()[:8], np.uint16)
        words = state.view(np.int64).copy()
        words[1] += 1
        ms.set_rng_state(Tensor(words.view(np.uint8)))
        return Tensor((halves / 65536).astype(np.float32))

    @contextmanager
    def without_data(self) -> Iterator[None]:
        """Return a context for a dry run, after which the generators are in the state that they had before it.

        MindSpore computes and draws in a dry run, and other ranks may have none. See `Platform.without_data`.
        """
        seed, counters, generator, host = ms.get_seed(), dict(COUNTERS), ms.get_rng_state(), np.random.get_state()
        try:
            yield
        finally:
            if seed is not None:  # otherwise the numbers depend on no state
                set_seed(seed)
            COUNTERS.clear()
            COUNTERS.update(counters)
            ms.set_rng_state(generator)
            np.random.set_state(host)

    def manual_seed(self, seed: int) -> None:
        ms.set_seed(seed)
        ms.manual_seed(seed)  # the generator of the newer operations, which `set_seed` does not change

    # Operations of the old kind (dropout, rand) draw from the global seed and their own counters. Without a seed they
    # draw different numbers on every rank, so a seed is chosen.
    def get_rng_state(self) -> Any:
        seed = ms.get_seed()
        if seed is None:
            seed = int(np.random.randint(2**31 - 1))
        # A counter at its start is equal to no counter, and the order of counters has no meaning.
        counters = dict(sorted(item for item in COUNTERS.items() if item[1] != item[0][1]))
        return ms.get_rng_state().asnumpy(), seed, counters, np.random.get_state()

    def set_rng_state(self, state: Any) -> None:
        generator, seed, counters, host = state
        set_seed(seed)
        COUNTERS.clear()
        COUNTERS.update(counters)
        ms.set_rng_state(Tensor(generator))
        np.random.set_state(host)


def _filled(shape: tuple[int, ...], value: Any, dtype: Any) -> Tensor:
    if value in (0, 1):
        return (ops.ones if value else ops.zeros)(shape, dtype)
    if dtype == ms.bfloat16:  # which the kernel of `full` does not support on CPU
        return ops.full(shape, value, dtype=ms.float32).astype(dtype)
    return ops.full(shape, value, dtype=dtype)
