"""The MindSpore platform: PyNative mode, CPU with mccl and Ascend with hccl."""

from __future__ import annotations

import importlib.util
from typing import Any

import mindspore
from mindspore import Parameter, Tensor

from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.mindspore.basics.dtypes import DISCRETE
from hyper_parallel.platform.mindspore.dtensor_class import make_dtensor_class
from hyper_parallel.platform.mindspore.fast import MindSporeFast
from hyper_parallel.platform.mindspore.gradients.autograd import AutogradVerbs
from hyper_parallel.platform.mindspore.handlers import scaled_attention
from hyper_parallel.platform.mindspore.local_tensors import LocalVerbs
from hyper_parallel.platform.mindspore.modules import ModuleVerbs
from hyper_parallel.platform.mindspore.op_table import OPS, PASS_THROUGH, VARIANTS
from hyper_parallel.platform.mindspore.patches import PATCHES, WATCHING
from hyper_parallel.platform.mindspore.processes.collectives import CollectiveVerbs
from hyper_parallel.platform.mindspore.processes.launch import GroupVerbs, device_target
from hyper_parallel.platform.mindspore.state import StateVerbs
from hyper_parallel.platform.mindspore.tensors import following
from hyper_parallel.platform.mindspore.tensors.observation import ObservationVerbs
from hyper_parallel.platform.mindspore.tensors.parameter import Classes
from hyper_parallel.platform.mindspore.tensors.tensor import InterceptedTensor, NoDispatch
from hyper_parallel.platform.versions import warn_of_untested

__all__ = ["MindSporePlatform"]


class MindSporePlatform(
    ModuleVerbs, GroupVerbs, CollectiveVerbs, AutogradVerbs, LocalVerbs, StateVerbs, ObservationVerbs, Platform
):
    """MindSpore backend. The groups of verbs are in the modules of this package; interception is here."""

    name = "mindspore"
    device_type = "cpu"
    comm_backend = "mccl"
    extremes_keep_nan = False  # a NaN is lost unless it comes first
    keeps_memory_order = False
    copies_offsets = True
    counts_writes = False  # optimizers and `ops.assign` write without counting

    attention_calls: Any = staticmethod(scaled_attention.attention_calls)

    def __init__(self) -> None:
        warn_of_untested("mindspore", mindspore.__version__)
        self.fast = MindSporeFast(self)
        self.frees_storage = device_target() == "CPU"  # on Ascend, pending kernels may still read the memory
        if device_target() == "Ascend":
            self.device_type = "npu"  # type: ignore[misc]
            self.comm_backend = "hccl"  # type: ignore[misc]

    @classmethod
    def unavailable_reason(cls) -> str | None:
        if importlib.util.find_spec("mindspore") is None:
            return "mindspore is not installed"
        return None

    make_dtensor_class: Any = staticmethod(make_dtensor_class)
    no_dispatch: Any = staticmethod(NoDispatch)
    follow: Any = staticmethod(following.follow)
    write_mark: Any = staticmethod(following.write_mark)
    op_table: Any = OPS
    watching = WATCHING

    def wrap(self, local: Tensor, layout: Any) -> Any:
        if isinstance(local, (InterceptedTensor, Parameter)):
            # An operation returned its argument: that object has its own layout.
            if getattr(local, "_layout", None) is layout:
                return local
            local = self.alias(local)
        if local._requires_grad and local.dtype in DISCRETE:
            # MindSpore sets it on a mask of a tensor that requires a gradient, unless it is empty: ranks would differ.
            local = self.detach(local)
        local.__class__ = Classes.dtensor
        local._layout = layout
        return local

    def device_count(self) -> int:
        return 1 if device_target() == "CPU" else int(mindspore.hal.device_count())

    def patched_names(self) -> list[str]:
        return [target for patch in PATCHES.patches for target in patch.targets]

    def synchronize(self) -> None:
        mindspore.runtime.synchronize()

    def differentiate(self, call: Any, parameters: Any) -> Any:
        trained = [p for p in parameters if p.requires_grad]
        if not trained:
            call()
            return [None] * len(parameters)
        _, found = mindspore.value_and_grad(call, None, weights=tuple(trained))()
        gradients = {
            id(p): g
            if getattr(p, "_layout", None) is None or hasattr(g, "_layout")
            else self.wrap(g, p._layout.cotangent)
            for p, g in zip(trained, found, strict=True)
        }
        return [gradients.get(id(p)) for p in parameters]

    def why_no_rule(self, function: Any) -> str | None:
        name = function if isinstance(function, str) else getattr(function, "name", None)
        if name in PASS_THROUGH or name in VARIANTS:
            return "the backend reads this from the local tensor, or composes it of operations with rules"
        return None
