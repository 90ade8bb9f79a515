"""Saved tensors that `torch.utils.checkpoint` compares with those of the forward that runs again.

A tensor of integers is saved as the object that it is. It becomes a DTensor after that, when its operation returns.
torch notes the shape at once in the first forward, and looks again after the second: local, and then global.
"""

from __future__ import annotations

from types import CodeType
from typing import Any

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

__all__ = ["facts", "is_known_code", "noting_local_shapes"]

_shape = Tensor.shape.__get__


def facts(x: Any) -> dict[str, Any]:
    """The facts of a saved tensor that torch compares; the shape is that of the local tensor."""
    with DisableTorchFunctionSubclass():
        return {"shape": _shape(x), "dtype": x.dtype, "device": x.device}


def _default_meta_extractor(x: Any) -> dict[str, Any]:
    # Only this code runs, among the names of torch's module.
    from hyper_parallel.platform.torch.gradients.recomputed import facts

    return facts(x)


def is_known_code(code: Any) -> str | None:
    """A check for `Patch`."""
    known = isinstance(code, CodeType) and code.co_varnames[: code.co_argcount] == ("x",) and not code.co_freevars
    return None if known else "is not the code of a function of x"


def noting_local_shapes(code: CodeType) -> CodeType:
    """Return the replacement of the code of torch's function."""
    return _default_meta_extractor.__code__
