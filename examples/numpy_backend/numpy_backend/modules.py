"""Modules: a tree of layers with parameters, buffers and hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hyper_parallel.platform.module_text import text_of_plan
from numpy_backend import layers
from numpy_backend.array import Array, Parameter

__all__ = ["CrossEntropy", "Embedding", "LayerNorm", "Linear", "Module"]


class Module:
    """A layer. Parameters, buffers and modules that are assigned to it are its own."""

    def __init__(self) -> None:
        for table in ("parameters", "buffers", "modules"):
            object.__setattr__(self, f"_{table}", {})
        self._before: list[tuple[Callable, bool]] = []
        self._after: list[tuple[Callable, bool]] = []

    def __setattr__(self, name: str, value: Any) -> None:
        table: Any = None
        if isinstance(value, Parameter):
            table = self._parameters
        elif isinstance(value, Module):
            table = self._modules
        elif isinstance(value, Array) and name in self._buffers:
            table = self._buffers
        if table is None:
            object.__setattr__(self, name, value)
        else:
            table[name] = value

    def __getattr__(self, name: str) -> Any:
        for table in ("_parameters", "_buffers", "_modules"):
            if name in self.__dict__.get(table, ()):
                return self.__dict__[table][name]
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    def __repr__(self) -> str:
        """The module's layers, a line each, with their styles."""
        lines = [text_of_plan(self, self._parameters, type(self).__name__)]
        for name, module in self._modules.items():
            lines += f"{name}: {module!r}".split("\n")
        return "\n  ".join(lines)

    def register_buffer(self, name: str, value: Array) -> None:
        """An array that is part of the module and not learnt."""
        self._buffers[name] = value

    def named_modules(self, prefix: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Module]]:
        """(path, module), parents first, each once."""
        seen = set() if seen is None else seen
        if id(self) in seen:
            return
        seen.add(id(self))
        yield prefix, self
        for name, module in self._modules.items():
            yield from module.named_modules(f"{prefix}.{name}" if prefix else name, seen)

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """(path, parameter) of all of the tree, each once."""
        seen = set()
        for path, module in self.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{path}.{name}" if path else name, parameter

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output of a call."""
        raise TypeError(f"{type(self).__name__} has no forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for hook, with_kwargs in list(self._before):
            changed = hook(self, args, kwargs) if with_kwargs else hook(self, args)
            if changed is not None:
                if with_kwargs:
                    args, kwargs = changed
                else:
                    args = changed if isinstance(changed, tuple) else (changed,)
        replaced = self.__dict__.get("_replaced_forward")
        output = self.forward(*args, **kwargs) if replaced is None else replaced(self, *args, **kwargs)
        for hook, with_kwargs in list(self._after):
            changed = hook(self, args, kwargs, output) if with_kwargs else hook(self, args, output)
            output = output if changed is None else changed
        return output


class Hook:
    """A hook that can be taken off."""

    def __init__(self, hooks: list, entry: tuple) -> None:
        self._hooks, self._entry = hooks, entry

    def remove(self) -> None:
        """Take it off."""
        if self._entry in self._hooks:
            self._hooks.remove(self._entry)


class Linear(Module):
    """``x @ weight.T + bias``."""

    def __init__(self, n_in: int, n_out: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = Parameter(np.zeros((n_out, n_in), np.float32))
        if bias:
            self.bias = Parameter(np.zeros(n_out, np.float32))
        else:
            self._parameters["bias"] = None

    def forward(self, x: Any) -> Any:
        """(..., n_in) -> (..., n_out)."""
        return layers.linear(x, self.weight, self.bias)


class Embedding(Module):
    """Rows of a weight."""

    def __init__(self, count: int, features: int) -> None:
        super().__init__()
        self.weight = Parameter(np.zeros((count, features), np.float32))

    def forward(self, ids: Any) -> Any:
        """(...) -> (..., features)."""
        return layers.embedding(ids, self.weight)


class LayerNorm(Module):
    """Layer norm over the last dimension."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = Parameter(np.ones(features, np.float32))
        self.bias = Parameter(np.zeros(features, np.float32))

    def forward(self, x: Any) -> Any:
        """(..., features) -> the same."""
        return layers.layer_norm(x, self.weight, self.bias)


class CrossEntropy(Module):
    """`layers.cross_entropy` as a module."""

    def __init__(self, reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.options = (reduction, ignore_index, label_smoothing)

    def forward(self, logits: Any, target: Any) -> Any:
        """(rows, classes, ...), (rows, ...) -> the loss."""
        return layers.cross_entropy(logits, target, None, *self.options)
