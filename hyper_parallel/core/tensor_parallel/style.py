"""The styles of a parallelisation plan. Mirrors ``torch.distributed.tensor.parallel.style``.

Every style does the same three things: it distributes the module's parameters, brings the inputs to the layout that the
module needs, and its outputs to the layout that the plan asks for. `ModuleStyle` does them from a style's data.
"""

from hyper_parallel.core.tensor_parallel.base import ModuleStyle, ParallelStyle
from hyper_parallel.core.tensor_parallel.colwise import ColwiseParallel
from hyper_parallel.core.tensor_parallel.experts import ExpertParallel
from hyper_parallel.core.tensor_parallel.head_norm import HeadNormParallel
from hyper_parallel.core.tensor_parallel.parameters import ParameterParallel
from hyper_parallel.core.tensor_parallel.prepare import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from hyper_parallel.core.tensor_parallel.replicated import NoParallel
from hyper_parallel.core.tensor_parallel.rowwise import RowwiseParallel
from hyper_parallel.core.tensor_parallel.sequence import SequenceParallel
from hyper_parallel.core.tensor_parallel.style_names import register_style

__all__ = [
    "ColwiseParallel",
    "ExpertParallel",
    "HeadNormParallel",
    "ModuleStyle",
    "NoParallel",
    "ParallelStyle",
    "ParameterParallel",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "register_style",
]
