"""The exchange of random programs, for results of every dtype and size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hyper_parallel.platform import get_platform
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.fuzz.exchange import Exchange, ExchangePool, installed

__all__ = ["OperatorPool", "widen"]

#: Bytes of a piece of a message, so that it fits with the header around it.
_PIECE = 1 << 17


class OperatorPool(ExchangePool):
    """A pool of ranks that can try operators."""

    def _start(self) -> None:
        super()._start()
        self.run(self.size, widen)


def widen() -> None:
    """A job: let the exchange of this rank take every tensor that an operator may have."""
    exchange = installed()
    assert exchange is not None
    exchange.__class__ = _WideExchange


class _WideExchange(Exchange):
    """An `Exchange` for bfloat16, of which NumPy knows nothing, and for messages of any length."""

    #: The dtypes that travel as float32 now.
    _narrow: Any = None

    def _arrays(self, what: str, local: Any, group: Any) -> list[np.ndarray]:
        self._narrow = local.dtype if "bfloat16" in str(local.dtype) else None
        if self._narrow is not None:
            what = f"{what} in bfloat16"
            local = get_platform().to_dtype(local, get_adapter().tensor(np.zeros((), np.float32)).dtype)
        if hasattr(local, "resolve_conj"):  # torch's collectives write such marks out
            local = local.resolve_conj().resolve_neg()
        return super()._arrays(what, local, group)

    def _tensor(self, array: np.ndarray) -> Any:
        found = super()._tensor(array)
        return found if self._narrow is None else get_platform().to_dtype(found, self._narrow)

    def _swap(self, what: str, content: bytes, ranks: Sequence[int]) -> list[bytes]:
        pieces = [content[i : i + _PIECE] for i in range(0, len(content), _PIECE)] or [b""]
        heard = super()._swap(what, len(pieces).to_bytes(4, "little") + pieces[0], ranks)
        counts = [int.from_bytes(said[:4], "little") for said in heard]
        whole = [said[4:] for said in heard]
        for number in range(1, max(counts)):
            more = super()._swap(what, pieces[number] if number < len(pieces) else b"", ranks)
            whole = [a + b for a, b in zip(whole, more, strict=True)]
        return whole
