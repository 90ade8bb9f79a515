"""Metadata of saved tensors, which `torch.utils.checkpoint` compares between forward and recomputation.

Torch reads the shape of a saved integer tensor in the first forward, while the object is a local tensor. Torch reads
the shape again after the recomputation, when the object has become a DTensor. So both must read local shapes.
"""

from __future__ import annotations

from types import CodeType
from typing import Any

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

__all__ = ["facts", "is_known_code", "noting_local_shapes"]

_shape = Tensor.shape.__get__


def facts(x: Any) -> dict[str, Any]:
    """Return shape, dtype and device of a saved tensor, as torch compares them. The shape is local."""
    with DisableTorchFunctionSubclass():
        return {"shape": _shape(x), "dtype": x.dtype, "device": x.device}


def _default_meta_extractor(x: Any) -> dict[str, Any]:
    # This code runs with the global names of torch's module, so it imports `facts` itself.
    from hyper_parallel.platform.torch.gradients.recomputed import facts

    return facts(x)


def is_known_code(code: Any) -> str | None:
    """Return the reason why the original of a `Patch` does not fit, or None."""
    known = isinstance(code, CodeType) and code.co_varnames[: code.co_argcount] == ("x",) and not code.co_freevars
    return None if known else "is not the code of a function of x"


def noting_local_shapes(code: CodeType) -> CodeType:
    """Return code that reads local shapes, in place of the code of torch's ``_default_meta_extractor``."""
    return _default_meta_extractor.__code__
