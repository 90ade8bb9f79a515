"""Private parts of torch that the backends use: the only place that names them.

Each part is checked when this module is imported, before anything relies on it. A missing or unexpected part is
replaced by a slower public equivalent, if there is one. `REPLACED` lists such parts. Otherwise the import of the
backend fails, with an error that names torch's version and the tested versions.

The parts that patches of torch need are checked where the patches are made. ``torch._C.DisableTorchFunctionSubclass``
is public, in spite of its name: torch documents it for subclasses of tensors.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules import module as nn_module

from hyper_parallel.platform.versions import tested_versions

__all__ = [
    "REPLACED",
    "DispatchMode",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "UnknownTorchError",
    "any_autocast",
    "bare_apply",
    "calls_quickly",
    "chunk_cat",
    "current_node",
    "default_store",
    "dual_level",
    "dispatch_modes",
    "dispatching",
    "flatten",
    "fused_attention",
    "functional_collectives",
    "function_modes",
    "global_backward_hooks",
    "global_backward_pre_hooks",
    "global_forward_hooks",
    "global_forward_pre_hooks",
    "graph_task",
    "in_dispatch_mode",
    "in_loss_parallel",
    "is_batched",
    "is_dispatch_on",
    "is_or_disables",
    "make_grads",
    "native",
    "native_functions",
    "nested_left_aligned",
    "old_vmap_level",
    "queue_callback",
    "root_of_mesh",
    "run_engine",
    "same_implementation",
    "set_order",
    "saved_tensor_hooks",
    "strided_shard",
    "swap_implementation",
    "tracer",
    "transform_level",
    "unflatten",
    "will_execute",
]


class UnknownTorchError(RuntimeError):
    """Error for a torch version that lacks a private name which a backend requires."""


#: Parts that this torch lacks, or has in an unexpected form, and that are replaced here.
REPLACED: list[str] = []

_NO_OTHER_WAY: Any = object()


def _find(path: str) -> Any:
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, _NO_OTHER_WAY)
        if found is _NO_OTHER_WAY:
            break
    return found


def _take(path: str, suits: Callable[[Any], bool], otherwise: Any = _NO_OTHER_WAY) -> Any:
    """Return torch's object at ``path`` if it ``suits``, else ``otherwise``.

    Raises:
        UnknownTorchError: when there is no replacement.
    """
    found = _find(path)
    try:
        if found is not _NO_OTHER_WAY and suits(found):
            return found
    except Exception:  # any error of a function that takes or does something else in this version
        found = _NO_OTHER_WAY
    if otherwise is _NO_OTHER_WAY:
        raise UnknownTorchError(
            f"torch.{path} is missing from torch {torch.__version__}, or is not what HyperParallel expects. Use a "
            f"version of torch that is tested: {tested_versions('torch')}"
        )
    if f"torch.{path}" not in REPLACED:
        REPLACED.append(f"torch.{path}")
    return otherwise


def _returns(kind: type) -> Callable[[Any], bool]:
    return lambda function: type(function()) is kind


def _has_parameters(*names: str) -> Callable[[Any], bool]:
    return lambda function: list(inspect.signature(function).parameters)[: len(names)] == list(names)


# ---------------------------------------------------------------------------------------------- interception

is_dispatch_on: Callable[[], bool] = _take("_C._is_torch_function_enabled", _returns(bool))
#: Context in which calls of torch's functions are intercepted again.
dispatching: Callable[[], Any] = _take("_C._EnableTorchFunction", inspect.isclass)
#: Number of modes that see torch's functions, and torch's kernels, before tensors do. If torch cannot report it, one is
#: assumed, so that torch's own entry is used.
function_modes: Callable[[], int] = _take("_C._len_torch_function_stack", _returns(int), lambda: 1)
dispatch_modes: Callable[[], int] = _take("_C._len_torch_dispatch_stack", _returns(int), lambda: 1)
in_dispatch_mode: Callable[[], bool] = _take(
    "utils._python_dispatch.is_in_torch_dispatch_mode", _returns(bool), lambda: dispatch_modes() > 0
)
#: Mode that sees every kernel that runs inside it.
DispatchMode: Any = _take("utils._python_dispatch.TorchDispatchMode", inspect.isclass)
OpOverload: Any = _take("_ops.OpOverload", inspect.isclass)
OpOverloadPacket: Any = _take("_ops.OpOverloadPacket", inspect.isclass)


# ---------------------------------------------------------------------------------------------- autograd


def _any_autocast() -> bool:
    return any(map(_is_autocast, ("cpu", "cuda", "npu")))


def _is_autocast(device: str) -> bool:
    try:
        return torch.is_autocast_enabled(device)
    except RuntimeError:  # no such device without torch_npu
        return False


any_autocast: Callable[[], bool] = _take("_C._is_any_autocast_enabled", _returns(bool), _any_autocast)
#: Called with True, returns None if no hooks on saved tensors are set. If torch cannot report that, hooks are assumed.
saved_tensor_hooks: Callable[[bool], Any] = _take(
    "_C._autograd._top_saved_tensors_default_hooks",
    lambda function: function(True) is None or isinstance(function(True), tuple),
    lambda _: (None, None),
)
#: The node that backward runs now, and whether backward will run a given node. If torch cannot report that, gradients
#: are not delayed.
current_node: Callable[[], Any] = _take("_C._current_autograd_node", lambda f: f() is None, lambda: None)
will_execute: Callable[[Any], bool] = _take("_C._will_engine_execute_node", callable, lambda _: False)
#: Identifier of the running backward pass, -1 outside backward.
graph_task: Callable[[], int] = _take("_C._current_graph_task_id", _returns(int))
#: Registers a function that is called when the running backward pass is complete.
queue_callback: Callable[[Callable[[], None]], None] = _take(
    "autograd.Variable._execution_engine.queue_callback", callable
)
run_engine: Callable = _take("autograd.graph._engine_run_backward", _has_parameters("t_outputs", "args"))


def _make_grads(outputs: tuple, grads: tuple, is_grads_batched: bool) -> tuple:
    if any(g is None and y.requires_grad and y.numel() != 1 for y, g in zip(outputs, grads, strict=True)):
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    return tuple(
        torch.ones_like(y) if g is None and y.requires_grad else g for y, g in zip(outputs, grads, strict=True)
    )


make_grads: Callable[..., tuple] = _take(
    "autograd._make_grads", _has_parameters("outputs", "grads", "is_grads_batched"), _make_grads
)


def bare_apply(function: type[torch.autograd.Function]) -> Callable:
    """Return `apply` of an autograd function without torch's Python wrapper. Only functorch needs it, and it doubles
    the time."""
    return _apply.__get__(None, function) if _apply is not None else function.apply


_apply: Any = _take("_C._FunctionBase", lambda base: inspect.ismethoddescriptor(base.__dict__["apply"]), None)
_apply = None if _apply is None else _apply.__dict__["apply"]


def _set_order(node: Any, number: int) -> None:
    node._set_sequence_nr(number)


def _leave_order(node: Any, number: int) -> None:
    """Do nothing, as a substitute where the order of a node in backward cannot be changed."""


set_order: Callable[[Any, int], None] = _set_order
with torch.enable_grad(), torch.inference_mode(False):
    if not hasattr(torch.ones(1, device="meta", requires_grad=True).view(1).grad_fn, "_set_sequence_nr"):
        REPLACED.append("torch.autograd.graph.Node._set_sequence_nr")
        set_order = _leave_order


def _check_tensors() -> None:
    """Check private members of torch's nodes and tensors, with which many nodes can share one table of hooks."""
    for name in ("_backward_hooks", "_base", "_grad", "_is_view", "_post_accumulate_grad_hooks", "_version"):
        _take(f"Tensor.{name}", lambda _: True)
    with torch.enable_grad(), torch.inference_mode(False):
        node = torch.ones(1, device="meta", requires_grad=True).view(1).grad_fn
    if not callable(getattr(node, "_register_hook_dict", None)):
        _take("autograd.graph.Node._register_hook_dict", lambda _: False)


_check_tensors()

# ---------------------------------------------------------------------------------------------- functions and modules


#: Module with the native functions that `torch.nn.functional` calls.
native_functions: Any = _take("_C._nn", inspect.ismodule, F)


def native(name: str) -> Any:
    """Return the native function that a function of `torch.nn.functional` calls.

    Returns the function of `torch.nn.functional` itself if this torch lacks the native function.
    """
    return _take(f"_C._nn.{name}", inspect.isbuiltin, getattr(F, name))


#: ``flatten(tensors)`` concatenates the elements of all tensors in 1-D; a view for a single tensor. ``unflatten(flat,
#: tensors)`` returns views of ``flat`` with the shapes of ``tensors``, which are not empty.
flatten: Callable[[Any], Tensor] = _take(
    "_C._nn.flatten_dense_tensors", inspect.isbuiltin, lambda xs: torch.cat([x.reshape(-1) for x in xs])
)
unflatten: Callable[[Tensor, Any], Any] = _take(
    "_C._nn.unflatten_dense_tensors",
    inspect.isbuiltin,
    lambda flat, xs: [part.view(x.shape) for part, x in zip(flat.split([x.numel() for x in xs]), xs, strict=True)],
)


#: Returns whether a mask lets a batch become a nested tensor; `nn.TransformerEncoder` calls it.
nested_left_aligned: Any = _take("_nested_tensor_from_mask_left_aligned", inspect.isbuiltin, None)


def _chunk_and_cat(xs: Any, dim: int, count: int) -> Tensor:
    """Split each tensor, padded with zeros, in ``count`` chunks along dimension 0. Row i concatenates the i-th
    chunks."""
    padded = [F.pad(x.reshape(len(x), -1), (0, 0, 0, -len(x) % count)) for x in xs]
    return torch.cat([x.reshape(count, -1) for x in padded], 1)


#: ``chunk_cat(tensors, 0, count)``: see `_chunk_and_cat`.
chunk_cat: Callable[[Any, int, int], Tensor] = _take("_chunk_cat", inspect.isbuiltin, _chunk_and_cat)

#: Returns whether one tensor can get the data of another and stay the same object. If torch cannot report that, device
#: types and layouts are compared.
same_implementation: Callable[[Any, Any], bool] = _take(
    "_has_compatible_shallow_copy_type", callable, lambda x, y: x.device.type == y.device.type and x.layout == y.layout
)
#: Exchanges the implementations of two tensors that no other code references: the last step of
#: `torch.utils.swap_tensors`.
swap_implementation: Callable[[Tensor, Tensor], None] = _take("_C._swap_tensor_impl", callable)
#: Returns the state of tracing, None if nothing is being traced.
tracer: Callable[[], Any] = _take("_C._get_tracing_state", callable, lambda: torch.jit.is_tracing() or None)


def is_or_disables(found: Any, function: Callable) -> bool:
    """Return whether ``found`` is ``function``, or the wrapper with which ``torch.compile`` keeps it untraced. Methods
    of torch's optimizers have this wrapper. If torch marks the wrapper differently, the answer is False."""
    return found is function or (
        getattr(found, "_torchdynamo_disable", False) and getattr(found, "__wrapped__", None) is function
    )


_HOOKS = {
    *("_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_hooks_with_kwargs"),
    *("_forward_hooks_always_called", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
}
_GLOBAL_HOOKS = {
    *("_global_backward_pre_hooks", "_global_backward_hooks", "_global_forward_pre_hooks", "_global_forward_hooks"),
    *("_global_forward_hooks_always_called", "_global_forward_hooks_with_kwargs"),
}
#: Words in the names of hooks that do not concern calls of a module.
_ELSEWHERE = ("registration", "state_dict", "is_full_backward")


def _knows_all_hooks() -> bool:
    """Return whether `calls` handles every kind of hook that can surround a call of a module."""

    def about_calls(names: Any) -> set[str]:
        return {n for n in names if "hook" in n and not any(word in n for word in _ELSEWHERE)}

    own = about_calls(torch.nn.Module().__dict__)
    everywhere = about_calls(n for n in vars(nn_module) if n.startswith("_global"))
    return (own, everywhere) == (_HOOKS, _GLOBAL_HOOKS)


#: Whether calls of modules may skip torch's ``__call__``. False if torch has unknown kinds of hooks.
calls_quickly = _knows_all_hooks()
if not calls_quickly:
    REPLACED.append("torch.nn.Module.__call__")
_of_all_modules = vars(nn_module)
global_forward_hooks: Any = _of_all_modules.get("_global_forward_hooks")
global_forward_pre_hooks: Any = _of_all_modules.get("_global_forward_pre_hooks")
global_backward_hooks: Any = _of_all_modules.get("_global_backward_hooks")
global_backward_pre_hooks: Any = _of_all_modules.get("_global_backward_pre_hooks")

# ---------------------------------------------------------------------------------------------- torch.distributed

if dist.is_available():
    for _name in ("_get_backend", "_allgather_base", "_reduce_scatter_base"):
        _take(f"distributed.ProcessGroup.{_name}", callable)
    default_store: Callable[[], Any] = _take("distributed.distributed_c10d._get_default_store", callable)
    #: Collectives as operators that torch's compiler knows.
    functional_collectives: Any = _take("ops._c10d_functional", lambda ops: callable(ops.wait_tensor))
    #: Returns the mesh that a mesh of torch was sliced from, or itself.
    root_of_mesh: Callable[[Any], Any] = _take("distributed.device_mesh.DeviceMesh._get_root_mesh", callable)


@cache
def strided_shard() -> Any:
    """Return torch's placement class for a dimension that a later mesh dimension has sharded before.

    The call imports the module of the class, which takes long."""
    importlib.import_module("torch.distributed.tensor")
    return _take("distributed.tensor.placement_types._StridedShard", inspect.isclass)


def in_loss_parallel() -> bool:
    """Return whether `torch.distributed.tensor.parallel.loss_parallel` is active, for all threads.

    `torch.distributed.tensor.parallel.loss_parallel` adds handlers to a table of torch's DTensors. If torch has no such
    table, the answer is False. The module of that context is not imported here, because that takes long: before its
    import no such context can be active.
    """
    if "torch.distributed.tensor.parallel" not in sys.modules:
        return False
    table = _take("distributed.tensor.DTensor._op_dispatcher._custom_op_handlers", _has_operators, {})
    return torch.ops.aten.nll_loss_forward.default in table


def _has_operators(table: Any) -> bool:
    return isinstance(table, dict) and all(isinstance(key, OpOverload) for key in table)


# ---------------------------------------------------------------------------------------------- classes and transforms

#: Fused attention of the CPU, as (output, log-sum-exp), which takes meta tensors too. Without it, dry runs count the
#: scores of attention as saved.
fused_attention: Callable[..., tuple[Tensor, Tensor]] | None = _take(
    "ops.aten._scaled_dot_product_flash_attention_for_cpu", callable, None
)
#: Mode that sees every operation below autograd.
TorchDispatchMode: Any = _take("utils._python_dispatch.TorchDispatchMode", inspect.isclass)
#: Returns whether a tensor is of a class that computes by inner tensors.
is_traceable_wrapper: Callable[[Any], bool] = _take("utils._python_dispatch.is_traceable_wrapper_subclass", callable)
#: Returns the innermost active transform of `torch.func` and `torch.vmap` in this thread, None outside.
transform_level: Callable[[], int | None] = _take("_C._functorch.maybe_current_level", lambda f: f() is None)

_open_vmap = _take("_C._vmapmode_increment_nesting", callable)
_close_vmap = _take("_C._vmapmode_decrement_nesting", callable)


def old_vmap_level() -> int:
    """Return how many vmaps of torch's older kind are active, which `torch.autograd.grad` uses for batched cotangents.
    The number can only be read by entering and leaving another vmap."""
    level: int = _open_vmap() - 1
    _close_vmap()
    return level


_keys_of = _take("_C._dispatch_key_set", callable)


def is_batched(x: Tensor) -> bool:
    """Return whether a vmap of either kind has wrapped ``x`` around another tensor."""
    return "Batched" in _keys_of(x)


_take("autograd.forward_ad._current_level", lambda level: isinstance(level, int))


def dual_level() -> int:
    """Return the innermost level of forward-mode AD, negative outside."""
    return torch.autograd.forward_ad._current_level
