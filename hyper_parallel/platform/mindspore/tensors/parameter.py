"""Distributed parameters.

A parameter becomes distributed by a change of its class and its data. The object stays the same, so tied cells,
parameter groups and optimizers that hold the object need no change.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mindspore import Parameter, Tensor, mint
from mindspore.common.initializer import Constant, One, Zero, initializer

from hyper_parallel.platform.mindspore.processes.collectives import copied, dense, is_dense
from hyper_parallel.platform.mindspore.tensors.gradient_hooks import keep_hooks
from hyper_parallel.platform.mindspore.tensors.tensor import InterceptedTensor, NoDispatch, copy_of, is_dispatching

__all__ = ["Classes", "DistributedParameter", "local_value", "make_distributed"]


class DistributedParameter:
    """Methods of a distributed parameter that differ from both `Parameter` and the DTensor class."""

    __slots__ = ()

    def __copy__(self: Any) -> Any:
        return _new_parameter(copy_of(self), self)

    def __deepcopy__(self: Any, memo: dict) -> Any:
        new = self.__copy__()
        memo[id(self)] = new
        return new

    def clone(self: Any, init: Any = "same") -> Any:
        """Return a new distributed parameter with the same layout; optimizers make their moments this way.

        Args:
            init: ``"same"``, a number, the name of an initializer, or a full tensor as for `set_data`.
        """
        if isinstance(init, Tensor):
            local = local_value(self, init)
        elif isinstance(init, str) and init == "same":
            local = copy_of(self)
        else:
            local = _initialized(self, initializer(init, self._layout.shape, self.dtype))
        return _new_parameter(local, self)

    def set_data(self: Any, data: Any, slice_shape: bool = False) -> Any:
        """Copy new values into the parameter.

        The values are written in place, so that views of the parameter stay views of it.

        Args:
            data: the full tensor, an initializer of one, or a DTensor with the parameter's placements.
            slice_shape: whether ``data`` is this rank's shard of the tensor.

        Raises:
            ValueError: for another shape or another placement.
        """
        if isinstance(data, Tensor):
            _write(self, local_value(self, data, slice_shape), self.dtype)
        elif isinstance(data, (int, float)) and self._layout.shape != ():
            raise _wrong_shape(self, ())  # MindSpore would change the shape of the parameter.
        else:
            with NoDispatch():
                return Parameter.set_data(self, data, slice_shape=slice_shape)
        self.sliced = slice_shape
        return self

    def assign_value(self: Any, value: Any) -> Any:
        """Assign a value with the checks of `set_data`: the C++ code alone would accept a value of any shape."""
        if not is_dispatching() or not isinstance(value, Tensor):
            return Tensor.assign_value(self, value)
        _write(self, local_value(self, value), value.dtype)
        return self

    def _replace(self: Any, value: Any) -> None:
        (self.assign_value if is_dispatching() else partial(Tensor.data.__set__, self))(value)

    #: Data of the parameter; an assignment accepts the values of `assign_value`.
    data = property(Tensor.data.__get__, _replace)

    def copy(self: Any) -> Any:
        return self.clone() if is_dispatching() else Parameter.copy(self)

    def value(self: Any) -> Any:
        return self

    def init_data(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self


def _new_parameter(local: Tensor, like: Any) -> Any:
    new = Parameter(local, name=like.name, requires_grad=like.requires_grad)
    new.layerwise_parallel = like.layerwise_parallel
    return make_distributed(new, local, like._layout)


def make_distributed(parameter: Any, local: Tensor, layout: Any) -> Any:
    """Turn a parameter, in place, into a distributed one that holds ``local``."""
    info, requires_grad, hooks = parameter.param_info, parameter.requires_grad, parameter.hooks()
    parameter.__class__ = Classes.parameter
    with NoDispatch():
        # A new tensor inside the same object: primitives of the old kind cache the shape with the tensor, so new data
        # alone would not suffice. The state has a copy, so the data is set after.
        parameter.__setstate__(local.__getstate__())
        parameter.data = local
    parameter.param_info = info
    parameter.requires_grad = requires_grad
    parameter._layout = layout
    keep_hooks(parameter, hooks)  # the new tensor has none
    return parameter


def local_value(parameter: Any, data: Tensor, is_part: bool = False) -> Tensor:
    """Return this rank's shard of ``data``, the new values of a parameter. The shard is a plain tensor, and may be a
    view of ``data``."""
    layout = parameter._layout
    if isinstance(data, InterceptedTensor):
        given = data._layout
        if tuple(given.shape) != tuple(layout.shape):
            raise _wrong_shape(parameter, tuple(given.shape))
        if given is not layout and (given.mesh, given.placements) != (layout.mesh, layout.placements):
            raise ValueError(
                f"parameter {parameter.name!r} is placed {list(layout.placements)} on {layout.mesh}, but the new data "
                f"is placed {list(given.placements)} on {given.mesh}: redistribute the data first"
            )
        with NoDispatch():
            return Tensor._make_subclass(Tensor, data)
    shape = tuple(data.shape)
    # Without interception the program is MindSpore's own, and sees shards.
    if is_part or not is_dispatching():
        if shape == tuple(layout.local_shape):
            return data.init_data() if data.has_init else data
    elif shape == tuple(layout.shape):
        return _initialized(parameter, data) if data.has_init else data[layout.local_index()]
    raise _wrong_shape(parameter, shape, is_part)


def _wrong_shape(parameter: Any, shape: tuple[int, ...], is_part: bool = False) -> ValueError:
    layout = parameter._layout
    wanted = f"this rank's shard of it {tuple(layout.local_shape)}; the new shard" if is_part else "and the new data"
    return ValueError(
        f"parameter {parameter.name!r} has shape {tuple(layout.shape)}, {wanted} has shape {shape}: pass the full "
        "tensor, or this rank's shard as DTensor.from_local(shard, mesh, placements) or with set_data(shard, "
        "slice_shape=True)"
    )


def _initialized(parameter: Any, lazy: Tensor) -> Tensor:
    """Return this rank's shard of an initializer's values for the full parameter: ranks agree on the numbers drawn."""
    layout = parameter._layout
    if isinstance(lazy.init, (Zero, One, Constant)):
        # No rank needs the full tensor. MindSpore makes no empty one.
        shape = tuple(layout.local_shape)
        if 0 in shape:
            return mint.empty(shape, dtype=lazy.dtype)
        return initializer(lazy.init, shape, lazy.dtype).init_data()
    with NoDispatch():
        return InterceptedTensor._core.draw(lambda whole: lazy.init_data(), parameter, layout)


def _write(parameter: Any, local: Tensor, dtype: Any) -> None:
    """Copy ``local`` into a parameter, without sharing its memory. The parameter has ``dtype`` afterwards."""
    with NoDispatch():
        local = local.astype(dtype)
        if dtype != parameter.dtype or not is_dense(parameter):
            # Its memory is too small, or `copy_` writes nothing there on CPU.
            Tensor.assign_value(parameter, copied(local))
        elif 0 not in parameter.shape:
            parameter.copy_(dense(local))
    parameter._writes += 1  # also where this rank's shard is empty, and MindSpore counts nothing


class Classes:
    """The classes that `make_dtensor_class` made."""

    dtensor: Any = None
    parameter: Any = None
