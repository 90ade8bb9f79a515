"""Saved tensors that `torch.utils.checkpoint` compares with those of the recomputation.

A tensor of integers is saved as an object, which becomes a DTensor later, when its operation returns. In the first
forward torch notes the shape at once, the local one. After the second forward it reads the global shape.
"""

from __future__ import annotations

from types import CodeType
from typing import Any

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

__all__ = ["facts", "is_known_code", "noting_local_shapes"]

_shape = Tensor.shape.__get__


def facts(x: Any) -> dict[str, Any]:
    """Return the facts of a saved tensor that torch compares; the shape is that of the local tensor."""
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
    """Return the code that replaces the code of torch's function."""
    return _default_meta_extractor.__code__
