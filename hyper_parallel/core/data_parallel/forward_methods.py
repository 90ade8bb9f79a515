"""Methods other than forward that compute with the parameters of a unit; several models that train together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from types import MethodType
from typing import Any

from hyper_parallel.core.data_parallel.module_methods import FSDPModule
from hyper_parallel.core.data_parallel.units import is_unit, unit_of

__all__ = ["register_fsdp_forward_method", "share_comm_ctx"]


def register_fsdp_forward_method(module: Any, method_name: str) -> None:
    """Let a method of a module compute with whole parameters, as its forward does.

    Args:
        module: module to which `fully_shard` was applied. Nothing happens to another one.
        method_name: name of the method.

    Raises:
        ValueError: for a method that the module does not have.

    Example:
        >>> import torch
        >>> from hyper_parallel import fully_shard, init_device_mesh, register_fsdp_forward_method
        >>> class Scale(torch.nn.Linear):
        ...     def total(self):
        ...         return self.weight.sum()
        >>> scale = fully_shard(Scale(4, 6), mesh=init_device_mesh("cpu", (1,)))
        >>> register_fsdp_forward_method(scale, "total")
        >>> type(scale.total()) is torch.Tensor
        True

    Source: ``torch.distributed.fsdp.register_fsdp_forward_method``.
    """
    if not is_unit(module):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"register_fsdp_forward_method: a {type(module).__name__} has no method {method_name!r}")
    own = getattr(method, "__self__", None) is module
    # The function is called with the module at hand, which may be a copy.
    function = method.__func__ if own else lambda _, *args, **kwargs: method(*args, **kwargs)

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return unit_of(self).run(self, function, args, kwargs)

    object.__setattr__(module, method_name, MethodType(run, module))


def share_comm_ctx(modules: Sequence[Any]) -> None:
    """Let several models share the state of their communication. The call changes nothing: all models share it always.

    Collectives run on the streams of their groups.

    Args:
        modules: modules to which `fully_shard` was applied.

    Raises:
        ValueError: for other modules.

    Source: ``torch.distributed.fsdp.share_comm_ctx``.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"share_comm_ctx takes modules to which fully_shard was applied, got a {type(module).__name__}"
            )
