"""Import path of `DTensor` and of the functions that create one. The code is in `tensor` and `api`."""

from hyper_parallel.core.dtensor.api import distribute_module, distribute_parameter, distribute_tensor
from hyper_parallel.core.dtensor.tensor import DTensor

__all__ = ["DTensor", "distribute_module", "distribute_parameter", "distribute_tensor"]
