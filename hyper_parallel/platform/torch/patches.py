"""Every patch of torch. The functions that make the replacements are in the modules of their subjects.

The patches are installed when the DTensor class is made, so never in a process without DTensors. docs/patches.md
shows the list: ``python -m tests.support.patch_table torch`` writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hyper_parallel.platform.patching import Patch, PatchSet, calling, takes
from hyper_parallel.platform.torch import class_losses
from hyper_parallel.platform.torch.basics import transforms, wrappers
from hyper_parallel.platform.torch.basics.tensor import State
from hyper_parallel.platform.torch.compiled import flex
from hyper_parallel.platform.torch.compiler import dynamo, guards
from hyper_parallel.platform.torch.gradients import autograd, recomputed
from hyper_parallel.platform.torch.handlers import clipping, copying, factories, functions, masked, optimizers
from hyper_parallel.platform.torch.modules import fully_sharded
from hyper_parallel.platform.torch.native import checkpoints, native_meshes, whole_states

__all__ = ["PATCHES"]

_TESTED = "2.13 to 2.15"
_STATES = "torch.distributed._state_dict_utils"
_DCP = "torch.distributed.checkpoint"
_DYNAMO = "torch._dynamo"
_FSDP2 = "torch.distributed.fsdp._fully_shard"
_COMPILED_HANDLERS = "torch's compiler compiles the functions of this library that compute on DTensors, one by one"
_OF_STATE = "state_dict prefix local_metadata strict missing_keys unexpected_keys error_msgs"
_OF_WHOLE = "full_state_dict local_state_dict device pg"
_OF_PARAMETERS = "mesh_info post_forward_mesh_info device shard_placement_fn mp_policy offload_policy"


def _patch(target: str, reason: str, make: Callable[[Any], Any], **more: Any) -> Patch:
    return Patch((target,), reason, _TESTED, make, **more)


#: Patches without which results are right but slower, or messages say less.
_optional = partial(_patch, required=False)


def _clipping(private: str, public: str, make: Callable[[Any], Any], parameters: str) -> Patch:
    """Patch a clipping function under its public name, and under the private name that torch's functions call."""
    targets = (f"torch.nn.utils.clip_grad.{private}", f"torch.nn.utils.{public}")
    reason = "clipping is right and slow, every operation intercepted; an error with parameters on several meshes"
    return Patch(targets, reason, _TESTED, make, check=takes(parameters), required=False)


def _step(name: str, held: Any = "own") -> Patch:
    return _optional(
        f"torch.optim.{name}.step",
        "steps are right and slow: every operation of the optimizer is intercepted, parameter by parameter",
        optimizers.local_step,
        check=takes("self closure"),
        held=held,
    )


def _init_group(name: str) -> Patch:
    reason = "steps on local tensors take longer: torch asks each parameter for its state, over and over"
    make = partial(optimizers.collect_locals, aliases=name not in optimizers.STORES)
    return _optional(f"torch.optim.{name}._init_group", reason, make)


def _list_types(module: str) -> Patch:
    reason = "optimizers, and clipping by norm, take parameters one by one and not as lists: an all-reduce for each"
    target = f"{module}._foreach_supported_types[]"
    return _optional(target, reason, lambda types: State.tensor_class, held="absent")


def _loss(name: str) -> Patch:
    reason = "plain logits of a column-parallel head, this rank's shard of the classes, are taken for all of them"
    return _optional(f"torch.nn.functional.{name}", reason, class_losses.whole_classes_only)


def _factory(name: str) -> Patch:
    reason = "a distributed number, which torch reads below Python, is this rank's summand of a partial sum"
    return _patch(f"torch.{name}", reason, partial(factories.taking_numbers, name), check=factories.is_factory)


def _transform(target: str, function: Callable) -> Patch:
    reason = (
        "`torch.func` and forward-mode AD give wrong numbers: they wrap a plain local tensor, and collectives "
        "see no tangents"
    )
    return _patch(target, reason, calling(function))


def _lightning(package: str) -> Patch:
    """Patch Lightning's strategy in ``package``: Lightning is installed under two names."""
    module = f"{package}.strategies.model_parallel"
    reason = "Lightning's `ModelParallelStrategy` and Fabric load no checkpoint: they find no distributed parameters"
    make = calling(checkpoints.finds_distributed)
    check = takes("module")
    return Patch((f"{module}._has_dtensor_modules",), reason, "2.6.6", make, check=check, required=False, after=module)


def _whole_states(name: str, function: Callable, parameters: str) -> Patch:
    reason = "``set_optimizer_state_dict`` with ``full_state_dict=True`` leaves full plain state next to shards"
    check = takes(parameters)
    return _patch(f"{_STATES}.{name}", reason, calling(function), check=check, everywhere=True, after=_STATES)


PATCHES = PatchSet(
    "torch",
    torch.__version__,
    [
        _patch(
            "torch.autograd.Function.apply",
            "``backward`` of a user's function gets plain local gradients together with distributed saved tensors",
            functions.hooked_apply,
        ),
        _optional(
            "torch.autograd.graph._engine_run_backward",
            "gradients that come to the parameters of a module under `fully_shard` around its results are an error",
            autograd.telling_engine,
            check=takes("t_outputs args kwargs"),
            everywhere=True,
        ),
        *map(_step, optimizers.ELEMENTWISE),
        # `Adam.step`, which AdamW inherits and torch wraps again when it makes the first AdamW.
        _step("AdamW", "either"),
        *map(_init_group, optimizers.ELEMENTWISE),
        _optional(
            "torch.optim.Optimizer.zero_grad",
            "clearing gradients takes longer: each is made distributed first",
            optimizers.clear_locally,
            check=takes("self set_to_none"),
        ),
        _patch(
            "torch.utils.checkpoint._default_meta_extractor.__code__",
            "checkpointing is an error where an operation on DTensors saves integers, as `topk` and `gather` do",
            recomputed.noting_local_shapes,
            check=recomputed.is_known_code,
        ),
        _patch(
            "torch.nn.modules.module._global_module_registration_hooks[hyper_parallel]",
            "DistributedDataParallel over ranks with different shards averages these, DataParallel copies them",
            wrappers.watch_wrappers,
            held="absent",
        ),
        *map(_list_types, ("torch.optim.optimizer", "torch.utils._foreach_utils")),
        _clipping(
            "_get_total_norm",
            "get_total_norm",
            clipping.total_norm_of_all,
            "tensors norm_type error_if_nonfinite foreach",
        ),
        _clipping(
            "_clip_grads_with_norm_",
            "clip_grads_with_norm_",
            clipping.scaling_to_norm,
            "parameters max_norm total_norm foreach",
        ),
        _clipping(
            "clip_grad_norm_",
            "clip_grad_norm_",
            clipping.norm_clipping,
            "parameters max_norm norm_type error_if_nonfinite foreach",
        ),
        _clipping("clip_grad_value_", "clip_grad_value_", clipping.value_clipping, "parameters clip_value foreach"),
        *map(_loss, ("cross_entropy", "nll_loss")),
        *map(_factory, factories.FACTORIES),
        _optional(
            "torch._weights_only_unpickler._marked_safe_globals_set[]",
            "``torch.load(weights_only=True)`` refuses DTensors",
            lambda safe: copying.needed_to_load(),
            held="absent",
        ),
        _patch(
            f"{_STATES}._gather_state_dict",
            "``get_model_state_dict`` and the like with ``full_state_dict=True`` give one rank's shard",
            calling(whole_states.gather_first),
            everywhere=True,
            after=_STATES,
        ),
        _whole_states("_distribute_state_dict", whole_states.distribute_into, _OF_WHOLE),
        _whole_states("_broadcast_state_dict", whole_states.broadcast_into, f"{_OF_WHOLE} strict cpu_offload"),
        _whole_states(
            "_broadcast_tensors", whole_states.place_what_came, "full_state_dict local_state_dict keys device pg"
        ),
        _optional(
            "torch.distributed._functional_collectives._resolve_group",
            "functional collectives take torch's own meshes alone, in ``group=mesh`` and ``group=(mesh, dim)``",
            calling(native_meshes.group_of_mesh),
            check=takes("group tag"),
            everywhere=True,
            after="torch.distributed._functional_collectives",
        ),
        _optional(
            "torch.masked._ops._std_var",
            "`torch.masked.std` and `torch.masked.var` without a mask mix plain ones with DTensors: an error",
            calling(masked.counting_by_mask),
            check=takes("input dim unbiased correction_opt keepdim dtype mask take_sqrt"),
        ),
        _optional(
            f"{flex.MODULE}.flex_attention.__code__",
            "`flex_attention`, which programs hold by name, is an error of torch's compiler with DTensors",
            flex.serving_dtensors,
            check=flex.is_known_code,
            after=flex.MODULE,
        ),
        _patch(
            "torch.nn.Module._load_from_state_dict",
            "``load_state_dict(assign=True)`` of full tensors takes the parameters of a module out of its plan",
            calling(checkpoints.assign_distributed),
            check=takes(f"self {_OF_STATE}"),
        ),
        _patch(
            f"{_DCP}._state_dict_stager.StateDictStager._offload_tensor",
            "``torch.distributed.checkpoint.async_save`` refuses DTensors",
            calling(checkpoints.offload_local),
            check=takes("self x memo non_blocking"),
            after=f"{_DCP}._state_dict_stager",
            required=False,
        ),
        _patch(
            f"{_DCP}.hf_storage.HuggingFaceStorageWriter.prepare_global_plan",
            "without ``save_distributed`` ranks write their shards into one file, and the last one stays",
            calling(checkpoints.refuse_parts_in_one_file),
            check=takes("self plans"),
            after=f"{_DCP}.hf_storage",
        ),
        _patch(
            f"{_DCP}.hf_storage.HuggingFaceStorageWriter.write_data",
            "of a packed tensor, of which a rank holds several parts, the last one is written",
            calling(checkpoints.write_chunks_apart),
            check=takes("self plan planner"),
            after=f"{_DCP}.hf_storage",
        ),
        _lightning("lightning.fabric"),
        _lightning("lightning_fabric"),
        _transform("torch._functorch.eager_transforms._wrap_for_grad", transforms.remember_wrapping),
        _transform("torch._functorch.eager_transforms._wrap_functional_tensor", transforms.remember_wrapping),
        _transform("torch._functorch.vmap._add_batch_dim", transforms.remember_wrapping),
        _transform("torch._vmap_internals._create_batched_inputs", transforms.remember_opening),
        _transform("torch.autograd.forward_ad.enter_dual_level", transforms.remember_opening),
        _patch(
            f"{_FSDP2}._fsdp_param_group.FSDPParamGroup.__init__",
            "``fully_shard`` changes some parameters of a module before it finds one that cannot be sharded",
            fully_sharded.checking_parameters,
            check=takes(f"self params modules {_OF_PARAMETERS}"),
            after=f"{_FSDP2}._fsdp_param_group",
        ),
        _patch(
            f"{_FSDP2}._fsdp_param.FSDPParam.__init__",
            "``fully_shard`` cuts distributed parameters by operations that differ from rank to rank, and hangs",
            fully_sharded.converting_parameter,
            check=takes(f"self param module_info {_OF_PARAMETERS}"),
            after=f"{_FSDP2}._fsdp_param",
        ),
        _optional(
            f"{_FSDP2}._fsdp_common.DataParallelMeshInfo.__post_init__",
            "``fully_shard`` takes this library's meshes for torch's, and fails where it looks closer",
            fully_sharded.taking_meshes,
            check=takes("self"),
            after=f"{_FSDP2}._fsdp_common",
        ),
        _patch(
            f"{_DYNAMO}.variables.builder.VariableBuilder.wrap_tensor",
            "``torch.compile`` fails an assertion where it meets a DTensor: Python and C++ tell it different shapes",
            dynamo.wrapping_dtensors,
            check=takes("self value"),
            after=f"{_DYNAMO}.variables.builder",
        ),
        _patch(
            f"{_DYNAMO}.output_graph.OutputGraph.call_user_compiler",
            "compiled graphs compute on DTensors, which dispatch them again",
            dynamo.plain_inputs,
            check=takes("self gm example_inputs"),
            after=f"{_DYNAMO}.output_graph",
        ),
        _optional(
            f"{_DYNAMO}.guards.CheckFunctionManager.__init__",
            "compiled code takes longer to enter: it compares all that styles are made of, in every call",
            guards.with_few_guards,
            check=guards.is_manager,
            after=f"{_DYNAMO}.guards",
        ),
        _patch(
            f"{_DYNAMO}.variables.torch.get_overridable_functions",
            "in compiled code a loss of distributed logits is that of this rank's shard of the classes",
            class_losses.both_overridable,
            check=takes(""),
            after=f"{_DYNAMO}.variables.torch",
        ),
        _optional(
            f"{_DYNAMO}.variables.torch.TorchInGraphFunctionVariable._get_handlers",
            "compiled code leaves the graph where it calls ``torch.full`` or ``torch.tensor`` with a tensor's number",
            factories.both_handled,
            after=f"{_DYNAMO}.variables.torch",
        ),
        _patch(
            f"{_DYNAMO}.trace_rules.SKIP_DIRS_RE",
            _COMPILED_HANDLERS,
            dynamo.skipping,
            check=dynamo.is_pattern,
            after=f"{_DYNAMO}.trace_rules",
        ),
        _patch(
            f"{_DYNAMO}.trace_rules.SKIP_DIRS[]",
            _COMPILED_HANDLERS,
            dynamo.not_compiled,
            held="absent",
            after=f"{_DYNAMO}.trace_rules",
        ),
    ],
)
