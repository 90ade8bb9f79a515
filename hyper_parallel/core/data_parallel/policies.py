"""Options of `fully_shard` besides the modules to shard: dtypes, and where shards are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy"]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes in which the modules of a unit compute and communicate. Shards, their gradients and the optimizer's state
    keep the dtype of the parameters.

    Attributes:
        param_dtype: dtype of the framework in which floating point parameters are gathered and read; None is their own.
        reduce_dtype: dtype in which gradients are reduced, and accumulated before; None is that of the parameter.
        output_dtype: dtype to which floating point outputs of the module are converted; None leaves them.
        cast_forward_inputs: convert floating point inputs of the module to ``param_dtype``.
        param_dtype_override_fn: called with each parameter by `fully_shard`. A parameter keeps its own dtype where it
            returns that, and gets ``param_dtype`` where it returns that or None. All ranks must return the same.

    Example:
        >>> import torch
        >>> from hyper_parallel import MixedPrecisionPolicy
        >>> MixedPrecisionPolicy(param_dtype=torch.bfloat16).cast_forward_inputs
        True

    Source: ``torch.distributed.fsdp.MixedPrecisionPolicy``, as of torch 2.15.
    """

    param_dtype: Any = None
    reduce_dtype: Any = None
    output_dtype: Any = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[Any], Any] | None = field(default=None, kw_only=True)

    def keeps_dtype(self, p: Any, what: str) -> bool:
        """Return whether a parameter is gathered and read in its own dtype.

        Args:
            p: the parameter.
            what: its name, for messages.

        Raises:
            ValueError: where the function returns a dtype that is neither this nor ``param_dtype``.
        """
        found = None if self.param_dtype_override_fn is None else self.param_dtype_override_fn(p)
        if found is not None and found not in (self.param_dtype, p.dtype):
            raise ValueError(
                f"{what}: param_dtype_override_fn gives {found!r}: let it give None, param_dtype "
                f"({self.param_dtype!r}), or the parameter's own dtype ({p.dtype!r})"
            )
        return self.param_dtype is None or (found is not None and found != self.param_dtype)


@dataclass(frozen=True)
class OffloadPolicy:
    """Shards stay on this rank's device: the default, and the base class of policies that put them elsewhere.

    Source: ``torch.distributed.fsdp.OffloadPolicy``.
    """


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and so the optimizer's state are kept in the memory of the host. A shard is copied to the
    device to be gathered, and a gradient to the host when it was reduced.

    Attributes:
        pin_memory: keep shards in page-locked memory, where there is such.

    Source: ``torch.distributed.fsdp.CPUOffloadPolicy``.
    """

    pin_memory: bool = True
