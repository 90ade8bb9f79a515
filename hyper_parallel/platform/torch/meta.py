"""torch on the meta device, whose tensors have shapes and no data: for dry runs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as no_dispatch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from hyper_parallel.platform.contract.dry import Usage
from hyper_parallel.platform.torch.basics.decoder import make_decoder
from hyper_parallel.platform.torch.basics.private import TorchDispatchMode, fused_attention
from hyper_parallel.platform.torch.basics.usage import UsageMode, resized
from hyper_parallel.platform.torch.cpu import TorchCpuPlatform
from hyper_parallel.platform.torch.fast import TorchFast

__all__ = ["TorchMetaPlatform"]

_META = torch.device("meta")


class _FusedAttention(TorchFunctionMode):
    """Attention as the fused kernels of CPUs and GPUs compute it, which save no scores. By default, torch uses the
    unfused formula for tensors without data, whose scores would count as activations."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Replace the call if the fused kernel supports it."""
        if func is F.scaled_dot_product_attention and all(type(x) is Tensor for x in args[:3]):
            fused = _fused_attention(*args, **(kwargs or {}))
            if fused is not None:
                return fused
        return func(*args, **(kwargs or {}))


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if (
        fused_attention is None
        or dropout_p
        or query.dim() != 4
        or not query.is_meta
        or query.shape[-1] != value.shape[-1]
    ):
        return None
    if enable_gqa and query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    return fused_attention(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


class _Kernels(TorchDispatchMode):
    """Mode in which kernels run with interception off. Kernels of tensors without data are partly Python, and would
    otherwise see DTensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Call the kernel with interception off."""
        with no_dispatch():
            return func(*args, **(kwargs or {}))


class _MetaFast(TorchFast):
    """Fast paths without `gathered_rows`, which allocates storage without telling `UsageMode`."""

    def gathered_rows(self, whole: Tensor, count: int, lengths: Sequence[int]) -> Any:
        """Return None: the fast path is not available."""
        return None


class TorchMetaPlatform(TorchCpuPlatform):
    """Base of the dry runs of all torch backends."""

    device_type = "meta"
    needs_values = False

    def __init__(self) -> None:
        super().__init__()
        self.fast = _MetaFast(self)

    def device(self) -> torch.device:
        """Return the meta device."""
        return _META

    def to_device(self, x: Tensor) -> Tensor:
        """Return ``x`` on the meta device without values. The result is detached from the graph of ``x``, because no
        gradient can go back to ``x``."""
        self.check_local(x)
        if x.is_meta:
            return x
        return x.detach().to(_META).requires_grad_(x.requires_grad)

    def copy_without_data(self, module: nn.Module) -> nn.Module:
        """Return a copy of a module without data, for a dry run. Ties, and tensors that are plain attributes, are
        preserved."""
        memo: dict[int, Any] = {}
        for submodule in module.modules():
            for x in (*submodule._parameters.values(), *submodule._buffers.values(), *vars(submodule).values()):
                if isinstance(x, Tensor) and id(x) not in memo:
                    memo[id(x)] = _on_meta(x)
        new: nn.Module = copy.deepcopy(module, memo)
        return new

    @contextmanager
    def without_data(self) -> Iterator[None]:
        """Return a context in which new tensors have no data; see `Platform.without_data`."""
        with _META, _FusedAttention(), _Kernels():
            yield

    def free_storage(self, x: Tensor) -> None:
        """Free the memory of ``x``; see `Platform.free_storage`."""
        super().free_storage(x)
        resized(x)

    def refill_storage(self, x: Tensor, pieces: Sequence[Tensor]) -> None:
        """Allocate the memory of ``x`` again and write ``pieces`` into it; see `Platform.refill_storage`."""
        super().refill_storage(x, pieces)
        resized(x)

    def recompute(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``call`` under activation checkpointing, without restoring random state. Backward disables the active
        modes, so the recomputation enters them again."""

        def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
            return nullcontext(), self.without_data()

        return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)

    #: Function that returns a decoder with the layers and names of Llama; see `Platform.make_decoder`.
    make_decoder: Any = staticmethod(make_decoder)

    def usage(self) -> AbstractContextManager[Usage]:
        """Return a context manager that yields the work and memory of the operations inside; see `Platform.usage`."""
        return UsageMode()

    def optimizer_bytes(self, parameters: Any, optimizer: str) -> int | None:
        """Return the bytes of optimizer state for ``parameters`` after a first step; see `Platform.optimizer_bytes`."""
        cls = getattr(torch.optim, optimizer, None)
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            return None
        own = list(parameters)
        before = [p.grad for p in own]
        try:
            for p in own:
                p.grad = torch.zeros_like(p)
            made = cls(own)
            made.step()
            state = [x for held in made.state.values() for x in held.values() if isinstance(x, Tensor)]
            return sum(_local_bytes(x) for x in state)
        finally:
            for p, gradient in zip(own, before, strict=True):
                p.grad = gradient


def _local_bytes(x: Tensor) -> int:
    with no_dispatch():
        return x.numel() * x.element_size()


def _on_meta(x: Tensor) -> Tensor:
    new = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=_META)
    return nn.Parameter(new, x.requires_grad) if isinstance(x, nn.Parameter) else new.requires_grad_(x.requires_grad)
