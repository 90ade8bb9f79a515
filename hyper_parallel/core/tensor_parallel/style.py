"""The styles of a parallelisation plan. Mirrors ``torch.distributed.tensor.parallel.style``.

Every style does the same three things. It distributes the module's parameters. It brings the inputs to the layout that
the module needs. It brings the outputs to the layout that the plan asks for. `ModuleStyle` does them from a style's
data.
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
