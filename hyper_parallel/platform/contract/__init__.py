"""The contract between ``hyper_parallel.core`` and a backend: the base class `Platform`, in roles, a file each.

A backend is one subclass of `Platform`. Core calls no function of a framework but the verbs declared here. A backend
must implement:

* `modules` - which modules are linear, embedding or norm layers; walking and changing a tree of modules; hooks.
* `groups` - initialisation, process groups, reports about lost ranks.
* `collectives` - on plain local tensors, outside autograd. `supports` reports which of them the backend has. Core
  emulates the others in one place, `core.communication.collectives`.
* `autograd` - one way to define a function with a forward and a backward.
* `passes` - start and end of backward passes, and memory that is freed between forward and backward; optional.
* `attention` - attention to a shard of the keys, for sequences that are sharded over ranks; optional.
* `tensors` - types and checks, and the few local operations that redistribution and losses need.
* `storage` - tensors that share memory, and writes to tensors.
* `interception` - a tensor class whose operations arrive at core's `Dispatch`, and a guard that turns that off. A table
  maps native operations to the canonical ones of `core.rules`; `dispatch` declares its rows.
* `devices` - this rank's device, factories, random numbers.
* `observation` - the modules and collectives of the program, for observers.
* `compiled` - the facts about styles that a compiler of the framework needs; optional.
* `state` - the tensors of modules and optimizers that a checkpoint saves.
* `dry` - tensors with shapes and without data, and the cost of operations on them.

`core` is the other direction: the functions that core hands to the backend, which imports nothing of core. `fast` is
optional: verbs for speed alone. `hyper_parallel.platform.torch.base` and `hyper_parallel.platform.mindspore.base` are
the two examples to learn from.
"""

from __future__ import annotations

from typing import ClassVar

from hyper_parallel.platform.contract.attention import AttentionRole
from hyper_parallel.platform.contract.autograd import AutogradRole, cached_view
from hyper_parallel.platform.contract.collectives import CollectiveRole
from hyper_parallel.platform.contract.compiled import ClassShards, CompilerRole
from hyper_parallel.platform.contract.core import Core
from hyper_parallel.platform.contract.devices import DeviceRole
from hyper_parallel.platform.contract.dispatch import Dispatch, NativeOp
from hyper_parallel.platform.contract.dry import DryRole, Usage
from hyper_parallel.platform.contract.fast import NOTHING_FASTER, Fast, LinearCollective
from hyper_parallel.platform.contract.groups import GroupRole, NativeGroup, NativeMesh
from hyper_parallel.platform.contract.interception import InterceptionRole
from hyper_parallel.platform.contract.modules import ModuleKind, ModuleRole
from hyper_parallel.platform.contract.observation import ObservationRole
from hyper_parallel.platform.contract.passes import PassRole
from hyper_parallel.platform.contract.programs import Comparison, Conversions, Program
from hyper_parallel.platform.contract.state import OptimizerState, StateRole
from hyper_parallel.platform.contract.storage import StorageRole
from hyper_parallel.platform.contract.tensors import TensorRole

__all__ = [
    "ClassShards",
    "NOTHING_FASTER",
    "Comparison",
    "Conversions",
    "Core",
    "Dispatch",
    "Fast",
    "LinearCollective",
    "ModuleKind",
    "NativeGroup",
    "NativeMesh",
    "NativeOp",
    "OptimizerState",
    "Platform",
    "Program",
    "Usage",
    "cached_view",
]


class Platform(
    ModuleRole,
    CompilerRole,
    GroupRole,
    CollectiveRole,
    AutogradRole,
    PassRole,
    TensorRole,
    AttentionRole,
    StorageRole,
    InterceptionRole,
    DeviceRole,
    StateRole,
    ObservationRole,
    DryRole,
):
    """Interface that core requires of a backend: the union of the roles. Each backend has one instance per process,
    which `hyper_parallel.get_platform` returns.

    Example:
        >>> from hyper_parallel import get_platform
        >>> platform = get_platform("torch-cpu")  # doctest: +SKIP
        >>> platform.name, platform.device_type, platform.comm_backend  # doctest: +SKIP
        ('torch-cpu', 'cpu', 'gloo')
    """

    #: Name in the registry and in ``HYPER_PARALLEL_PLATFORM``, for example ``"torch-cpu"``.
    name: ClassVar[str]
    #: Default communication backend, for example ``"gloo"``.
    comm_backend: ClassVar[str]
    #: Optional verbs that affect speed alone, not results.
    fast: Fast | None = None

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Return a sentence that says why this backend cannot run here, or None when it can. The check imports no more
        than it needs."""
        return None
