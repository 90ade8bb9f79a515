"""What torch wants from a tensor besides the operations of the op table. The modules fill `tensor.HANDLERS`."""

from hyper_parallel.platform.torch.handlers import composite, foreach, gradients, metadata, random
from hyper_parallel.platform.torch.handlers.clipping import hook_clipping
from hyper_parallel.platform.torch.handlers.copying import deepcopy_dtensor, rebuild_dtensor, reduce_dtensor
from hyper_parallel.platform.torch.handlers.functions import hook_autograd_functions
from hyper_parallel.platform.torch.handlers.optimizers import hook_optimizers
from hyper_parallel.platform.torch.handlers.unknown import run_unknown

__all__ = [
    "composite",
    "deepcopy_dtensor",
    "foreach",
    "gradients",
    "hook_autograd_functions",
    "hook_clipping",
    "hook_optimizers",
    "metadata",
    "random",
    "rebuild_dtensor",
    "reduce_dtensor",
    "run_unknown",
]
