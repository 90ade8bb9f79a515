"""Attention of torch for sharded sequences: a mode intercepts torch's attention function on plain tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.torch.basics.private import graph_task
from hyper_parallel.platform.torch.basics.tensor import is_dtensor
from hyper_parallel.platform.torch.compiled.flex import MIXES
from hyper_parallel.platform.torch.handlers.bodies import body_of
from hyper_parallel.platform.torch.handlers.mixing import MIXING

__all__ = ["AttentionVerbs"]

#: Functions that call attention, also in a recomputation by backward. A mode is off inside them.
_OUTER = frozenset(
    (F.multi_head_attention_forward, torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
)


@lru_cache(maxsize=16)
def _body(function: Callable, engine: Any) -> Callable:
    """Return the Python code of a function of `_OUTER`, as it runs on plain tensors.

    ``engine`` is the function that this code calls. Patches replace ``engine``, so it is part of the cache key.
    """
    return body_of(function)


class _Calls(TorchFunctionMode):
    """Mode that passes calls of scaled dot-product attention to ``run``."""

    def __init__(self, run: Callable[..., Any], mixes: Callable[[str, Sequence[int]], None]) -> None:
        super().__init__()
        self._run, self._mixes = run, mixes
        self._tokens: list[Any] = []
        self._depth, self._kept, self._again, self._checkpointed = 0, 0, 0, False

    def __enter__(self) -> Any:
        if not self._depth:
            self._checkpointed = _is_checkpointed()
        self._depth += 1
        self._tokens.append(MIXES.set(self._mixes))
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        self._depth -= 1
        MIXES.reset(self._tokens.pop())
        if not self._depth and kind is None and self._kept and not self._again:
            raise ValueError(
                "context_parallel ended before backward, which recomputes attention under "
                "torch.utils.checkpoint(use_reentrant=True): the recomputation would use this rank's shard of the "
                "sequence alone. Call backward inside the context, or pass use_reentrant=False. Or use the style "
                "ContextParallel for the attention modules in place of the context"
            )

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(func, *args, **kwargs)
        if func in _OUTER:
            if func is F.multi_head_attention_forward and kwargs.get("need_weights", True):
                self._mixes("multi_head_attention_forward with need_weights", args[0].shape[:-1])
            with self:
                return _body(func, func.__globals__.get("_engine_run_backward"))(*args, **kwargs)
        if func in MIXING and not is_dtensor(args[0] if args else kwargs["input"]):
            name, lengths_of = MIXING[func]
            self._mixes(name, lengths_of(*args, **kwargs))
        return func(*args, **kwargs)

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
            made = mask is not None and attn_mask is None
            causal = is_causal and not made
            return func(q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=causal, **more)

        asked: Any = call
        asked.options = is_causal, dropout_p, *more.items()
        if not query.is_meta and torch.is_autocast_enabled(query.device.type):  # as the function does
            query, key, value, attn_mask = map(_lowered, (query, key, value, attn_mask))
        if graph_task() != -1:
            self._again += 1
        elif not self._checkpointed and _is_checkpointed():
            self._kept += 1
        return self._run(asked, query, key, value, attn_mask, dropout_p)


def _lowered(x: Any) -> Any:
    """Return a tensor in the dtype of autocast, or None for None."""
    if x is None or not x.is_floating_point() or x.dtype is torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


_CHECKPOINT = CheckpointFunction.forward.__code__


def _is_checkpointed() -> bool:
    """Return whether the caller is in a forward of reentrant checkpointing, which backward will run again."""
    frame = None if torch.is_grad_enabled() else sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CHECKPOINT:
            return any(frame.f_locals["ctx"].needs_input_grad)
        frame = frame.f_back
    return False


class AttentionVerbs(Platform):
    """Verbs of `Platform` for attention."""

    def attention_calls(
        self, run: Callable[..., Any], mixes: Callable[[str, Sequence[int]], None]
    ) -> AbstractContextManager[None]:
        """Return a context that replaces the framework's attention function by ``run``."""
        calls: Any = _Calls(run, mixes)
        return calls

    def attention_part(self, q: Any, k: Any, v: Any, causal: bool, scale: float) -> tuple[Any, Any]:
        """Return the attention to these keys alone, and the log-sum-exp of the scores. Torch's flash attention, which
        stores no scores, is used for tensors that it supports."""
        if _on_cpu(q, v):
            out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        elif _on_gpu(q, v):
            out, lse, *_ = _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        else:
            return super().attention_part(q, k, v, causal, scale)
        return out if out.dtype is lse.dtype else out.to(lse.dtype), lse.unsqueeze(-1)

    def joined_attention(self, out: Any, lse: Any, other: Any, of_other: Any) -> tuple[Any, Any]:
        """Combine the attention to two sets of keys; see `Platform.joined_attention`."""
        total = torch.logaddexp(lse, of_other)
        return out.lerp_(other, of_other.sub_(total).exp_()), total

    def attention_part_gradients(
        self, g: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, scale: float
    ) -> tuple[Any, Any, Any]:
        """Return the contributions of these keys to the cotangents. The kernels are the same as in `attention_part`."""
        if _on_cpu(q, v):
            found = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
                g, q, k, v, out, lse.squeeze(-1), 0.0, causal, scale=scale
            )
        elif _on_gpu(q, v):
            # Without dropout, the state of the generator is not read.
            nothing = q.new_empty(0, dtype=torch.int64)
            lengths = None, None, q.shape[2], k.shape[2]
            found = _ATEN._scaled_dot_product_flash_attention_backward(
                g, q, k, v, out, lse.squeeze(-1), *lengths, 0.0, causal, nothing, nothing, scale=scale
            )
        else:
            return super().attention_part_gradients(g, q, k, v, out, lse, causal, scale)
        if q.dtype is not lse.dtype:
            found = [x.to(lse.dtype) for x in found]
        of_q, of_k, of_v = found
        return of_q, of_k, of_v


_ATEN: Any = torch.ops.aten


def _on_cpu(q: Any, v: Any) -> bool:
    """Return whether torch's flash attention for CPUs supports these tensors."""
    return q.device.type == "cpu" and q.is_floating_point() and q.shape[-1] == v.shape[-1]


def _on_gpu(q: Any, v: Any) -> bool:
    """Return whether torch's flash attention for NVIDIA GPUs supports these tensors."""
    return (
        q.device.type == "cuda"
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] % 8 == 0
        and 0 < q.shape[-1] <= 256
        and torch.version.hip is None
        and torch.backends.cuda.flash_sdp_enabled()
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )
