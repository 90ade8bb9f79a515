"""Modules and parameters of torch.nn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.base import Platform
from hyper_parallel.platform.torch.tensor import is_dtensor, wrap

__all__ = ["ModuleVerbs", "register_embedding_module", "register_linear_module"]

#: Classes that count as linear and embedding layers, with their subclasses.
_LINEAR: list[type] = [nn.Linear]
_EMBEDDING: list[type] = [nn.Embedding]


def register_linear_module(cls: type) -> None:
    """Let `ColwiseParallel` and `RowwiseParallel` treat ``cls`` as a linear layer: it computes
    ``F.linear(x, self.weight, self.bias)`` with a weight of shape (out_features, in_features)."""
    if cls not in _LINEAR:
        _LINEAR.append(cls)


def register_embedding_module(cls: type) -> None:
    """Let the styles treat ``cls`` as an embedding: it looks rows up in ``self.weight`` with ``F.embedding``."""
    if cls not in _EMBEDDING:
        _EMBEDDING.append(cls)


class ModuleVerbs(Platform):
    """The verbs of `Platform` about modules."""

    def is_linear_module(self, module: Any) -> bool:
        """See `Platform.is_linear_module`."""
        return isinstance(module, tuple(_LINEAR))

    def is_embedding_module(self, module: Any) -> bool:
        """See `Platform.is_embedding_module`."""
        return isinstance(module, tuple(_EMBEDDING))

    def weight_name(self, module: nn.Module) -> str:
        """See `Platform.weight_name`."""
        return "weight"

    def bias_name(self, module: nn.Module) -> str | None:
        """See `Platform.bias_name`."""
        return None if getattr(module, "bias", None) is None else "bias"

    def named_modules(self, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """See `Platform.named_modules`."""
        return root.named_modules()

    def named_parameters(self, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Platform.named_parameters`."""
        return ((name, p) for name, p in module._parameters.items() if p is not None)

    def named_buffers(self, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Platform.named_buffers`."""
        return ((name, b) for name, b in module._buffers.items() if b is not None)

    def set_buffer(self, module: nn.Module, name: str, value: torch.Tensor) -> None:
        """See `Platform.set_buffer`."""
        if name not in module._buffers:
            raise AttributeError(f"{type(module).__name__} has no buffer {name!r}")
        module._buffers[name] = value

    def set_distributed_parameter(self, module: nn.Module, name: str, local: torch.Tensor, layout: Any) -> None:
        """See `Platform.set_distributed_parameter`. The parameter object stays the same one."""
        parameter = module._parameters.get(name)
        if parameter is None:
            raise AttributeError(f"{type(module).__name__} has no parameter {name!r}")
        with no_dispatch(), torch.no_grad():
            local = local.detach()
            gradient, parameter.grad = parameter.grad, None
            if torch._has_compatible_shallow_copy_type(parameter, local):
                # A graph that is still alive holds an accumulator made for the old shape. Torch drops it when the
                # dtype changes, so take the detour over another dtype.
                other = torch.float64 if parameter.dtype != torch.float64 else torch.float32
                if parameter.is_floating_point():
                    parameter.data = torch.empty(0, dtype=other, device=parameter.device)
                parameter.data = local
            else:
                # From another device (meta): exchange what is below the Python object.
                torch.utils.swap_tensors(parameter, nn.Parameter(local, parameter.requires_grad))
            wrap_parameter(parameter, layout)
            if gradient is not None and tuple(gradient.shape) == tuple(layout.shape) and not is_dtensor(gradient):
                parameter.grad = gradient[layout.local_index()].clone()

    def register_forward_pre_hook(
        self, module: nn.Module, hook: Callable, *, prepend: bool = False, with_kwargs: bool = False
    ) -> Any:
        """See `Platform.register_forward_pre_hook`."""
        return module.register_forward_pre_hook(hook, prepend=prepend, with_kwargs=with_kwargs)

    def register_forward_hook(
        self, module: nn.Module, hook: Callable, *, prepend: bool = False, with_kwargs: bool = False
    ) -> Any:
        """See `Platform.register_forward_hook`."""
        return module.register_forward_hook(hook, prepend=prepend, with_kwargs=with_kwargs)


def wrap_parameter(parameter: Any, layout: Any) -> None:
    """Retag a parameter, distributed or not; it stays an instance of `torch.nn.Parameter`."""
    if is_dtensor(parameter):
        parameter._layout = layout
        parameter.__dict__.pop("_cached", None)
    else:
        wrap(parameter, layout)
    parameter._is_param = True
