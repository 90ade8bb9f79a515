"""Modules and parameters of torch.nn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch._C import DisableTorchFunctionSubclass as no_dispatch
from torch.nn.modules.module import _global_backward_hooks as _backward_hooks
from torch.nn.modules.module import _global_backward_pre_hooks as _backward_pre_hooks
from torch.nn.modules.module import _global_forward_hooks as _forward_hooks
from torch.nn.modules.module import _global_forward_pre_hooks as _forward_pre_hooks

from hyper_parallel.platform.base import ModuleKind, Platform
from hyper_parallel.platform.torch.tensor import is_dtensor, wrap

__all__ = ["ModuleVerbs"]

is_tracing = torch._C._get_tracing_state


class ModuleVerbs(Platform):
    """The verbs of `Platform` about modules."""

    linear_kinds: ClassVar[dict[type, ModuleKind]] = {nn.Linear: ModuleKind()}
    embedding_kinds: ClassVar[dict[type, ModuleKind]] = {nn.Embedding: ModuleKind(bias=None)}
    norm_kinds: ClassVar[dict[type, Callable[[Any], int]]] = {
        nn.LayerNorm: lambda module: len(module.normalized_shape),
        nn.RMSNorm: lambda module: len(module.normalized_shape),
    }

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

    def own_parameters(self, module: Any) -> Mapping[str, torch.Tensor | None]:
        """See `Platform.own_parameters`."""
        return module.__dict__["_parameters"]

    def is_plain_linear(self, module: Any) -> bool:
        """See `Platform.is_plain_linear`."""
        return type(module) is nn.Linear

    #: See `Platform.linear`.
    linear: Any = staticmethod(F.linear)

    def replace_forward(self, module: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """See `Platform.replace_forward`."""
        cls: Any = type(module)
        module.__dict__["_replaced_forward"] = make(cls.forward)
        module.__class__ = _class_with_replaced_forward(cls)

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


@cache
def _class_with_replaced_forward(cls: type) -> type:
    """A subclass under the same name. The object keeps a function, not a bound method: copies run it on themselves."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._replaced_forward(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """`Module.__call__` without the three calls in between, where nothing asks for them."""
        state = self.__dict__
        if (
            state["_forward_pre_hooks"]
            or state["_forward_hooks"]
            or state["_backward_pre_hooks"]
            or state["_backward_hooks"]
            or "forward" in state
            or "_compiled_call_impl" in state
            or _forward_pre_hooks
            or _forward_hooks
            or _backward_pre_hooks
            or _backward_hooks
            or is_tracing() is not None
        ):
            return cls.__call__(self, *args, **kwargs)
        return state["_replaced_forward"](self, *args, **kwargs)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**names, "forward": forward, "__call__": call})


def wrap_parameter(parameter: Any, layout: Any) -> None:
    """Retag a parameter, distributed or not; it stays an instance of `torch.nn.Parameter`."""
    if is_dtensor(parameter):
        parameter._layout = layout
        parameter.__dict__.pop("_cached", None)
    else:
        wrap(parameter, layout)
    parameter._is_param = True
