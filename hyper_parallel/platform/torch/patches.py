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
from hyper_parallel.platform.torch import checkpoints, class_losses, fully_shard, levels, wrappers
from hyper_parallel.platform.torch.handlers import clipping, copying, functions, optimizers
from hyper_parallel.platform.torch.tensor import State, allow_dtensors

__all__ = ["PATCHES"]

_TESTED = "2.13 to 2.15"
_STATES = "torch.distributed._state_dict_utils"
_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_param"


def _step(name: str) -> Patch:
    return Patch(
        targets=(f"torch.optim.{name}.step",),
        reason="steps are right and slow: every operation of the optimizer is intercepted, parameter by parameter",
        versions=_TESTED,
        make=optimizers.local_step,
        check=takes("self closure"),
        required=False,
        rewrapped=optimizers.without_local_step,
    )


def _init_group(name: str) -> Patch:
    return Patch(
        targets=(f"torch.optim.{name}._init_group",),
        reason="steps on local tensors take longer: torch asks each parameter for its state, over and over",
        versions=_TESTED,
        make=partial(optimizers.collect_locals, aliases=name not in optimizers.STORES),
        required=False,
    )


def _supported_types(module: str) -> Patch:
    return Patch(
        targets=(f"{module}._foreach_supported_types[]",),
        reason="optimizers, and clipping by norm, take parameters one by one and not as lists: an all-reduce for each",
        versions=_TESTED,
        make=lambda types: State.tensor_class,
        held="absent",
        required=False,
    )


def _clipping(private: str, public: str, make: Callable[[Any], Any], parameters: str) -> Patch:
    """A function where it is defined, and so called by the others, and where users find it."""
    return Patch(
        targets=(f"torch.nn.utils.clip_grad.{private}", f"torch.nn.utils.{public}"),
        reason="clipping is right and slow, every operation intercepted; an error with parameters on several meshes",
        versions=_TESTED,
        make=make,
        check=takes(parameters),
        required=False,
    )


def _class_loss(name: str) -> Patch:
    return Patch(
        targets=(f"torch.nn.functional.{name}",),
        reason="plain logits of a column-parallel head, this rank's part of the classes, are taken for all of them",
        versions=_TESTED,
        make=class_losses.whole_classes_only,
        required=False,
    )


def _transform(target: str, make: Callable[[Any], Any]) -> Patch:
    return Patch(
        targets=(target,),
        reason="`torch.func` and forward-mode AD give wrong numbers: what they wrap is a plain local tensor, and "
        "collectives see no tangents",
        versions=_TESTED,
        make=make,
    )


PATCHES = PatchSet(
    "torch",
    torch.__version__,
    [
        Patch(
            targets=("torch.autograd.Function.apply",),
            reason="``backward`` of a user's function gets plain local gradients beside distributed saved tensors",
            versions=_TESTED,
            make=functions.hooked_apply,
        ),
        *map(_step, optimizers.ELEMENTWISE),
        *map(_init_group, optimizers.ELEMENTWISE),
        Patch(
            targets=("torch.optim.Optimizer.zero_grad",),
            reason="clearing gradients takes longer: each is made distributed first",
            versions=_TESTED,
            make=optimizers.clear_locally,
            check=takes("self set_to_none"),
            required=False,
        ),
        Patch(
            targets=("torch.nn.modules.module._global_module_registration_hooks[hyper_parallel]",),
            reason="DistributedDataParallel over ranks with different shards averages these, DataParallel copies them",
            versions=_TESTED,
            make=wrappers.watch_wrappers,
            held="absent",
        ),
        _supported_types("torch.optim.optimizer"),
        _supported_types("torch.utils._foreach_utils"),
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
        *map(_class_loss, ("cross_entropy", "nll_loss")),
        Patch(
            targets=("torch._weights_only_unpickler._marked_safe_globals_set[]",),
            reason="``torch.load(weights_only=True)`` refuses DTensors",
            versions=_TESTED,
            make=lambda safe: copying.needed_to_load(),
            held="absent",
            required=False,
        ),
        Patch(
            targets=(f"{_STATES}._gather_state_dict",),
            reason="``get_model_state_dict`` and the like with ``full_state_dict=True`` give one rank's shard",
            versions=_TESTED,
            make=checkpoints.gathering,
            everywhere=True,
            after=_STATES,
        ),
        _transform("torch._functorch.eager_transforms._wrap_for_grad", levels.refusing_dtensors),
        _transform("torch._functorch.eager_transforms._wrap_functional_tensor", levels.refusing_dtensors),
        _transform("torch._functorch.vmap._add_batch_dim", levels.refusing_dtensors),
        _transform("torch._vmap_internals._create_batched_inputs", levels.following),
        _transform("torch.autograd.forward_ad.enter_dual_level", levels.following),
        Patch(
            targets=(f"{_FSDP2}.FSDPParam._init_sharded_param",),
            reason="``fully_shard`` cuts distributed parameters by operations that differ from rank to rank, and hangs",
            versions=_TESTED,
            make=fully_shard.refuse_distributed_parameters,
            after=_FSDP2,
            required=False,
        ),
    ],
    classes=lambda: [State.tensor_class],
    switch=allow_dtensors,
)
