"""Optimizers whose arithmetic is element-wise step on the local tensors, at the speed of plain ones.

Every optimizer is right without this module, one intercepted operation after the other. Here ``step`` of the listed
classes is wrapped once, when the DTensor class is made: interception is off while it runs, the closure and hooks
excepted, and the state that it made is retagged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as no_dispatch
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils

from hyper_parallel.platform.torch.op_table.binding import words
from hyper_parallel.platform.torch.tensor import is_dtensor, wrap

__all__ = ["hook_optimizers"]

_ELEMENTWISE = words("SGD Adam AdamW Adagrad Adadelta Adamax NAdam RAdam RMSprop Rprop ASGD")


def hook_optimizers(tensor_class: type) -> None:
    """Wrap ``step`` of the element-wise optimizers, and let optimizers and gradient clipping choose the variants over
    lists for DTensors wherever they choose them for plain tensors."""
    for module in (torch_optimizer, _foreach_utils):
        getattr(module, "_foreach_supported_types", []).append(tensor_class)
    for name in _ELEMENTWISE:
        cls = getattr(torch.optim, name)
        if "step" in vars(cls):
            cls.step = _wrapped(cls.step)


def _wrapped(step: Any) -> Any:
    # Once a class has an instance, torch has put profiling and hooks around its step: these stay outside.
    is_hooked = getattr(step, "hooked", False)
    inner = step.__wrapped__ if is_hooked else step

    @functools.wraps(inner)
    def local_step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        if not _is_local(self, parameters):
            return inner(self, closure)
        with no_dispatch():
            loss = inner(self, None if closure is None else _intercepted(closure))
            _retag_state(self, parameters)
        return loss

    if not is_hooked:
        return local_step
    hooked: Any = torch.optim.Optimizer.profile_hook_step(local_step)
    hooked.hooked = True
    return hooked


def _is_local(optimizer: Any, parameters: list[Any]) -> bool:
    """Whether some parameter is distributed, and each is laid out like its gradient."""
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return False
    found = False
    with no_dispatch():
        for p in parameters:
            if is_dtensor(p):
                found, layout = True, p._layout
                if layout.cotangent is not layout:
                    return False
                gradient = p.grad
                # A gradient that nobody has looked at yet is not tagged: backward left it with the right layout.
                if is_dtensor(gradient) and gradient._layout is not layout:
                    return False
    return found


def _intercepted(closure: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with torch._C._EnableTorchFunction():
            return closure()

    return run


def _retag_state(optimizer: Any, parameters: list[Any]) -> None:
    for p in parameters:
        if not is_dtensor(p):
            continue
        for value in optimizer.state[p].values() if p in optimizer.state else ():
            if type(value) is torch.Tensor and value.dim() and value.shape == p.shape:
                wrap(value, p._layout)
