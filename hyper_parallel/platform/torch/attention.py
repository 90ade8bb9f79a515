"""Attention of torch for sequences that are cut: its function on plain tensors, told of by a mode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.torch.basics.tensor import is_dtensor

__all__ = ["AttentionVerbs"]


class _Calls(TorchFunctionMode):
    """Calls of scaled dot-product attention on plain tensors arrive at ``run``."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._attention(func, *args, **kwargs)

    def _attention(
        self,
        func: Any,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Any:
        def call(q: Any, k: Any, v: Any, mask: Any) -> Any:
            return func(q, k, v, mask, dropout_p, is_causal, **more)

        tensors = query, key, value, attn_mask
        return call(*tensors) if any(map(is_dtensor, tensors)) else self._run(call, *tensors, dropout_p)


class AttentionVerbs(Platform):
    """The verbs of `Platform` about attention."""

    def attention_calls(self, run: Callable[..., Any]) -> AbstractContextManager[None]:
        """See `Platform.attention_calls`."""
        calls: Any = _Calls(run)
        return calls
