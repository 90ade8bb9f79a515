"""The backend: the verbs of HyperParallel's contract, in NumPy. Each verb is a line or two."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np

from hyper_parallel.platform.contract import Core, ModuleKind, NativeGroup, NativeOp, Platform
from hyper_parallel.platform.contract.autograd import BACKWARD_WRAPPERS
from hyper_parallel.platform.timeout import timeout_seconds
from numpy_backend import (
    interception,
    methods,  # noqa: F401 - which gives arrays their operators
    modules,
    operations,
    processes,
    random,
)
from numpy_backend.array import Array, Node, Parameter, in_backward, no_recording, recording

__all__ = ["NumpyPlatform"]


_DTYPES = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"


class _Context:
    """Values that an autograd function keeps for its backward."""

    saved_tensors: tuple = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep arrays, with their history."""
        self.saved_tensors = tensors


class NumpyPlatform(Platform):
    """`numpy`."""

    name = "numpy"
    device_type = "cpu"
    comm_backend = "processes"
    watches_draws = True

    Tensor = Array
    Parameter = Parameter
    Module = modules.Module
    Size = tuple
    linear_kinds: ClassVar[dict[type, ModuleKind]] = {modules.Linear: ModuleKind()}
    embedding_kinds: ClassVar[dict[type, ModuleKind]] = {modules.Embedding: ModuleKind(bias=None)}
    norm_kinds: ClassVar[dict[type, Callable[[Any], int | None]]] = {modules.LayerNorm: lambda module: 1}

    def __init__(self) -> None:
        self._world: processes.World | None = None

    # ------------------------------------------------------------------------------ groups and collectives
    def init_process_group(self, timeout: float | None = None) -> None:
        if self._world is None:
            self._world = processes.join(timeout_seconds(timeout) or 300.0)

    def world(self) -> Any:
        return self._world

    def rank(self) -> int:
        return self._world.rank  # type: ignore[union-attr]

    def world_size(self) -> int:
        return self._world.size  # type: ignore[union-attr]

    def new_group(self, rank_lists: Sequence[Sequence[int]], backend: str | None = None, options: Any = None) -> Any:
        world: Any = self._world
        if backend not in (None, self.comm_backend) or options is not None:
            raise ValueError(f"this framework has one way to communicate, got backend_override {backend}, {options}")
        groups = [world.group(ranks) for ranks in rank_lists]
        return next((group for group in groups if world.rank in group.ranks), None)

    def describe_group(self, native: Any) -> NativeGroup:
        if not hasattr(native, "ranks"):
            raise TypeError(f"from_group takes a group of this framework, got {type(native).__name__}")
        return NativeGroup(tuple(native.ranks), native, tuple(native.ranks))

    def all_gather(self, local: Array, group: Any, size: int) -> Array:
        parts = self._world.gather(local.value, group, "all_gather")  # type: ignore[union-attr]
        return Array(np.concatenate(parts))

    def all_gather_object(self, value: Any, group: Any, size: int) -> list[Any]:
        return self._world.gather(value, group, "all_gather_object")  # type: ignore[union-attr]

    def is_communication_failure(self, error: Exception) -> bool:
        return isinstance(error, RuntimeError) and " rank " in str(error)

    # ------------------------------------------------------------------------------ autograd
    def requires_grad(self, x: Array) -> bool:
        return recording() and x.requires_grad

    def in_backward(self) -> bool:
        return in_backward()

    def backward_is_recorded(self) -> bool:
        return recording()

    def autograd_function(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
        def back_of(context: Any) -> Callable[[Array], list[Any]]:
            run = BACKWARD_WRAPPERS[-1](backward) if BACKWARD_WRAPPERS else backward

            def back(g: Array) -> list[Any]:
                with interception.no_dispatch():
                    return [run(context, g)]

            return back

        def apply(x: Array, *static: Any) -> Array:
            context = _Context()
            with interception.no_dispatch(), no_recording():
                result = forward(context, x, *static)
            y = Array(result.value)
            if self.requires_grad(x):
                y.requires_grad, y.node = True, Node((x,), back_of(context))
            return y

        return apply

    def detach(self, x: Array) -> Array:
        with interception.no_dispatch():
            return operations.detach(x)

    def no_grad(self) -> AbstractContextManager:
        return no_recording()

    def read_cache(self, holder: Array, key: Any) -> Array | None:
        kept = holder.__dict__.get("_kept", {}).get(key)
        return kept[0]() if kept is not None and kept[1:] == self._state_of(holder) else None

    def write_cache(self, holder: Array, key: Any, value: Array) -> None:
        holder.__dict__.setdefault("_kept", {})[key] = (weakref.ref(value), *self._state_of(holder))

    def clear_cache(self, holder: Array) -> None:
        holder.__dict__.pop("_kept", None)

    def _state_of(self, x: Array) -> tuple:
        return id(x.value), x.writes[0], x.node, recording()

    # ------------------------------------------------------------------------------ local arrays
    dtypes: ClassVar[dict[str, Any]] = {name: np.dtype(name) for name in _DTYPES.split()}

    def is_floating_point(self, x: Array) -> bool:
        return np.issubdtype(x.dtype, np.floating)

    def bytes_of(self, x: Array) -> bytes:
        return x.value.tobytes()

    def from_bytes(self, values: Any, shape: Sequence[int], dtype: Any) -> Array:
        return Array(np.frombuffer(bytearray(values), dtype).reshape(tuple(shape)))

    def host_tensor(self, values: np.ndarray) -> Array:
        return Array(values)

    def write(self, x: Array, values: Array) -> None:
        x.value[...] = values.value
        x.writes[0] += 1

    def shape_of(self, local: Array) -> tuple[int, ...]:
        return local.value.shape

    def same_memory(self, x: Array, y: Array) -> bool:
        return np.shares_memory(x.value, y.value)

    def strides(self, x: Array) -> tuple[int, ...]:
        return tuple(step // x.value.itemsize for step in x.value.strides)

    def narrow(self, x: Array, dim: int, start: int, length: int) -> Array:
        return operations.narrow(x, dim, start, length)

    def cat(self, xs: Sequence[Array], dim: int) -> Array:
        return operations.cat(xs, dim)

    def transposed(self, x: Array, dim: int = -2, other: int = -1) -> Array:
        return operations.swapped(x, dim, other)

    def clone(self, x: Array) -> Array:
        return operations.clone(x)

    def with_strides(self, x: Array, strides: Sequence[int], behind: bool = False) -> Array:
        return operations.with_strides(x, strides)

    def full(self, shape: Sequence[int], value: float, like: Array) -> Array:
        return Array(np.full(tuple(shape), value, like.dtype))

    def masked_fill(self, x: Array, mask: Array, value: float) -> Array:
        return operations.masked_fill(x, mask, value)

    def to_dtype(self, x: Array, dtype: Any) -> Array:
        return x if x.dtype == dtype else operations.cast(x, dtype)

    def amax(self, x: Array, dim: int) -> Array:
        y = operations.amax(x, (dim,), True)
        return operations.cast(y, np.float32) if y.dtype.itemsize < 4 else y

    def sum_along(self, x: Array, dim: int) -> Array:
        return operations.sum(x, (dim,), True)

    def shifted_exp(self, x: Array, shift: Array, scale: Array | None = None) -> Array:
        y = operations.exp(x - shift)
        return y if scale is None else y / scale

    def log(self, x: Array) -> Array:
        return operations.log(x)

    def gather(self, x: Array, dim: int, index: Array) -> Array:
        return operations.gather(x, index, dim)

    def scatter_add(self, x: Array, dim: int, index: Array, source: Array) -> Array:
        return operations.scatter_add(x, source, index, dim)

    # ------------------------------------------------------------------------------ interception
    def make_dtensor_class(self, mixin: type, core: Core) -> type:
        members = {"_core": core, "grad": property(self._grad_of)}
        distributed = type("DistributedArray", (mixin, interception.DistributedArray), members)
        parameter = type("DistributedParameter", (distributed, Parameter), {})
        distributed._parameter_class = parameter  # type: ignore[attr-defined]
        self._classes = distributed, parameter
        return distributed

    def _grad_of(self, x: Any) -> Any:
        """The gradient as its user sees it: distributed, placed as gradients of the array are."""
        if x._grad is None or not interception.dispatching():
            return x._grad
        return self.wrap(Array(x._grad.value), x._layout.cotangent)

    def wrap(self, local: Array, layout: Any) -> Any:
        distributed = self._classes[0]
        if isinstance(local, (distributed, Parameter)):
            if local.__dict__.get("_layout") is layout:  # an operation returned its own input
                return local
            local = self.alias(local)
        local.__class__ = distributed
        local._layout = layout  # type: ignore[attr-defined]
        return local

    def no_dispatch(self) -> AbstractContextManager:
        return interception.no_dispatch()

    @property
    def op_table(self) -> Mapping[Any, NativeOp]:
        return interception.TABLE

    # ------------------------------------------------------------------------------ modules
    def named_modules(self, root: Any) -> Iterator[tuple[str, Any]]:
        return root.named_modules()

    def named_buffers(self, module: Any) -> Iterator[tuple[str, Any]]:
        return iter([(name, b) for name, b in module._buffers.items() if b is not None])

    def own_parameters(self, module: Any) -> MutableMapping[str, Any]:
        return module._parameters

    def set_buffer(self, module: Any, name: str, value: Any) -> None:
        module._buffers[name] = value

    def set_distributed_parameter(self, module: Any, name: str, local: Array, layout: Any) -> None:
        parameter = module._parameters[name]
        with interception.no_dispatch():
            parameter.__class__ = self._classes[1]
            parameter.value, parameter._layout, parameter.writes = local.value, layout, [0]
            gradient, parameter._grad = parameter._grad, None
            if gradient is not None and gradient.shape == tuple(layout.shape):
                parameter._grad = Array(gradient.value[layout.local_index()].copy())

    def register_forward_pre_hook(
        self, module: Any, hook: Callable, *, prepend: bool = False, with_kwargs: bool = False
    ) -> Any:
        return _registered(module._before, (hook, with_kwargs), prepend)

    def register_forward_hook(
        self, module: Any, hook: Callable, *, prepend: bool = False, with_kwargs: bool = False
    ) -> Any:
        return _registered(module._after, (hook, with_kwargs), prepend)

    def replace_forward(
        self, module: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]], mixin: Any = None
    ) -> None:
        cls = type(module)
        forward = module.__dict__.get("_replaced_forward", cls.forward)
        module.__dict__["_replaced_forward"] = make(forward)
        if mixin is not None:
            module.__class__ = type(cls.__name__, (mixin, cls), {})

    # ------------------------------------------------------------------------------ devices and random numbers
    def factory(self, name: str, shape: Sequence[int], fill_value: Any, dtype: Any) -> Array:
        shape = tuple(shape)
        if name == "full":
            kind = dtype or {bool: np.bool_, int: np.int64}.get(type(fill_value), np.float32)
            return Array(np.full(shape, fill_value, kind))
        if name == "empty":
            return Array(np.empty(shape, dtype or np.float32))
        if name in ("linspace", "logspace"):
            start, end, *base = fill_value
            numbers = np.linspace(start, end, *shape)
            return Array((base[0] ** numbers if base else numbers).astype(dtype or np.float32))
        draw = random.GENERATOR.random if name == "rand" else random.GENERATOR.standard_normal
        return Array(draw(shape).astype(dtype or np.float32))

    def manual_seed(self, seed: int) -> None:
        random.seed(seed)

    def get_rng_state(self) -> Any:
        return random.get_state()

    def set_rng_state(self, state: Any) -> None:
        random.set_state(state)


def _registered(hooks: list, entry: tuple, prepend: bool) -> modules.Hook:
    hooks.insert(0 if prepend else len(hooks), entry)
    return modules.Hook(hooks, entry)
