"""Reference kernels for torch_npu's own operators: those that a tensor-parallel library and its tests call.

Every other operator of the namespace ``npu`` raises an error that says where to add it.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._C import DisableTorchFunction
from torch.utils._pytree import tree_leaves, tree_map

from tests.simulated_npu.aliasing import host_alias, is_on_device, to_device

_libraries: list[torch.library.Library] = []  # registrations last as long as these


# -------------------------------------------------------------------------------------------------------------- norms
def rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """(x / rms * gamma, 1 / rms); the latter is float32 with the normalised dimensions kept as 1."""
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    rstd = torch.rsqrt(x.float().pow(2).mean(dims, keepdim=True) + epsilon)
    return (x.float() * rstd).to(x.dtype) * gamma.to(x.dtype), rstd


def rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients by x and by gamma; the latter in float32."""
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    normalised, scaled = x.float() * rstd, dy.float() * gamma.float()
    dx = rstd * (scaled - normalised * (scaled * normalised).mean(dims, keepdim=True))
    return dx.to(x.dtype), (dy.float() * normalised).sum_to_size(gamma.shape)


def add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(norm of the sum, 1 / rms, the sum)."""
    total = x1 + x2
    return (*rms_norm(total, gamma, epsilon), total)


# --------------------------------------------------------------------------------------------------------- activations
def swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """silu(first half) * second half, along ``dim``."""
    gate, up = x.chunk(2, dim)
    return F.silu(gate) * up


def swiglu_backward(dy: torch.Tensor, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    gate, up = x.chunk(2, dim)
    s = torch.sigmoid(gate)
    return torch.cat([dy * up * s * (1 + gate * (1 - s)), dy * F.silu(gate)], dim)


# -------------------------------------------------------------------------------------------------- rotary embeddings
def _rotate(x: torch.Tensor, mode: str) -> torch.Tensor:
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([-odd, even], -1).flatten(-2)


def _rotate_back(x: torch.Tensor, mode: str) -> torch.Tensor:
    """The transposed rotation, which is three further ones."""
    return -_rotate(x, mode)


def rotary_mul(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_mode: str = "half", rotate: Any = None
) -> torch.Tensor:
    """Give ``x * cos + rotated x * sin``, where ``rotary_mode`` pairs halves ("half") or neighbours ("interleave")."""
    return x * cos + _rotate(x, rotary_mode) * sin


def rotary_mul_backward(
    dy: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_mode: str = "half", *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx = dy * cos + _rotate_back(dy * sin, rotary_mode)
    return dx, (dy * x).sum_to_size(cos.shape), (dy * _rotate(x, rotary_mode)).sum_to_size(sin.shape)


# ------------------------------------------------------------------------------------------------------------ attention
def _to_heads(x: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """(batch, heads, length, head_dim) of a tensor in the layout "BNSD", "BSND", "BSH" or "SBH"."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    if layout == "SBH":
        x = x.transpose(0, 1)
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _from_heads(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The inverse of `_to_heads`."""
    if layout == "BNSD":
        return x.contiguous()
    x = x.transpose(1, 2)
    if layout == "BSND":
        return x.contiguous()
    x = x.flatten(2)
    return (x.transpose(0, 1) if layout == "SBH" else x).contiguous()


def _scores(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scale: float, sparse: int
) -> torch.Tensor:
    """Scaled products in float32, with -inf where ``mask`` is true."""
    scores = query.float() @ key.float().transpose(-2, -1) * scale
    if mask is not None:
        mask = mask.bool()
        if sparse in (2, 3):  # a causal mask, which is given as a triangle of fixed size: aligned left, aligned right
            shift = scores.shape[-1] - scores.shape[-2] if sparse == 3 else 0
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + shift)
        scores = scores.masked_fill(mask, -math.inf)
    return scores


def _check_attention(layout: str, keep_prob: float, pse: Any, sparse: int) -> None:
    if layout not in ("BNSD", "BSND", "BSH", "SBH"):
        raise NotImplementedError(f"npu_fusion_attention is simulated for BNSD, BSND, BSH and SBH, not for {layout}")
    if keep_prob != 1 or pse is not None or sparse not in (0, 1, 2, 3):
        raise NotImplementedError(
            "npu_fusion_attention is simulated without dropout, without position shift and with sparse_mode 0 to 3"
        )


def fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: Any = None,
    padding_mask: Any = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    *rest: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """softmax(query @ key.T * scale) @ value, with fewer heads in key and value where they divide.

    Returns (output, maximum and sum of the softmax, (batch, heads, length, 8) each, an empty tensor, and the state of
    the dropout that was not done: seed, offset, length).
    """
    _check_attention(input_layout, keep_prob, pse, sparse_mode)
    q = _to_heads(query, input_layout, head_num)
    k, v = (_heads_of_query(x, q, input_layout) for x in (key, value))
    scores = _scores(q, k, atten_mask, scale, sparse_mode)
    largest = scores.amax(-1, keepdim=True)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    out = ((weights / total).to(v.dtype) @ v).to(query.dtype)
    return (
        _from_heads(out, input_layout),
        largest.expand(*largest.shape[:-1], 8).contiguous(),
        total.expand(*total.shape[:-1], 8).contiguous(),
        torch.empty(0, dtype=query.dtype),
        0,
        0,
        0,
    )


def _heads_of_query(x: torch.Tensor, q: torch.Tensor, layout: str) -> torch.Tensor:
    """Key or value with as many heads as the query: each one repeated for the query heads that share it."""
    heads = _heads(x, q, layout)
    return _to_heads(x, layout, heads).repeat_interleave(q.shape[1] // heads, 1)


def _heads(x: torch.Tensor, q: torch.Tensor, layout: str) -> int:
    """The number of heads of key or value, given the query as (batch, heads, length, head_dim)."""
    if layout in ("BSH", "SBH"):
        return x.shape[-1] // q.shape[-1]
    return x.shape[1 if layout == "BNSD" else 2]


def _sum_shared(x: torch.Tensor, sharing: int) -> torch.Tensor:
    """The gradient of heads that ``sharing`` query heads shared."""
    return x.unflatten(1, (-1, sharing)).sum(2)


def fusion_attention_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dy: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Any = None,
    padding_mask: Any = None,
    atten_mask: torch.Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    sparse_mode: int = 0,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """Gradients by query, key and value, and empty ones by the position shift and the sink."""
    _check_attention(input_layout, keep_prob, pse, sparse_mode)
    q, d = (_to_heads(x, input_layout, head_num).float() for x in (query, dy))
    k, v = (_heads_of_query(x, q, input_layout).float() for x in (key, value))
    weights = _scores(q, k, atten_mask, scale_value, sparse_mode).softmax(-1)
    by_weights = d @ v.transpose(-2, -1)
    by_scores = weights * (by_weights - (by_weights * weights).sum(-1, keepdim=True)) * scale_value
    shared = [_sum_shared(x, q.shape[1] // _heads(key, q, input_layout)) for x in (by_scores.mT @ q, weights.mT @ d)]
    gradients = [_from_heads(x, input_layout).to(query.dtype) for x in (by_scores @ k, *shared)]
    return (*gradients, torch.empty(0, dtype=query.dtype), torch.empty(0, dtype=query.dtype))


# ------------------------------------------------------------------------------------------------------------ the table
def dtype_cast(x: torch.Tensor, dtype: torch.dtype, *rest: Any) -> torch.Tensor:
    """torch_npu's conversion, which it uses around HCCL for bool and uint8."""
    return x.to(dtype)


def unchanged(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    """A change of the storage format: here all tensors are stored in one way."""
    return x


#: operator of torch_npu -> its reference kernel on CPU tensors
KERNELS: dict[str, Callable[..., Any]] = {
    "npu_rms_norm": rms_norm,
    "npu_rms_norm_backward": rms_norm_backward,
    "npu_add_rms_norm": add_rms_norm,
    "npu_swiglu": swiglu,
    "npu_swiglu_backward": swiglu_backward,
    "npu_rotary_mul": rotary_mul,
    "npu_rotary_mul_backward": rotary_mul_backward,
    "npu_fusion_attention": fusion_attention,
    "npu_fusion_attention_grad": fusion_attention_backward,
    "_npu_dtype_cast": dtype_cast,
    "_npu_dtype_cast_backward": dtype_cast,
}
#: Operators that give their first argument back.
UNCHANGED = ("npu_format_cast", "_npu_format_cast", "npu_format_cast_")
#: Operators of which torch_npu's own kernel works: they look at tensors, not into them.
KEPT = ("get_npu_format", "get_storage_size", "npu_change_data_ptr")


def install() -> None:
    """Replace the kernels of torch_npu's own operators, in this process."""
    library = torch.library.Library("npu", "IMPL")
    _libraries.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of every kernel that is replaced
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
            namespace, _, operator = name.partition("::")
            packet = operator.partition(".")[0]
            if namespace != "npu" or packet in KEPT:
                continue
            if packet in UNCHANGED:
                kernel: Callable[..., Any] = unchanged
            elif operator in KERNELS:
                kernel = _on_host(KERNELS[operator])
            else:
                kernel = _missing(operator)
            library.impl(operator, kernel, "PrivateUse1", allow_override=True)


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel for tensors of the device that runs ``function`` on their host views."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with DisableTorchFunction(), torch.no_grad():
            device = next(x.device for x in tree_leaves((args, kwargs)) if is_on_device(x))
            args, kwargs = tree_map(lambda x: host_alias(x) if is_on_device(x) else x, (args, kwargs))
            out = function(*args, **kwargs)
            return tree_map(lambda y: to_device(y, device) if isinstance(y, torch.Tensor) else y, out)

    return kernel


def _missing(operator: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"torch_npu's operator {operator} is not simulated: add a reference kernel to KERNELS in "
            f"tests/simulated_npu/{inspect.getmodulename(__file__)}.py"
        )

    return kernel
