"""Every patch of MindSpore. The functions that make the replacements are in the modules of their subjects.

The patches are installed when the DTensor class is made, so never in a process without DTensors. docs/patches.md
shows the list: ``python -m tests.support.patch_table mindspore`` writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore

from hyper_parallel.platform.mindspore import graphs
from hyper_parallel.platform.mindspore.compiled import parsing
from hyper_parallel.platform.mindspore.gradients import autograd
from hyper_parallel.platform.mindspore.handlers import (
    attention,
    clipping,
    entry_points,
    likes,
    loss,
    optimizers,
    plain_inside,
    plain_tensors,
    recomputing,
)
from hyper_parallel.platform.mindspore.tensors import observation, stand_ins
from hyper_parallel.platform.mindspore.tensors.parameter import Classes
from hyper_parallel.platform.patching import Patch, PatchSet, calling, takes

__all__ = ["PATCHES", "WATCHING"]

_TESTED = "2.10"
_IN_A_GRAPH = "a compiled graph takes this rank's shard of a DTensor for the full tensor"
_NORM_OF_A_PART = "a plain local gradient is clipped by the norm of this rank's shard"
_PLAIN_LIKE = "a plain tensor of the global shape takes the place of a DTensor"
_STALE = "tensors cached in one recording of gradients are used in the next, where they are stale"


def _patch(target: str, reason: str, make: Callable[[Any], Any], **more: Any) -> Patch:
    return Patch((target,), reason, _TESTED, make, **more)


def _sequence(primitive: str, distributed: Callable[[Any, tuple], Any], held: str = "inherited") -> Patch:
    reason = "tensors in a list or tuple are not looked at, and the operation runs on this rank's shards"
    make = calling(entry_points.call_on_sequence, distributed=distributed)
    return _patch(f"mindspore.ops.operations.{primitive}.__call__", reason, make, held=held)


def _index(name: str) -> Patch:
    reason = "a plain tensor indexed by a DTensor takes this rank's shard of the index"
    return _patch(f"mindspore.Tensor.{name}", reason, calling(entry_points.checked_index), held="inherited")


def _operator(name: str, reflected: str) -> Patch:
    return _patch(
        f"mindspore.Parameter._base_type[Parameter].{name}",
        "an operator between a plain parameter and a DTensor runs on this rank's shard",
        calling(entry_points.reflected_operator, reflected=reflected),
        held="inherited",
    )


def _writing(primitive: str) -> Patch:
    reason = "it writes uncounted to an unsharded parameter of a unit, whose shard keeps the old values"
    make = calling(stand_ins.with_seen_writes, places=stand_ins.WRITING[primitive])
    return _patch(f"mindspore.ops.operations.{primitive}.__call__", reason, make, held="either")


def _loss(name: str) -> Patch:
    module = "math_func" if name == "logsumexp" else "nn_func"
    return _patch(
        f"mindspore.ops.function.{module}.{name}",
        "losses are right and gather the classes: MindSpore composes them of some twenty primitives",
        calling(loss.dispatched_loss, loss=name),
        everywhere=True,
        required=False,
    )


def _making_plain(target: str) -> Patch:
    reason = "a plain tensor that the function makes inside meets a DTensor, which is an error"
    make = calling(plain_inside.with_plain_inside)
    return _patch(f"mindspore.ops.function.{target}", reason, make, everywhere=True, required=False)


def _draw_like(name: str) -> Patch:
    target = f"mindspore.ops.function.random_func.{name}"
    return _patch(target, _PLAIN_LIKE, calling(likes.draw_like), everywhere=True)


def _optimizer(base: str) -> Patch:
    reason = "optimizers that need full parameters step on this rank's shards, the others mix plain and distributed"
    return _patch(f"{base}.__call__", reason, calling(optimizers.optimizer_call), held="inherited")


def _watched(name: str) -> Patch:
    return _patch(
        f"mindspore.mint.distributed.distributed.{name}",
        "`CommDebugMode` does not count collectives that the program issues by itself",
        calling(observation.watched_collective, name=name),
        everywhere=True,
        required=False,
    )


def _is_cached(function: Any) -> str | None:
    return None if callable(getattr(function, "__wrapped__", None)) else "has no cache"


PATCHES = PatchSet(
    "mindspore",
    mindspore.__version__,
    [
        _patch("mindspore.graph.api._PyNativeExecutor.new_graph", _STALE, calling(autograd.counted_begin)),
        _patch("mindspore.graph.api._PyNativeExecutor.end_graph", _STALE, calling(autograd.counted_end)),
        _patch(
            "mindspore.ops.composite.base._pynative_func_grad_forward",
            "after an error within a function whose gradient is asked for, which may be raised on one rank alone, "
            "MindSpore goes on recording: there, later operations count as those of the inner one of two gradients",
            autograd.closed_forward,
            check=takes("fn args kwargs"),
        ),
        _patch(
            "mindspore.graph.api._PyNativeExecutor.grad",
            "inside ``coalesce_gradients`` nothing tells which backward is the outermost one, and nothing tells a "
            "rank's shard of a gradient from the full one",
            autograd.counted_backward,
        ),
        _patch(
            "mindspore.Parameter._base_type[ParameterDTensor]",
            "``Parameter(dtensor)`` gets a class of MindSpore's making, in which methods of parameters are hidden",
            lambda classes: Classes.parameter,
            held="absent",
        ),
        _sequence("array_ops.Stack", entry_points.stack),
        _sequence("math_ops.AddN", entry_points.add_all),
        _sequence("nn_ops.AllFinite", entry_points.see_infinity, held="own"),
        *map(_index, ("__getitem__", "__setitem__")),
        _patch(
            "mindspore.nn.Cell._call_custom_bprop",
            "the ``bprop`` of a cell, as `ops.nanmean` is one, computes with this rank's shards",
            calling(entry_points.gathered_bprop),
            check=takes("self args kwargs"),
        ),
        _patch(
            "mindspore.common._grad_function._Function.apply",
            "``forward`` and ``backward`` of a user's function get this rank's shards",
            entry_points.gathered_apply,
            check=takes("cls args kwargs"),
        ),
        *(_operator(name, reflected) for name, reflected in entry_points.REFLECTED.items()),
        _patch(
            "mindspore.Tensor.__fallback__",
            "in ``plain.mul(distributed)`` MindSpore asks the plain tensor for this attribute, and fails",
            lambda _: plain_tensors.Fallback(),
            held="absent",
        ),
        _patch(
            "mindspore.Tensor.__init__",
            "``Tensor(dtensor)`` is this rank's shard",
            calling(plain_tensors.checked_init),
            held="inherited",
        ),
        _patch(
            "mindspore.Tensor.assign_value",
            "a plain parameter set to a DTensor becomes this rank's shard",
            calling(plain_tensors.checked_assign),
            check=takes("self value"),
        ),
        *(
            _patch(
                f"mindspore.ops.operations.{primitive}.__call__",
                "it writes uncounted, and to no view, which an unsharded parameter of a unit may be",
                calling(stand_ins.assigned, sign=sign),
                check=takes("self variable value"),
            )
            for primitive, sign in (("Assign", 0), ("AssignAdd", 1), ("AssignSub", -1))
        ),
        *map(_writing, stand_ins.WRITING),
        _patch(
            "mindspore.Tensor.data",
            "``p.data = values`` in a cell under data parallelism gives the tensor that stands for ``p`` other memory",
            stand_ins.data_property,
            held="inherited",
            check=lambda original: None if hasattr(original, "__set__") else "is not to be assigned to",
        ),
        _patch(
            "mindspore.train.serialization._update_param",
            "``load_param_into_net`` compares full shapes with those of shards, and says nothing of parallel values",
            calling(plain_tensors.checked_update),
            check=takes("param new_param strict_load"),
            required=False,
        ),
        _patch(
            "mindspore.train.serialization._convert_save_obj_to_param_list",
            "``save_checkpoint`` writes this rank's shard of a parameter, which other numbers of ranks cannot read",
            calling(plain_tensors.whole_values),
            check=takes("save_obj integrated_save append_dict choice_func"),
        ),
        *map(_optimizer, ("mindspore.nn.Optimizer", "mindspore.experimental.optim.Optimizer")),
        _patch(
            "mindspore.nn.DistributedGradReducer.__init__",
            "``nn.DistributedGradReducer`` adds different shards of gradients, or gradients that are reduced already",
            calling(optimizers.checked_reducer),
            check=takes("self parameters mean degree fusion_type group"),
        ),
        _patch(
            "mindspore.ops.function.clip_func._ClipByGlobalNorm.construct",
            "``ops.clip_by_global_norm`` fails: it compares the distributed norm with a plain number",
            calling(clipping.clipping, name="ops.clip_by_global_norm", place=1),
            check=takes("self x"),
        ),
        _patch(
            "mindspore.ops.function.clip_func.clip_by_norm",
            _NORM_OF_A_PART,
            calling(clipping.clipping, name="ops.clip_by_norm", place=0),
            check=takes("x max_norm norm_type error_if_nonfinite"),
            everywhere=True,
        ),
        _patch(
            "mindspore.ops.function.clip_func._cal_total_norm",
            "``ops.clip_by_norm`` is right and slow: an all-reduce for each gradient",
            calling(clipping.norm_of_all),
            check=takes("x norm_type"),
            required=False,
        ),
        _patch(
            "mindspore.nn.ClipByNorm.construct",
            _NORM_OF_A_PART,
            calling(clipping.clipping, name="nn.ClipByNorm", place=1),
            check=takes("self x clip_norm"),
        ),
        _patch(
            "mindspore.amp.all_finite",
            "of plain local gradients each rank sees its own, and one alone skips the step",
            calling(clipping.looking),
            check=takes("inputs"),
            everywhere=True,
        ),
        *map(_watched, observation.COLLECTIVES),
        *map(_draw_like, likes.DRAWS),
        _patch(
            "mindspore.ops.function.array_func.full_like",
            _PLAIN_LIKE,
            calling(likes.full_like),
            check=takes("input fill_value dtype"),
            everywhere=True,
        ),
        *map(_loss, loss.LOSSES),
        _patch(
            "mindspore.ops.function.nn_func.multi_head_attention_forward",
            "heads are counted together with samples, so that `nn.MultiheadAttention` cannot be parallel by heads",
            calling(attention.attention_by_heads),
            check=takes(attention.PARAMETERS),
            everywhere=True,
            required=False,
        ),
        *map(_making_plain, plain_inside.MAKING_PLAIN),
        _patch(
            "mindspore.ops.function.math_func.nanmean",
            "``ops.nanmean`` is right and gathers everything",
            calling(plain_inside.nanmean),
            check=takes("input axis keepdims dtype"),
            everywhere=True,
            required=False,
        ),
        _patch(
            "mindspore.nn.layer.rnns._RNNBase.construct",
            "the first states, plain zeros that ``nn.LSTM`` and ``nn.GRU`` make inside, meet DTensors: an error",
            calling(plain_inside.with_plain_inside),
            check=takes("self x hx seq_length"),
            required=False,
        ),
        _patch(
            "mindspore.ops.function.math_func.bincount",
            "``ops.bincount`` is right and gathers everything",
            calling(plain_inside.bincount),
            check=takes("input weights minlength"),
            everywhere=True,
            required=False,
        ),
        _patch(
            "mindspore.graph.api._get_func_args_info_cached",
            "compiled functions stay for ever, with the modules in their closures: a loss is refused because of a head "
            "that the program has let go of",
            lambda cached: cached.__wrapped__,
            check=_is_cached,
            required=False,
        ),
        _patch(
            "mindspore.common.recompute._RecomputeCell.init_mixed_precision_type",
            "`mindspore.recompute` of a part of a unit of `fully_shard` or `replicate` gives gradients of zeros",
            calling(recomputing.checked_block),
            check=takes("self block"),
        ),
        _patch("mindspore.graph.api._JitExecutor.__call__", _IN_A_GRAPH, calling(parsing.checked_jit)),
        _patch("mindspore.nn.Cell.compile_and_run", _IN_A_GRAPH, calling(parsing.checked_cell)),
        _patch("mindspore.graph.api._CellGraphExecutor.compile", _IN_A_GRAPH, calling(parsing.checked_compile)),
        _patch("mindspore.graph.api._JitExecutor.compile", _IN_A_GRAPH, calling(parsing.checked_jit_compile)),
        _patch("mindspore.graph._parse.resolve_symbol", _IN_A_GRAPH, calling(parsing.checked_resolution)),
        _patch("mindspore.graph._parse.get_object_key", _IN_A_GRAPH, calling(parsing.checked_answer)),
        _patch("mindspore.graph._parse.eval_script", _IN_A_GRAPH, calling(parsing.checked_answer)),
        _patch("mindspore.graph.jit_trace._jit_trace_begin", _IN_A_GRAPH, calling(graphs.checked_begin)),
        _patch("mindspore.graph.jit_trace._jit_trace_end", _IN_A_GRAPH, calling(graphs.allowed_again)),
        _patch("mindspore.graph._utils.pijit_context.PreJit", _IN_A_GRAPH, calling(graphs.checked_preparation)),
        _patch(
            "mindspore.graph._utils.pijit_context.PIJitCaptureContext.__enter__",
            _IN_A_GRAPH,
            calling(graphs.checked_enter),
        ),
        _patch(
            "mindspore.graph._utils.pijit_context.PIJitCaptureContext.__exit__",
            _IN_A_GRAPH,
            calling(graphs.allowed_again),
        ),
    ],
)


#: Patches that are installed only while a program is observed, inside `CommDebugMode` and `record`.
WATCHING = PatchSet(
    "MindSpore, watched",
    mindspore.__version__,
    [
        _patch(
            "mindspore.nn.Cell.__call__",
            "neither `CommDebugMode` nor `record` knows which cell runs",
            calling(observation.watched_call),
            check=takes("self args kwargs"),
            required=False,
        ),
    ],
)
