"""Cells and parameters: traversal, replacement, hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
from mindspore import COOTensor, CSRTensor, Parameter, Tensor, dtype_to_nptype, mint, nn, ops

from hyper_parallel.platform.contract import ModuleKind
from hyper_parallel.platform.mindspore.around import around_calls
from hyper_parallel.platform.mindspore.basics.dtypes import FLOATS
from hyper_parallel.platform.mindspore.basics.private import RECOMPUTE, Casts, CheckedCell
from hyper_parallel.platform.mindspore.compiled.cells import compiled_hook, set_compiled_forward, share_compiled_inputs
from hyper_parallel.platform.mindspore.handlers.dropout import share_draws
from hyper_parallel.platform.mindspore.processes.collectives import copied, dense, is_dense
from hyper_parallel.platform.mindspore.processes.launch import device_target
from hyper_parallel.platform.mindspore.tensors.parameter import make_distributed
from hyper_parallel.platform.mindspore.tensors.parameter_tuples import read_from_table
from hyper_parallel.platform.mindspore.tensors.stand_ins import seen_writes, stand_for
from hyper_parallel.platform.module_text import text_of_plan

__all__ = ["ModuleVerbs"]


class ModuleVerbs:
    """MindSpore's implementation of `ModuleRole`."""

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
    norm_kinds: ClassVar[dict[type, Callable[[Any], int | None]]] = {
        mint.nn.LayerNorm: lambda module: len(module.normalized_shape),
        nn.LayerNorm: lambda module: -module.begin_norm_axis if module.begin_norm_axis < 0 else None,
    }

    def foreign_tensor(self, x: Any) -> str | None:
        if isinstance(x, _SPARSE):
            return f"a {type(x).__name__}, which is not a dense tensor: pass x.to_dense()"
        return None

    def is_floating_point(self, x: Any) -> bool:
        return x.dtype in FLOATS

    def is_meta(self, x: Any) -> bool:
        return x.has_init or x.is_meta

    def bytes_of(self, x: Any) -> bytes:
        return x.get_bytes()

    def as_parameter(self, x: Any, in_buffer: bool = False) -> Any:
        # MindSpore writes to no view. A 0-d view counts as one even if it is all of its buffer.
        if not x._requires_grad and is_dense(x) and (x.ndim or not in_buffer):
            # If a forward writes to `Tensor.data`, backward may read the previous values.
            x = ops.stop_gradient(x)
        elif not x._requires_grad and (x.ndim < 2 or device_target() == "CPU"):
            # Counters and running statistics; on CPU, where no operation writes to a view, all untrained tensors.
            x = copied(x)
        return x

    stand_for: Any = staticmethod(stand_for)
    seen_writes: Any = staticmethod(seen_writes)

    def write(self, x: Any, values: Any) -> None:
        if is_dense(x):
            x.copy_(dense(values))
        else:
            # Into a view, `copy_` would silently write nothing on CPU.
            x.assign_value(dense(values))

    def from_bytes(self, values: Any, shape: Any, dtype: Any) -> Any:
        memory = memoryview(values)
        if not memory.nbytes:
            return mint.empty(tuple(shape), dtype=dtype)
        element = np.dtype(dtype_to_nptype(dtype))
        if element.kind not in "biufc":  # a type that NumPy itself lacks
            return Tensor(Tensor.convert_bytes_to_tensor(memory.tobytes(), tuple(shape), dtype))
        writable = bytearray(memory) if memory.readonly else memory  # the tensor has this memory, and is written to
        return Tensor.from_numpy(np.frombuffer(writable, element).reshape(tuple(shape)))

    def free_storage(self, x: Any) -> None:
        x.untyped_storage().resize_(0)

    def refill_storage(self: Any, x: Any, pieces: Any) -> None:
        storage = x.untyped_storage()
        if storage.nbytes() != x.nbytes:
            storage.resize_(x.nbytes)
        x.copy_(self.join(pieces))

    def shape_of(self, local: Any) -> tuple[int, ...]:
        return tuple(local._shape)

    def named_modules(self, root: Any) -> Iterator[tuple[str, Any]]:
        return root.cells_and_names()

    def named_buffers(self, module: Any) -> Iterator[tuple[str, Any]]:
        return iter([(name, b) for name, b in module._buffers.items() if b is not None])

    def set_buffer(self, module: Any, name: str, value: Any) -> None:
        module._buffers[name] = value

    def set_distributed_parameter(self, module: Any, name: str, local: Any, layout: Any) -> None:
        make_distributed(module._params[name], local, layout)

    def show_styles(self, module: Any) -> None:
        if not getattr(type(module), "_shows_styles", False):
            cls: Any = type(module)
            module.__class__ = _class_with_styles(cls)

    own_parameters: Any = staticmethod(attrgetter("_params"))

    def replace_forward(self, module: Any, make: Callable[[Callable], Callable], mixin: type | None = None) -> None:
        if mixin is not None:
            # Other tensors may replace parameters when the cell is first called, so its checks run now.
            for _, cell in module.cells_and_names():
                read_from_table(cell)
                if not (cell._init_flag or cell._is_check_and_refresh):
                    CheckedCell._init_check(cell)
                    CheckedCell._self_check(cell)
        cls: Any = type(module)
        replaced = module.__dict__.get("_replaced_forward")
        forward = cls.construct if replaced is None else replaced
        object.__setattr__(module, "_replaced_forward", make(forward) if mixin is None else _cast_inside(make, forward))
        if replaced is None or mixin is not None:
            module.__class__ = _class_with_replaced_forward(cls, mixin)
        if module._recompute_cell is not None:
            module._recompute_cell = _computed_again(module._recompute_cell, module.construct)

    set_compiled_forward: Any = staticmethod(set_compiled_forward)
    compiled_hook: Any = staticmethod(compiled_hook)
    around_calls: Any = staticmethod(around_calls)
    share_compiled_inputs: Any = staticmethod(share_compiled_inputs)
    share_draws: Any = staticmethod(share_draws)

    #: MindSpore stores a cell or a function there, depending on ``use_reentrant`` of `Cell.recompute`.
    differentiates_again: Any = staticmethod(lambda module: isinstance(module._recompute_cell, nn.Cell))


def _cast_inside(make: Callable[[Callable], Callable], forward: Callable) -> Callable:
    """Return ``make(forward)``, in which the casts of `Cell.to_float` apply to ``forward`` alone. MindSpore would also
    cast the tensors outside ``forward``, such as gathered parameters."""

    def cast(module: Any, *args: Any, **kwargs: Any) -> Any:
        kind = module.mixed_precision_type
        if kind is None:
            return forward(module, *args, **kwargs)
        with Casts(kind):
            return forward(module, *args, **kwargs)

    around = make(cast)

    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        if module.mixed_precision_type is None:
            return around(module, *args, **kwargs)
        with Casts(Casts.NONE):
            return around(module, *args, **kwargs)

    return run


def _computed_again(made: Any, construct: Callable) -> Any:
    """Return a new recompute cell for another ``construct``, because the present one stores the previous
    ``construct``."""
    if isinstance(made, nn.Cell):
        return RECOMPUTE.get()(construct)
    options = inspect.getclosurevars(made).nonlocals
    return RECOMPUTE.get()(
        construct, False, *(options[name] for name in ("output_recompute", "early_stop", "context_fn"))
    )


@cache
def _class_with_replaced_forward(cls: type, mixin: type | None) -> type:
    """Return a subclass with the same name, which runs the forward that is stored on the cell.

    The forward is stored unbound, and gets the called cell as its first argument. So it also works in a copy of the
    cell.
    """

    def construct(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._replaced_forward(self, *args, **kwargs)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    bases = (cls,) if mixin is None else (mixin, cls)
    return type(cls.__name__, bases, {**names, "construct": construct, "_of_style": True})


@cache
def _class_with_styles(cls: type) -> type:
    """Return a subclass with the same name whose text shows the effect of the plan on a cell."""

    def extend_repr(self: Any) -> str:
        return text_of_plan(self, self._params, cls.extend_repr(self))  # type: ignore[attr-defined]

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**names, "extend_repr": extend_repr, "_shows_styles": True, "_of_style": True})


_SPARSE = (COOTensor, CSRTensor)
