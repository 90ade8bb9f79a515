"""What torch wants from a tensor besides the operations of the op table. The modules fill `tensor.HANDLERS`."""

from hyper_parallel.platform.torch.handlers import (
    communication,
    composed,
    composed_index,
    composed_shapes,
    composite,
    foreach,
    gradients,
    metadata,
    random,
)
from hyper_parallel.platform.torch.handlers.copying import deepcopy_dtensor, reduce_dtensor
from hyper_parallel.platform.torch.handlers.unknown import recover, run_unknown

__all__ = [
    "communication",
    "composed",
    "composed_index",
    "composed_shapes",
    "composite",
    "deepcopy_dtensor",
    "foreach",
    "gradients",
    "metadata",
    "random",
    "recover",
    "reduce_dtensor",
    "run_unknown",
]
