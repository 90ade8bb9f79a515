"""User-defined autograd functions on DTensors.

Torch cannot intercept calls of such functions. ``forward`` gets the DTensors. But the engine works on local tensors, so
``backward`` would get plain local gradients together with distributed saved tensors. So `torch.autograd.Function.apply`
is wrapped (`platform.torch.patches`): on calls with DTensors it hooks the node. Then ``backward`` sees the gradients of
distributed outputs as DTensors. Its results are redistributed to the layouts of the inputs.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.torch.basics.tensor import State, is_dtensor, layout_of
from hyper_parallel.platform.torch.compiled.running import localize

__all__ = ["hooked_apply"]


def hooked_apply(found: Any) -> Any:
    """Wrap `torch.autograd.Function.apply` as found in the dict of its class. Until torch 2.13 it is a class method
    written in Python. From 2.14 on it is written in C and called with the class."""
    original = getattr(found, "__func__", found)

    @functools.wraps(original)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = State.tensor_class
        for x in args:
            if type(x) is made:
                if not getattr(cls, "takes_dtensors", False):
                    localize(cls)
                break
        result = original(cls, *args, **kwargs)
        # A function may return DTensors for plain tensors too, as checkpointing a parallelised module does.
        for y in result if isinstance(result, tuple) else (result,):
            if type(y) is made:
                _hook_node(args, result if isinstance(result, tuple) else (result,))
                break
        return result

    return classmethod(_EqualToOriginal(apply, original) if isinstance(found, classmethod) else apply)


class _EqualToOriginal:
    """A replacement that compares equal to its original.

    Programs store bound methods, ``f = MyFunction.apply``. Torch's compiler compares such a method with ``apply`` of
    the class, to recognise the call of an autograd function. Two bound methods are equal if their functions are equal.
    A method stored before the patch has the original function.
    """

    def __init__(self, replacement: Any, original: Any) -> None:
        functools.update_wrapper(self, original)
        self._replacement, self._original = replacement, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._replacement(*args, **kwargs)

    def __eq__(self, other: Any) -> bool:
        return other is self or other is self._original

    def __hash__(self) -> int:
        return hash(self._original)


def _hook_node(args: tuple, results: tuple) -> None:
    outputs = [layout_of(y) for y in results]
    node = next((y.grad_fn for y in results if isinstance(y, Tensor) and y.grad_fn is not None), None)
    if node is None:
        return
    inputs = [layout_of(x) for x in args if isinstance(x, Tensor)]

    def distribute(cotangents: tuple) -> tuple:
        return tuple(
            g if g is None or layout is None or is_dtensor(g) else State.core.for_user(g, layout)
            for g, layout in zip(cotangents, outputs, strict=True)
        )

    def localize(cotangents: tuple, _: tuple) -> tuple:
        return tuple(_local(g, layout) for g, layout in zip(cotangents, inputs, strict=True))

    node.register_prehook(distribute)
    node.register_hook(localize)


def _local(cotangent: Any, layout: Any) -> Any:
    """Return a cotangent as a plain tensor, because the input that it belongs to may be a plain tensor."""
    if not is_dtensor(cotangent):
        return cotangent
    # The gradient of a plain input is unsharded.
    cotangent = cotangent.redistribute(placements=None if layout is None else layout.cotangent.placements)
    with no_dispatch():
        cotangent = cotangent.as_subclass(Tensor)
        if layout is not None and layout.summed_mesh_dims:
            cotangent = State.core.to_summands(cotangent, layout)
        return cotangent
