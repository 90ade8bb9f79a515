"""An MLP so small that arithmetic hardly counts."""

from __future__ import annotations

from benchmarks.report import Result
from benchmarks.sizes import MlpSizes
from benchmarks.timing import Effort
from benchmarks.torch_groups import fake_group
from benchmarks.torch_passes import FORWARD, FORWARD_AND_BACKWARD, NO_GRAD, limits, time_pass
from benchmarks.torch_versions import mlp_versions

__all__ = ["run"]

RANKS = 4


def run(effort: Effort, device: str = "cpu") -> Result:
    """Forward, forward and backward, and forward under no_grad."""
    sizes = MlpSizes()
    result = Result("mlp", f"MLP {sizes}, {RANKS} ranks of a fake process group, float32.")
    with fake_group(RANKS):
        versions = mlp_versions(sizes, device)
        for name, goals in ((FORWARD, (0.60, 1.0, 1.5)), (FORWARD_AND_BACKWARD, (0.78, 1.0, 1.5)), (NO_GRAD, ())):
            table = time_pass("MLP", name, versions, effort, device)
            result.tables.append(table)
            result.goals += limits(table, *goals) if goals else []
    return result
