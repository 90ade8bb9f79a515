"""Predict a training step before it runs: `explain`, `dry_run`, `search` and `check_plan`.

A dry run executes the real core on a platform that sends nothing (`hyper_parallel.platform.dry`). Its tensors have
shapes but no data, if the framework has such tensors. No process group is created, and a large number of ranks costs
nothing.
"""

from hyper_parallel.planning.balance import expert_shares
from hyper_parallel.planning.estimate import DryRun, dry_run
from hyper_parallel.planning.explanation import Explanation, explain
from hyper_parallel.planning.machines import MACHINES, Machine, machine_of, register_machine
from hyper_parallel.planning.searching import SearchResult, search
from hyper_parallel.planning.step import DryStep, DryStepError

__all__ = [
    "MACHINES",
    "DryRun",
    "DryStep",
    "DryStepError",
    "Explanation",
    "Machine",
    "SearchResult",
    "dry_run",
    "expert_shares",
    "explain",
    "machine_of",
    "register_machine",
    "search",
]
