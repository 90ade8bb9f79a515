"""The styles of a parallelisation plan. Mirrors ``torch.distributed.tensor.parallel.style``.

A style distributes the parameters of a module. It redistributes the inputs to the placements that the module needs,
and the outputs to those that the plan declares. `ModuleStyle` does this from the placements that a style declares.
"""

from hyper_parallel.core.tensor_parallel.styles.base import ModuleStyle, ParallelStyle
from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
from hyper_parallel.core.tensor_parallel.styles.context import ContextParallel
from hyper_parallel.core.tensor_parallel.styles.experts import ExpertParallel
from hyper_parallel.core.tensor_parallel.styles.head_norm import HeadNormParallel
from hyper_parallel.core.tensor_parallel.styles.parameters import ParameterParallel
from hyper_parallel.core.tensor_parallel.styles.prepare import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from hyper_parallel.core.tensor_parallel.styles.replicated import NoParallel
from hyper_parallel.core.tensor_parallel.styles.rowwise import RowwiseParallel
from hyper_parallel.core.tensor_parallel.styles.sequence import SequenceParallel
from hyper_parallel.core.tensor_parallel.styles.style_names import register_style

__all__ = [
    "ColwiseParallel",
    "ContextParallel",
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
