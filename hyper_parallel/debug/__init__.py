"""Looking at what the library does: `CommDebugMode` counts collectives, `check_ranks` compares them over the ranks."""

from hyper_parallel.core.dtensor.rank_check import check_ranks
from hyper_parallel.debug.comm_mode import CommDebugMode

__all__ = ["CommDebugMode", "check_ranks"]
