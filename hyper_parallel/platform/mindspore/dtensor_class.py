"""Construction of the DTensor class of MindSpore."""

from __future__ import annotations

from mindspore import Parameter, Tensor

from hyper_parallel.platform.contract import Core
from hyper_parallel.platform.mindspore.basics.empty_shards import use_rules
from hyper_parallel.platform.mindspore.handlers.likes import NEW_METHODS
from hyper_parallel.platform.mindspore.handlers.plain_inside import METHODS
from hyper_parallel.platform.mindspore.patches import PATCHES
from hyper_parallel.platform.mindspore.tensors.parameter import Classes, DistributedParameter
from hyper_parallel.platform.mindspore.tensors.tensor import InterceptedTensor

__all__ = ["make_dtensor_class"]


def make_dtensor_class(mixin: type, core: Core) -> type:
    """Make the DTensor class from core's ``mixin`` and `InterceptedTensor`, and the class of distributed parameters.

    All MindSpore platforms share the classes; the first call makes them. Tensors of a second class would not take the
    fast paths of modules. Then ranks could issue different collectives.
    """
    if Classes.dtensor is not None:
        return Classes.dtensor
    names = {"__doc__": mixin.__doc__, "__module__": mixin.__module__}
    members = {**names, **NEW_METHODS, **METHODS}
    InterceptedTensor._core, InterceptedTensor._dispatch = core, staticmethod(core.dispatch)  # type: ignore[assignment]
    use_rules(core.dispatch)
    dtensor = type(Tensor)("DTensor", (mixin, InterceptedTensor), members)
    parameter = type(Tensor)(
        "DTensorParameter",
        (DistributedParameter, dtensor, Parameter, Tensor),
        {**names, "__init__": Parameter.__init__},
    )
    Classes.dtensor, Classes.parameter = dtensor, parameter
    Parameter._get_base_class(Tensor)  # makes the class of plain parameters, otherwise made with the first one
    try:
        PATCHES.install()
    except RuntimeError:
        Classes.dtensor = Classes.parameter = None  # every later attempt must raise too
        raise
    return dtensor
