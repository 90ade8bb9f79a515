"""Handlers for calls on torch's tensors other than operations of the op table. The modules fill `tensor.HANDLERS`."""

from hyper_parallel.platform.torch.handlers import (
    attention,
    bodies,
    communication,
    composed,
    composed_lookups,
    composed_picks,
    composed_shapes,
    composite,
    flex_attention,
    foreach,
    gradient_hooks,
    gradients,
    layers,
    losses,
    metadata,
    norms,
    random,
    recurrent,
)
from hyper_parallel.platform.torch.handlers.copying import deepcopy_dtensor, reduce_dtensor
from hyper_parallel.platform.torch.handlers.unknown import recover, run_unknown

__all__ = [
    "attention",
    "bodies",
    "communication",
    "composed",
    "composed_lookups",
    "composed_picks",
    "composed_shapes",
    "composite",
    "deepcopy_dtensor",
    "flex_attention",
    "foreach",
    "gradient_hooks",
    "gradients",
    "layers",
    "losses",
    "metadata",
    "norms",
    "random",
    "recurrent",
    "recover",
    "reduce_dtensor",
    "run_unknown",
]
