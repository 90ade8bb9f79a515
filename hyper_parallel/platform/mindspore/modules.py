"""Cells and parameters: walking, replacing, hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import mindspore as ms
from mindspore import Parameter, Tensor, mint, nn

from hyper_parallel.platform.base import ModuleKind
from hyper_parallel.platform.mindspore.parameter import make_distributed

__all__ = ["ModuleVerbs"]


class ModuleVerbs:
    """The groups "types and checks" and "modules" of the contract."""

    Tensor = Tensor
    Parameter = Parameter
    Module = nn.Cell
    Size = tuple
    linear_kinds: ClassVar[dict[type, ModuleKind]] = {nn.Dense: ModuleKind(), mint.nn.Linear: ModuleKind()}
    embedding_kinds: ClassVar[dict[type, ModuleKind]] = {
        nn.Embedding: ModuleKind("embedding_table", None),
        nn.EmbeddingLookup: ModuleKind("embedding_table", None),
        mint.nn.Embedding: ModuleKind(bias=None),
    }

    def is_tensor(self, x: Any) -> bool:
        return isinstance(x, Tensor)

    def is_floating_point(self, x: Any) -> bool:
        return x.dtype in _FLOATS

    def is_meta(self, x: Any) -> bool:
        return x.has_init or x.is_meta

    def shape_of(self, local: Any) -> tuple[int, ...]:
        return tuple(local._shape)

    def named_modules(self, root: Any) -> Iterator[tuple[str, Any]]:
        return root.cells_and_names()

    def named_parameters(self, module: Any) -> Iterator[tuple[str, Any]]:
        return iter([(name, p) for name, p in module._params.items() if p is not None])

    def named_buffers(self, module: Any) -> Iterator[tuple[str, Any]]:
        return iter([(name, b) for name, b in module._buffers.items() if b is not None])

    def set_buffer(self, module: Any, name: str, value: Any) -> None:
        module._buffers[name] = value

    def set_distributed_parameter(self, module: Any, name: str, local: Any, layout: Any) -> None:
        make_distributed(module._params[name], local, layout)

    def register_forward_pre_hook(
        self, module: Any, hook: Callable, *, prepend: bool = False, with_kwargs: bool = False
    ) -> Any:
        return module.register_forward_pre_hook(hook, prepend=prepend, with_kwargs=with_kwargs)

    def register_forward_hook(
        self, module: Any, hook: Callable, *, prepend: bool = False, with_kwargs: bool = False
    ) -> Any:
        return module.register_forward_hook(hook, prepend=prepend, with_kwargs=with_kwargs)


_FLOATS = (ms.float16, ms.bfloat16, ms.float32, ms.float64)
