"""Private parts of MindSpore that the backend uses: the only place that names them.

Each part is checked when this module is imported. There are no substitutes. If a part is missing or unsuitable, the
import of the backend fails. The error names MindSpore's version and the tested one. The parts that patches of MindSpore
need are checked where the patches are made.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import mindspore

from hyper_parallel.platform.versions import tested_versions

__all__ = [
    "RECOMPUTE",
    "AutogradFunction",
    "Casts",
    "CheckedCell",
    "FunctionBase",
    "GlobalComm",
    "NoFallbackGuard",
    "UnknownMindSporeError",
    "drop_recordings",
    "grad_node",
    "is_recording",
    "no_grad",
    "nodes_below",
    "type_id_to_type",
    "untracked",
]


class UnknownMindSporeError(RuntimeError):
    """Error for a MindSpore version that lacks a private name which the backend requires."""


def _take(module: str, name: str, suits: Callable[[Any], bool]) -> Any:
    try:
        found = getattr(importlib.import_module(f"mindspore.{module}"), name)
        if suits(found):
            return found
    except Exception:  # no such module or name, or any error of the check
        found = None
    raise UnknownMindSporeError(
        f"mindspore.{module}.{name} is missing from MindSpore {mindspore.__version__}, or is not what HyperParallel "
        f"expects. Use the version of MindSpore that is tested: {tested_versions('mindspore')}"
    )


def _has(*names: str) -> Callable[[Any], bool]:
    return lambda owner: inspect.isclass(owner) and all(hasattr(owner, name) for name in names)


#: Autograd functions: the class that users derive from, and its base, whose ``apply`` is called directly.
AutogradFunction: Any = _take("common._grad_function", "_Function", _has("apply"))
FunctionBase: Any = _take("_c_expression", "FunctionBase", lambda base: "apply" in base.__dict__)
TensorPy: Any = _take("_c_expression", "TensorPy", _has("data", "_grad_node"))
#: Returns the record of a tensor: the operation that made it, or its place among the inputs. None if nothing is
#: recorded.
grad_node: Callable[[Any], Any] = TensorPy._grad_node.__get__
#: Returns a plain tensor with the same memory, outside the graph. `ops.stop_gradient` does so too, in up to 50 us.
untracked: Callable[[Any], Any] = TensorPy.data.__get__
#: Context in which operations are not intercepted.
NoFallbackGuard: Any = _take("_c_expression", "NoFallbackGuard", _has("__enter__", "__exit__"))
no_grad: Any = _take("common.api", "_no_grad", _has("__enter__", "__exit__"))
_executor: Any = _take("common.api", "_pynative_executor", lambda it: callable(it.requires_grad) and it.clear_res)
#: Returns whether operations are recorded for gradients; drops recordings that an error cut short.
is_recording: Callable[[], bool] = _executor._executor.requires_grad
drop_recordings: Callable[[], None] = _executor.clear_res
#: The checks of a cell in its first call, ``_init_check`` and ``_self_check``, which require the present parameters.
CheckedCell: Any = _take("nn", "Cell", _has("_init_check", "_self_check"))
#: Makes the function that a cell calls in place of its ``construct`` if it is recomputed in backward.
RECOMPUTE: Any = _take("common._register_for_recompute", "recompute_registry", lambda it: callable(it.get))
_MixedPrecisionType: Any = _take("_c_expression", "MixedPrecisionType", lambda kinds: hasattr(kinds, "NOTSET"))


def nodes_below(node: Any) -> set[int]:
    """Return the ids of the graph nodes that lead to ``node``, including itself.

    There is one node for each operation and each input.
    """
    seen: set[int] = set()
    todo = [node]
    while todo:
        node = todo.pop()
        if node is not None and node._unique_id() not in seen:
            seen.add(node._unique_id())
            todo += [below[0] if isinstance(below, tuple) else below for below in node.next_functions]
    return seen


class Casts:
    """Context in which operands are cast as `Cell.to_float` requests for a cell."""

    NONE = _MixedPrecisionType.NOTSET

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        _executor.set_mixed_precision_type(self._kind)

    def __exit__(self, *exc_info: object) -> None:
        _executor.set_mixed_precision_type(self.NONE, False)


#: (positions, weights, gradients) -> the gradients, each paired with its tensor, for `mindspore.get_grad`.
with_ids: Callable[..., tuple] = _take("ops.composite.base", "_combine_with_ids", callable)
#: Whether communication is initialised, and the group of all ranks.
GlobalComm: Any = _take("communication._comm_helper", "GlobalComm", _has("INITED", "WORLD_COMM_GROUP"))
type_id_to_type: Callable[[int], Any] = _take("_c_expression.typing", "type_id_to_type", callable)
