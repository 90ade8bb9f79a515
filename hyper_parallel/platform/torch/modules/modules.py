"""Modules and parameters of torch.nn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.contract import ModuleKind, Platform
from hyper_parallel.platform.torch.basics.private import same_implementation
from hyper_parallel.platform.torch.basics.tensor import is_dtensor, wrap
from hyper_parallel.platform.torch.compiled.hooks import around_calls, compiled_hook
from hyper_parallel.platform.torch.handlers.gradient_hooks import keep_hooks
from hyper_parallel.platform.torch.modules import calls

__all__ = ["ModuleVerbs"]


class ModuleVerbs(Platform):
    """Verbs of `Platform` for modules."""

    linear_kinds: ClassVar[dict[type, ModuleKind]] = {nn.Linear: ModuleKind()}
    embedding_kinds: ClassVar[dict[type, ModuleKind]] = {nn.Embedding: ModuleKind(bias=None)}
    norm_kinds: ClassVar[dict[type, Callable[[Any], int | None]]] = {
        nn.LayerNorm: lambda module: len(module.normalized_shape),
        nn.RMSNorm: lambda module: len(module.normalized_shape),
    }

    def named_modules(self, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield (path, module) for ``root`` and its submodules, parents first."""
        return root.named_modules()

    def named_buffers(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, buffer) for the buffers that ``module`` itself holds."""
        return ((name, b) for name, b in module._buffers.items() if b is not None)

    def set_buffer(self, module: nn.Module, name: str, value: Tensor) -> None:
        """Replace a buffer."""
        if name not in module._buffers:
            raise AttributeError(f"{type(module).__name__} has no buffer {name!r}")
        module._buffers[name] = value

    def set_distributed_parameter(self, module: nn.Module, name: str, local: Tensor, layout: Any) -> None:
        """Turn the parameter ``module.<name>`` into a distributed parameter. The parameter object stays the same."""
        parameter = module._parameters.get(name)
        if parameter is None:
            raise AttributeError(f"{type(module).__name__} has no parameter {name!r}")
        with no_dispatch(), torch.no_grad():
            local = local.detach()
            gradient, parameter.grad = parameter.grad, None
            if same_implementation(parameter, local):
                # A live graph holds an accumulator made for the old shape. Torch drops it when the dtype changes, so
                # another dtype is set in between.
                other = torch.float64 if parameter.dtype != torch.float64 else torch.float32
                if parameter.is_floating_point():
                    parameter.data = torch.empty(0, dtype=other, device=parameter.device)
                parameter.data = local
            else:
                # From another device (meta): exchange the implementation below the Python object.
                torch.utils.swap_tensors(parameter, nn.Parameter(local, parameter.requires_grad))
            wrap_parameter(parameter, layout)
            if gradient is not None and tuple(gradient.shape) == tuple(layout.shape) and not is_dtensor(gradient):
                parameter.grad = gradient[layout.local_index()].clone()

    #: The table of parameters that ``module`` itself holds; see `Platform.own_parameters`.
    own_parameters: Any = staticmethod(attrgetter("_parameters"))

    #: Function that lets calls of ``module`` run ``make(forward)``; see `Platform.replace_forward`.
    replace_forward: Any = staticmethod(calls.replace_forward)

    def show_styles(self, module: nn.Module) -> None:
        """Add styles and placements to the representation of ``module``; see `Platform.show_styles`."""
        calls.call_quickly(module)

    #: Function that lets the compiler trace the forward that ``how`` describes; see `Platform.set_compiled_forward`.
    set_compiled_forward: Any = staticmethod(calls.set_compiled_forward)
    #: Function that returns ``hook``, or a replacement for the compiler; see `Platform.compiled_hook`.
    compiled_hook: Any = staticmethod(compiled_hook)
    #: See `Platform.around_calls`.
    around_calls: Any = staticmethod(around_calls)
    #: See `Platform.share_compiled_inputs`.
    share_compiled_inputs: Any = staticmethod(calls.share_compiled_inputs)

    def register_forward_pre_hook(
        self, module: nn.Module, hook: Callable, *, prepend: bool = False, with_kwargs: bool = False
    ) -> Any:
        """Register a hook that runs before forward; see `Platform.register_forward_pre_hook`."""
        calls.call_quickly(module)
        return module.register_forward_pre_hook(hook, prepend=prepend, with_kwargs=with_kwargs)

    def register_forward_hook(self, module: nn.Module, hook: Callable, **how: bool) -> Any:
        """Register a hook that runs after forward; see `Platform.register_forward_hook`."""
        calls.call_quickly(module)
        return module.register_forward_hook(hook, **how)


def wrap_parameter(parameter: Any, layout: Any) -> None:
    """Turn a parameter into a DTensor, or change its layout. The object stays an instance of `torch.nn.Parameter`."""
    if is_dtensor(parameter):
        parameter._layout = layout
        parameter.__dict__.pop("_cached", None)
    else:
        wrap(parameter, layout)
    parameter._is_param = True
    keep_hooks(parameter)
