"""State of torch's modules and optimizers that a checkpoint saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.contract import OptimizerState, Platform
from hyper_parallel.platform.torch.basics.private import swap_implementation
from hyper_parallel.platform.torch.handlers.optimizers import COUNTERS

__all__ = ["StateVerbs"]

#: Attribute names of modules inside wrappers (torch.compile and checkpoint_wrapper), which names in a checkpoint omit.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
_NAMES = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128"
_FLOAT8 = "float8_e4m3fn float8_e5m2"


class StateVerbs(Platform):
    """Verbs of `Platform` for checkpoints."""

    dtypes: Mapping[str, torch.dtype] = {
        name: getattr(torch, name) for name in f"{_NAMES} {_FLOAT8}".split() if hasattr(torch, name)
    }

    #: MindSpore's kernels are (out, in, 1, width).
    singleton_dims: Mapping[type, Mapping[str, int]] = {nn.Conv1d: {"weight": 2}, nn.ConvTranspose1d: {"weight": 2}}

    def saved_tensors(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield (path, tensor) for the tensors of a module that a checkpoint saves; see `Platform.saved_tensors`."""
        for path, submodule in module.named_modules(remove_duplicate=False):
            prefix = ".".join(part for part in path.split(".") if part not in _WRAPPERS)
            temporary = submodule._non_persistent_buffers_set
            held = [(n, b) for n, b in submodule._buffers.items() if n not in temporary]
            for name, x in [*submodule._parameters.items(), *held]:
                if x is not None:
                    yield f"{prefix}.{name}" if prefix else name, x

    def give_memory(self: Any, x: Tensor) -> None:
        """Allocate memory for a tensor without values; see `Platform.give_memory`."""
        with no_dispatch(), torch.no_grad():
            memory = torch.empty_like(x.detach().as_subclass(Tensor), device=self.device())
            # The implementation below the Python object is exchanged: class, attributes and weak references stay.
            swap_implementation(x, memory.requires_grad_(x.requires_grad))

    def is_optimizer(self, x: Any) -> bool:
        """Return whether ``x`` is an optimizer of the framework."""
        return isinstance(x, torch.optim.Optimizer)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> OptimizerState:
        """Return the present state of the optimizer."""
        groups = optimizer.param_groups
        parameters = [list(group["params"]) for group in groups]
        options = [{name: _option(x) for name, x in group.items() if name != "params"} for group in groups]
        state = [
            {name: x if _is_moment(name, p) else _number(x) for name, x in optimizer.state.get(p, {}).items()}
            for group in parameters
            for p in group
        ]
        return OptimizerState(parameters, options, state)

    def set_optimizer_state(self, optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
        """Set the state of the optimizer; see `Platform.set_optimizer_state`."""
        rows = iter(state.state)
        for group, options in zip(optimizer.param_groups, state.options, strict=True):
            for name, value in options.items():
                if isinstance(group.get(name), Tensor):
                    group[name].fill_(value)
                elif name in group and name != "params":
                    group[name] = value
            # Device of the optimizer's numbers; see `torch.optim.Optimizer.load_state_dict`.
            on_device = group.get("capturable") or group.get("fused")
            for p in group["params"]:
                held = optimizer.state[p]
                for name, value in next(rows).items():
                    if isinstance(held.get(name), Tensor) and not isinstance(value, Tensor):
                        held[name].fill_(value)
                    elif isinstance(value, float) and _is_moment(name, p):
                        held[name] = torch.full_like(p, value, requires_grad=False)
                    elif isinstance(value, float):
                        held[name] = torch.tensor(value, dtype=torch.float32, device=p.device if on_device else "cpu")
                    else:
                        held[name] = value
                if not held:
                    del optimizer.state[p]


def _is_moment(name: str, p: Tensor) -> bool:
    """Return whether a 0-d state tensor of a 0-d parameter ``p`` is a moment, not a counter of steps.

    A moment has the dtype and placements of ``p``.
    """
    return not p.ndim and name not in COUNTERS


def _number(x: Any) -> Any:
    """Return a 0-d tensor as a float, other values unchanged."""
    return float(x) if isinstance(x, Tensor) and not x.ndim else x


def _option(x: Any) -> Any:
    return x.item() if isinstance(x, Tensor) and x.numel() == 1 else x
