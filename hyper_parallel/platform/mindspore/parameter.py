"""Distributed parameters.

A parameter becomes distributed by changing its class and its data: the object stays, so ties between cells, parameter
groups and optimizers that hold it keep seeing it.
"""

from __future__ import annotations

from typing import Any

from mindspore import Parameter, Tensor
from mindspore.common.initializer import initializer

from hyper_parallel.platform.mindspore.collectives import dense
from hyper_parallel.platform.mindspore.tensor import InterceptedTensor, NoDispatch, copy_of, is_dispatching
from hyper_parallel.platform.without_patches import NeedsPatches

__all__ = ["Classes", "DistributedParameter", "make_distributed"]


class DistributedParameter:
    """What a distributed parameter does differently from both `Parameter` and the DTensor class."""

    __slots__ = ()

    def __copy__(self: Any) -> Any:
        return _new_parameter(copy_of(self), self)

    def __deepcopy__(self: Any, memo: dict) -> Any:
        new = self.__copy__()
        memo[id(self)] = new
        return new

    def clone(self: Any, init: Any = "same") -> Any:
        """A new distributed parameter with the same layout; optimizers make their moments this way."""
        with NoDispatch():
            if isinstance(init, Tensor) and not isinstance(init, InterceptedTensor):
                local = init
            elif init == "same" or 0 in self.shape:  # MindSpore makes no parameter without elements
                local = copy_of(self)
            else:
                local = initializer(init, self.shape, self.dtype).init_data()
        return _new_parameter(local, self)

    def set_data(self: Any, data: Any, slice_shape: bool = False) -> Any:
        """New data: a DTensor of the same layout, this rank's part, or the whole tensor, of which a part is taken.

        The data go where the old ones are, so that what was taken of the parameter stays the parameter."""
        local = _local_part(self, data)
        with NoDispatch():
            if isinstance(local, Tensor) and not (local.has_init or self.has_init or 0 in self.shape):
                self.copy_(dense(local.astype(self.dtype)))
                self.sliced = slice_shape
                return self
            return Parameter.set_data(self, local, slice_shape=slice_shape)

    def assign_value(self: Any, value: Any) -> Any:
        """As `set_data`: what is below, in C++, would take whatever shape the value has."""
        if not is_dispatching():
            return Tensor.assign_value(self, value)
        local = _local_part(self, value)
        with NoDispatch():
            return Tensor.assign_value(self, local)

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
    info, requires_grad = parameter.param_info, parameter.requires_grad
    parameter.__class__ = Classes.parameter
    with NoDispatch():
        # A new tensor inside the same object: primitives of the old kind keep the shape that they have seen with the
        # tensor, so that new data alone would not do. The state has a copy, so the data comes after.
        parameter.__setstate__(local.__getstate__())
        parameter.data = local
    parameter.param_info = info
    parameter.requires_grad = requires_grad
    parameter._layout = layout
    return parameter


def _local_part(parameter: Any, data: Any) -> Any:
    if not isinstance(data, (Tensor, int, float)):
        return data  # MindSpore says what it takes
    layout = parameter._layout
    if isinstance(data, InterceptedTensor):
        if data._layout is not layout and data._layout.placements != layout.placements:
            raise ValueError(
                f"parameter {parameter.name!r} is placed {list(layout.placements)}, the new data "
                f"{list(data._layout.placements)}: redistribute it first"
            )
        with NoDispatch():
            return Tensor._make_subclass(Tensor, data)
    # With a number MindSpore would change the shape of a parameter.
    shape = tuple(data.shape) if isinstance(data, Tensor) else ()
    if shape == tuple(layout.local_shape):
        return data
    if isinstance(data, Tensor) and shape == tuple(layout.shape):
        return data[layout.local_index()].contiguous()
    raise ValueError(
        f"parameter {parameter.name!r} has shape {tuple(layout.shape)}, on this rank {tuple(layout.local_shape)}; "
        f"the new data has shape {shape}"
    )


class Classes:
    """The classes that `make_dtensor_class` made: they are given out while MindSpore is patched."""

    made: tuple[type, ...] = ()
    dtensor: Any = NeedsPatches("mindspore")
    parameter: Any = NeedsPatches("mindspore")

    @classmethod
    def allow(cls, allowed: bool) -> None:
        """Whether DTensors may be made."""
        cls.dtensor, cls.parameter = cls.made if allowed else (NeedsPatches("mindspore"),) * 2
