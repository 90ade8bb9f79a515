"""See it before it runs: `explain`, `dry_run`, `search` and `check_plan`.

A dry run is the real core on a platform that sends nothing (`hyper_parallel.platform.dry`), with tensors that have
shapes and no data where the framework has such. No process group is made, and the number of ranks costs nothing.
"""

from hyper_parallel.explain.api import Explanation, explain
from hyper_parallel.explain.step import DryStep, DryStepError

__all__ = ["DryStep", "DryStepError", "Explanation", "explain"]
