"""Every patch of torch. The functions that make the replacements are in the modules of their subjects.

Installed when the DTensor class is made, so never in a process that makes no DTensor; `PatchSet.uninstall` takes them
back. docs/patches.md shows the list: ``python -m hyper_parallel.platform.patch_table torch`` writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hyper_parallel.platform.patching import Patch, PatchSet, takes
from hyper_parallel.platform.torch import checkpoints, class_losses, fully_sharded, levels, wrappers
from hyper_parallel.platform.torch.handlers import clipping, copying, functions, optimizers
from hyper_parallel.platform.torch.tensor import State, allow_dtensors

__all__ = ["PATCHES"]

_TESTED = "2.13 to 2.15"
_STATES = "torch.distributed._state_dict_utils"
_FSDP2 = "torch.distributed.fsdp._fully_shard"
_OF_PARAMETERS = "mesh_info post_forward_mesh_info device shard_placement_fn mp_policy offload_policy"


_patch = partial(Patch, versions=_TESTED)
#: Without these, results are right and slower, or users are told less.
_optional = partial(_patch, required=False)


def _clipping(private: str, public: str, make: Callable[[Any], Any], parameters: str) -> Patch:
    """A function where it is defined, and so called by the others, and where users find it."""
    return _optional(
        targets=(f"torch.nn.utils.clip_grad.{private}", f"torch.nn.utils.{public}"),
        reason="clipping is right and slow, every operation intercepted; an error with parameters on several meshes",
        make=make,
        check=takes(parameters),
    )


PATCHES = PatchSet(
    "torch",
    torch.__version__,
    [
        _patch(
            targets=("torch.autograd.Function.apply",),
            reason="``backward`` of a user's function gets plain local gradients beside distributed saved tensors",
            make=functions.hooked_apply,
        ),
        *(
            _optional(
                targets=(f"torch.optim.{name}.step",),
                reason="steps are right and slow: every operation of the optimizer is intercepted, parameter by "
                "parameter",
                make=optimizers.local_step,
                check=takes("self closure"),
                rewrapped=optimizers.without_local_step,
            )
            for name in optimizers.ELEMENTWISE
        ),
        *(
            _optional(
                targets=(f"torch.optim.{name}._init_group",),
                reason="steps on local tensors take longer: torch asks each parameter for its state, over and over",
                make=partial(optimizers.collect_locals, aliases=name not in optimizers.STORES),
            )
            for name in optimizers.ELEMENTWISE
        ),
        _optional(
            targets=("torch.optim.Optimizer.zero_grad",),
            reason="clearing gradients takes longer: each is made distributed first",
            make=optimizers.clear_locally,
            check=takes("self set_to_none"),
        ),
        _patch(
            targets=("torch.nn.modules.module._global_module_registration_hooks[hyper_parallel]",),
            reason="DistributedDataParallel over ranks with different shards averages these, DataParallel copies them",
            make=wrappers.watch_wrappers,
            held="absent",
        ),
        *(
            _optional(
                targets=(f"{module}._foreach_supported_types[]",),
                reason="optimizers, and clipping by norm, take parameters one by one and not as lists: an all-reduce "
                "for each",
                make=lambda types: State.tensor_class,
                held="absent",
            )
            for module in ("torch.optim.optimizer", "torch.utils._foreach_utils")
        ),
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
        _clipping(
            "clip_grad_value_",
            "clip_grad_value_",
            clipping.value_clipping,
            "parameters clip_value foreach",
        ),
        *(
            _optional(
                targets=(f"torch.nn.functional.{name}",),
                reason="plain logits of a column-parallel head, this rank's part of the classes, are taken for all of "
                "them",
                make=class_losses.whole_classes_only,
            )
            for name in ("cross_entropy", "nll_loss")
        ),
        _optional(
            targets=("torch._weights_only_unpickler._marked_safe_globals_set[]",),
            reason="``torch.load(weights_only=True)`` refuses DTensors",
            make=lambda safe: copying.needed_to_load(),
            held="absent",
        ),
        _patch(
            targets=(f"{_STATES}._gather_state_dict",),
            reason="``get_model_state_dict`` and the like with ``full_state_dict=True`` give one rank's shard",
            make=checkpoints.gathering,
            everywhere=True,
            after=_STATES,
        ),
        *(
            _patch(
                targets=(target,),
                reason="`torch.func` and forward-mode AD give wrong numbers: what they wrap is a plain local tensor, "
                "and collectives see no tangents",
                make=make,
            )
            for target, make in {
                "torch._functorch.eager_transforms._wrap_for_grad": levels.refusing_dtensors,
                "torch._functorch.eager_transforms._wrap_functional_tensor": levels.refusing_dtensors,
                "torch._functorch.vmap._add_batch_dim": levels.refusing_dtensors,
                "torch._vmap_internals._create_batched_inputs": levels.following,
                "torch.autograd.forward_ad.enter_dual_level": levels.following,
            }.items()
        ),
        _patch(
            targets=(f"{_FSDP2}._fsdp_param_group.FSDPParamGroup.__init__",),
            reason="``fully_shard`` changes some parameters of a module before it finds one that cannot be sharded",
            make=fully_sharded.checking_parameters,
            check=takes(f"self params modules {_OF_PARAMETERS}"),
            after=f"{_FSDP2}._fsdp_param_group",
        ),
        _patch(
            targets=(f"{_FSDP2}._fsdp_param.FSDPParam.__init__",),
            reason="``fully_shard`` cuts distributed parameters by operations that differ from rank to rank, and hangs",
            make=fully_sharded.converting_parameter,
            check=takes(f"self param module_info {_OF_PARAMETERS}"),
            after=f"{_FSDP2}._fsdp_param",
        ),
        _optional(
            targets=(f"{_FSDP2}._fsdp_common.DataParallelMeshInfo.__post_init__",),
            reason="``fully_shard`` takes this library's meshes for torch's, and fails where it looks closer",
            make=fully_sharded.taking_meshes,
            check=takes("self"),
            after=f"{_FSDP2}._fsdp_common",
        ),
    ],
    classes=lambda: [State.tensor_class],
    switch=allow_dtensors,
)
