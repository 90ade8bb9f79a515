"""Checks of the inputs of styled modules, made when a graph is compiled for their shapes."""

from __future__ import annotations

from itertools import count
from typing import Any

import mindspore as ms
from mindspore import ops

from hyper_parallel.platform.contract.programs import KEPT, SUMMANDS, Comparison, Program
from hyper_parallel.platform.mindspore.processes.launch import device_target

__all__ = ["ShapeCheck", "pending_comparisons"]

#: Comparisons of plain shards that graphs now being compiled have requested.
pending_comparisons: list[tuple[Comparison, str, tuple[int, ...]]] = []
_NUMBERS = count()
#: Dtypes that graphs on CPU can all-reduce.
_REDUCED = (ms.float32, ms.float16)


def ShapeCheck(module: Any, how: Program, output: int | None, output_dims: int = 0) -> Any:
    """Return ``check(shape, dtype)`` for the input of a styled module. MindSpore calls it when it compiles the graph.

    Args:
        module: the styled module.
        how: program of the module, or of a conversion.
        output: dimension along which the output is to be sharded.
        output_dims: number of dimensions that the output has more than the input.
    """
    label = getattr(module, "_hyper_parallel_path", "") or type(module).__name__
    given, takes, gives, size, features = how.given, how.takes, how.gives, how.size, how.features
    compare, mesh = how.compare, how.mesh

    def check(shape: tuple[int, ...], dtype: Any) -> bool:
        ndim = len(shape)
        if not all(isinstance(length, int) and length >= 0 for length in shape):  # a dynamic size is None or negative
            raise ValueError(
                f"{label!r} in a graph needs a static input shape, got {shape}: pass inputs of a fixed shape"
            )
        if size == 1:
            return True
        if not output_dims and device_target() == "CPU" and dtype not in _REDUCED:
            raise TypeError(
                f"{label!r} in a graph: graphs on CPUs reduce only single and half precision, got an input of dtype "
                f"{dtype}. Call the module without jit"
            )
        if given is not None and not -ndim <= given < ndim:
            raise ValueError(f"{label!r} takes an input sharded along dimension {given}, got an input of shape {shape}")
        cut = None if given is None else given % ndim
        if how.parameters_for_parts and (cut is None or cut >= ndim - how.whole_dims):
            raise ValueError(
                f"{label!r} in a graph: its input, of shape {shape}, is sharded along a normalized dimension"
            )
        if takes == -1 and given is None and features is not None and shape[-1] != features:
            raise ValueError(f"{label!r} takes {features} features, got an input of shape {shape}")
        if output is not None and (gives != KEPT or output != given):
            check_output(output, shape, ndim, cut)
        if cut is not None and compare is not None and (features is None or cut != ndim - 1):
            if mesh._has_uneven_shards:
                raise RuntimeError(
                    f"{label!r} in a graph: a layer has returned plain shards of unequal sizes. From then on ranks "
                    "compare the sizes of plain shards in every call, which a graph cannot do. Call the module without "
                    "jit"
                )
            pending_comparisons.append((compare, label, tuple(shape)))
        return True

    def check_output(output: int, shape: tuple[int, ...], ndim: int, cut: int | None) -> None:
        more = ndim + output_dims
        if not -more <= output < more:
            raise ValueError(
                f"the output of {label!r} has {more} dimensions, but its style shards it along dimension {output}"
            )
        to = output % more
        if output == -1 and gives in (-1, SUMMANDS):
            return  # checked when the cell was made
        if to == more - 1 and gives in (None, SUMMANDS):
            raise ValueError(
                f"the output of {label!r} in a graph cannot be sharded along dimension {output}, which is the "
                "dimension of its features"
            )
        whole = shape[to] * size if to == cut else shape[to]
        if whole % size:
            raise ValueError(
                f"the output of {label!r} in a graph is sharded along dimension {output} into equal shards, but its "
                f"size {whole} is not a multiple of {size}"
            )

    # MindSpore treats two operators with the same name as one.
    return ops.constexpr(check=False, reuse_result=False, name=f"ShapeCheck{next(_NUMBERS)}")(check)
