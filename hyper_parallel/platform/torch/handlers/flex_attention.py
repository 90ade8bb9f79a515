"""`torch.nn.attention.flex_attention.flex_attention` on DTensors in eager mode. Torch's own function runs on each
rank's shard of batch and heads. `compiled.flex` describes how calls come here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch
from torch.autograd import Function

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.torch.basics.observation import unobserved
from hyper_parallel.platform.torch.basics.tensor import dispatch, is_dtensor
from hyper_parallel.platform.torch.compiled.flex import Flex
from hyper_parallel.platform.torch.compiled.flex_parts import own_part_of_mask, seeing_whole
from hyper_parallel.platform.torch.handlers.captured import Captured

__all__: list[str] = []


def _bind(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    return args, (kwargs["fixed"], kwargs["statistics"])


_ROW = NativeOp("flex_attention", _bind, lambda func, operands, static: func.run(operands, static[-1]), False)


class _Call:
    """Values of one call that do not affect how it is computed."""

    __name__ = "flex_attention"

    def __init__(self, shape: tuple[int, ...], captured: Captured, options: dict[str, Any]) -> None:
        self.whole, self.captured, self.options = (shape[0], shape[1]), captured, options

    def run(self, operands: tuple, pieces: Any) -> Any:
        """Run torch's function on local tensors; nothing is dispatched."""
        q, k, v, *read = (x.as_subclass(Tensor) if is_dtensor(x) else x for x in operands)
        options, count = self.options, self.statistics
        if not q.numel() or not v.shape[-1]:
            made = _Nothing.apply(_dtype_of(q), count, q, k, v, *read)
            return made if count else made[0]
        score_mod, mask = self.captured.given(read)
        if score_mod is not None:
            score_mod = seeing_whole(score_mod, pieces, self.whole, q.device)
        if mask is not None:
            mask = own_part_of_mask(mask, pieces, self.whole)
        with unobserved():
            results = Flex.original(q, k, v, score_mod, mask, **options)
        if isinstance(results, Tensor):
            return results
        out, more = results
        return (out, *((more,) if isinstance(more, Tensor) else (x for x in more if x is not None)))

    @property
    def statistics(self) -> int:
        """Return the number of requested statistics."""
        asked = self.options["return_aux"]
        return int(self.options["return_lse"]) if asked is None else int(asked.lse) + int(asked.max_scores)


def flex_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: Any,
    scale: Any,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: Any,
    return_aux: Any,
) -> Any:
    """Run `flex_attention` on DTensors.

    Raises:
        ValueError, TypeError: on all ranks, for the arguments that torch rejects, and for tensors that the functions
            read.
    """
    if return_lse and return_aux is not None:
        raise ValueError("flex_attention: pass either return_lse or return_aux, not both")
    _check(query, key, value, block_mask, enable_gqa)
    if (check := Flex.original.__globals__.get("_apply_kernel_options")) is not None:
        check(query, key, value, return_lse, kernel_options, return_aux)
    captured = Captured(score_mod, block_mask)
    options = {
        "scale": scale,
        "enable_gqa": enable_gqa,
        "return_lse": return_lse,
        "kernel_options": kernel_options,
        "return_aux": return_aux,
    }
    call = _Call(tuple(query.shape), captured, options)
    # Torch allows another number of mask entries and uses the index modulo that number: then all heads are needed.
    own = (1, 1) if block_mask is None else tuple(block_mask.kv_num_blocks.shape[:2])
    fixed = tuple(n not in (1, size) for n, size in zip(own, call.whole, strict=True))
    count = call.statistics
    results = dispatch(_ROW, call, (query, key, value, *captured.found), {"fixed": fixed, "statistics": count})
    if return_aux is None:
        return tuple(results) if count else results
    out, *more = results if count else (results,)
    lse = more.pop(0) if return_aux.lse else None
    return out, _aux(lse=lse, max_scores=more.pop(0) if return_aux.max_scores else None)


Flex.eager = flex_attention


def _aux(**results: Any) -> Any:
    from torch.nn.attention.flex_attention import AuxOutput

    return AuxOutput(**results)


def _check(q: Any, k: Any, v: Any, mask: Any, gqa: bool) -> None:
    """Check the global shapes as torch would, before any communication. Wrong global shapes may have valid local
    shapes."""
    shapes = tuple(tuple(x.shape) for x in (q, k, v))
    if any(len(shape) != 4 for shape in shapes):
        raise ValueError(f"flex_attention takes tensors of (batch, heads, length, features), not of shapes {shapes}")
    (batch, heads, length, features), of_keys, of_values = shapes
    if of_keys[:3] != of_values[:3] or of_keys[3] != features:
        raise ValueError(f"flex_attention: key and value do not fit each other or the query: shapes {shapes}")
    if of_keys[1] != heads and (not gqa or not of_keys[1] or heads % of_keys[1]):
        raise ValueError(
            f"flex_attention: the query has {heads} heads, and key and value have {of_keys[1]} (dimension 1): pass "
            "enable_gqa=True, with a number of query heads that is a multiple of the key and value heads"
        )
    if of_keys[0] != batch and (of_keys[0] != 1 or mask is None):
        raise ValueError(
            f"flex_attention: the query has {batch} samples (dimension 0), and the keys have {of_keys[0]}: use the "
            "same number, or one sample of keys and values with a block_mask"
        )
    checks = Flex.original.__globals__
    if (check := checks.get("_validate_device")) is not None:
        check(q, k, v)
    if mask is None:
        return
    if mask.kv_num_blocks.ndim != 3:
        raise ValueError(
            "flex_attention: kv_num_blocks of the block mask must have shape (batch or 1, heads or 1, blocks), got "
            f"{tuple(mask.kv_num_blocks.shape)}"
        )
    if mask.mask_mod is checks.get("_sliced_mask_mod_error", mask):
        raise RuntimeError("Cannot use mask_mod from a sliced BlockMask")
    covered, sizes = tuple(mask.shape[-2:]), (length, of_keys[2])
    if covered != sizes and min(mask.BLOCK_SIZE) < checks.get("_LARGE_SPARSE_BLOCK_SIZE", 1 << 30):
        raise ValueError(f"flex_attention: the block mask is for {covered} queries and keys, but there are {sizes}")


def _dtype_of(q: Tensor) -> torch.dtype:
    """Return the dtype of the result."""
    kind = q.device.type
    if torch.is_autocast_enabled(kind) and q.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return q.dtype


class _Nothing(Function):
    """Result on a rank without samples or heads: one node for backward, as on the other ranks."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, count: int, q: Tensor, k: Tensor, v: Tensor, *read: Tensor) -> Any:
        """Return empty results, or zeros where values have no features."""
        ctx.save_for_backward(q, k, v, *read)
        statistic = torch.float64 if q.dtype is torch.float64 else torch.float32
        out = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=dtype)
        return (out, *(q.new_zeros(q.shape[:3], dtype=statistic) for _ in range(count)))

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Return zeros for all operands."""
        with no_dispatch():
            return (None, None, *(torch.zeros_like(x) if x.requires_grad else None for x in ctx.saved_tensors))
